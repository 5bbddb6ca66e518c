"""Bytes of a bucket's round trip, computed from shapes before there is a gradient.

Strategies and the planner read them here; ``leg.sent`` returns the bytes that a rank sends for a buffer.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from grace.core.composition import Composed
from grace.core.compressor import AFTER_WARMUP, Compressor, TensorSpec
from grace.core.context import Context
from grace.core.route import CONCATENATE, Carries, EngineTraits, Leg, route_of
from grace.core.variable import Variable
from grace.exchange.bucket import Bucket
from grace.exchange.codec import PerVariableCodec
from grace.exchange.layout import Layout
from grace.exchange.sparse_codec import RowCompressor
from grace.kernels import NumpyKernels
from grace.kernels.constants import ITEM_SIZE
from grace.kernels.index_coding import coded_as

SIZE_BYTES = 8
"""Bytes of a number that holds a size."""


class LegBytes(NamedTuple):
    """Leg with the size of a rank's buffer.

    Attributes:
        leg: the leg.
        nbytes: bytes of the buffer.
        dtype: its dtype.
    """

    leg: Leg
    nbytes: float
    dtype: str = "uint8"


def predict_bytes(
    bucket: Bucket,
    engine: EngineTraits,
    bits: float | None = None,
    rows: Mapping[str, float] | None = None,
    headers: bool = True,
) -> list[LegBytes]:
    """Return the legs of a bucket's round trip, and the bytes of a rank's buffer in each.

    A delayed bucket sends the same bytes, a step or more later. Payloads that a communicator moves itself are counted
    as one all-gather after the leg of their header.

    Args:
        bucket: variables and communicator; the communicator need not be in a run.
        engine: the engine's traits.
        bits: bits per element if the data decide the size; for sparse variables, per element of a row. If left out, the
            most that a method of Grace sends: all values, and their positions.
        rows: number of rows in gradients of sparse variables, by name; all rows of variables that are not in it.
        headers: False to count payloads alone.

    >>> from grace.communicators import ScatterReduce
    >>> bucket = Bucket(0, ScatterReduce("qsgd"), [Variable("w", (100,))])
    >>> [(leg.collective.name, nbytes) for leg, nbytes, _ in predict_bytes(bucket, EngineTraits(4), headers=False)]
    [('alltoall', 116.0), ('allgather', 29.0)]
    """
    wires = _Wires(bucket, engine, bits, rows or {}, headers)
    route_of_wire = wires.communicator.route_of_wire
    route = route_of(route_of_wire, [wires.nbytes(one) for one in wires.rounds], engine, wires.codec.varies)
    found, number = [], 0
    for before, leg in zip([None, *route], route, strict=False):
        number += leg.carries is Carries.ROUND
        layout = wires.rounds[number]
        nbytes = wires.nbytes(layout)
        if leg.carries is Carries.SIZES:
            nbytes = wires.sizes
        elif leg.carries is Carries.MEANS:
            nbytes = wires.nbytes(wires.means)
        elif leg.carries is Carries.GRADIENTS and wires.communicator.piecewise:
            nbytes *= engine.ranks
        elif leg.collective is CONCATENATE:
            nbytes += wires.sizes
        if leg.reduce_scatters or (before is not None and before.reduce_scatters):
            item = ITEM_SIZE[layout.dtype]
            nbytes += -nbytes % (engine.ranks * item) if headers else 0
            # The leg behind the first half of a reduce-scatter carries each rank's sum of one part.
            nbytes /= 1 if leg.reduce_scatters else engine.ranks
        found.append(LegBytes(leg, float(nbytes), layout.dtype))
    if wires.moved is not None:
        found.append(LegBytes(dataclasses.replace(route[-1], carries=Carries.GRADIENTS), wires.moved))
    return found if headers else [one for one in found if one.leg.carries not in (Carries.SIZES, Carries.HEADERS)]


def rows_of(variable: Variable, rows: Mapping[str, float]) -> float:
    """Return the number of rows in a gradient of a sparse variable: that in ``rows``, or all if it is not in it."""
    return min(rows.get(variable.name, math.inf), variable.shape[0])


class _Wires:
    """Layouts of a bucket's wires.

    Attributes:
        codec: the bucket's codec.
        communicator: a copy of the bucket's communicator, whose context is at a step after all warm-ups.
        rounds: the layout of the longest wire of each round.
        means: the layout of the means.
        sizes: bytes of the sizes of all payload tensors.
        moved: bytes of payloads that the communicator moves itself; None if they are in the wire.
    """

    def __init__(
        self, bucket: Bucket, engine: EngineTraits, bits: float | None, rows: Mapping[str, float], headers: bool
    ):
        self.bits, self.rows, self.headers, self.variables = bits, rows, headers, bucket.variables
        self.codec = self._codec(bucket, engine)
        self.communicator = self.codec.bucket.communicator
        self.compressor: Compressor = self.communicator.compressor
        self.rounds = [layouts[0] if layouts else self._estimate() for layouts in self.codec.known]
        means = self.codec.means_layouts()
        self.means = means[0] if means else self.rounds[0]
        self.sizes = SIZE_BYTES * sum(tensors_of(self.compressor, v.shape) for v in bucket.variables)
        self.moved = None
        if self.communicator.moves_payloads:
            self.moved = self._payloads()
            self.rounds = [Layout(NumpyKernels(), [[] for _ in bucket.variables], False, self.codec.stamps)]

    def nbytes(self, layout: Layout) -> float:
        """Return the bytes of a wire."""
        return layout.nbytes if self.headers else layout.total

    def _codec(self, bucket: Bucket, engine: EngineTraits) -> PerVariableCodec:
        """Return the codec that lays out the bucket's wires. If variables are cut it is that of the first owner, whose
        pieces are the longest."""
        communicator, variables, ranks = bucket.communicator, bucket.variables, engine.ranks
        if communicator.piecewise and communicator.codec_class is None:
            variables = [dataclasses.replace(v, shape=(-(-v.numel // ranks),)) for v in variables]
            ranks = 1
        communicator = communicator.with_context(Context(size=ranks, step=AFTER_WARMUP))
        own = Bucket(bucket.index, communicator, variables, carries_stamps=bucket.carries_stamps)
        codec: PerVariableCodec = (communicator.codec_class or PerVariableCodec)(own, NumpyKernels(), not engine.on_cpu)
        return codec

    def _estimate(self) -> Layout:
        """Return a layout of the expected size of a round's payloads, for methods whose sizes depend on the data."""
        spec = self.compressor.specs((1,), "float32", False, AFTER_WARMUP)[0]
        dtype = "uint8" if not self.communicator.sums else spec[0].dtype if spec else "float32"
        # Rounded first: a product of floats may lie a hair above a whole number.
        count = math.ceil(round(self._payloads() / self.compressor.traits.rounds / ITEM_SIZE[dtype], 3))
        payloads = [[TensorSpec(dtype, (count,))], *([] for _ in self.variables[1:])]
        return Layout(NumpyKernels(), payloads, self.communicator.sums, self.codec.stamps)

    def _payloads(self) -> float:
        return sum(map(self._payload, self.variables))

    def _payload(self, variable: Variable) -> float:
        """Return the bytes of one variable's payload, in all rounds."""
        compressor, shape = self.compressor, variable.shape
        if self.codec.exact:
            return variable.nbytes
        if not isinstance(compressor, RowCompressor):
            return self._compressed(compressor, shape)
        rows = rows_of(variable, self.rows)
        shape = (max(1, round(rows)), *shape[1:])
        return rows * (4 + self._compressed(compressor.inner, shape) / shape[0])

    def _compressed(self, compressor: Compressor, shape: tuple[int, ...]) -> float:
        n, bits = math.prod(shape), compressor.wire_bits(shape)
        bits = self.bits if bits is None else bits
        return 8 + (4 + ITEM_SIZE[coded_as(n)[0]]) * n if bits is None else bits * n / 8


def tensors_of(compressor: Compressor, shape: tuple[int, ...]) -> int:
    """Return the number of tensors in a payload; two (values and positions) for a method that does not declare it.

    >>> from grace.core.registry import make
    >>> tensors_of(make("compressor", "threshold"), (10,)), tensors_of(make("compressor", "dgc | efsignsgd"), (10,))
    (2, 3)
    """
    if isinstance(compressor, RowCompressor):
        return 1 + tensors_of(compressor.inner, shape)
    if isinstance(compressor, Composed):  # the second method's payload replaces the values
        return tensors_of(compressor.sparsifier, shape) + tensors_of(compressor.values, shape) - 1
    if compressor.traits.exact:
        return 1
    spec = compressor.round_specs(shape, AFTER_WARMUP)[0]
    return 2 if spec is None else len(spec)
