"""The user's compressor and memory, applied to sparse gradients.

    1. duplicate rows are added up
    2. the memory adds its residuals of these rows; the values are compressed, the row numbers are sent uncompressed
    3. every rank decodes all payloads and adds them up row by row; the mean is over all ranks, also those without a row

Row numbers and values of all sparse variables travel in one collective. Payloads of other ranks have other numbers
of rows, so the ctx to decode them is that of a tensor of as many rows.
"""

import dataclasses
import math
from collections.abc import Sequence

from grace.core.compressor import Compressor, Ctx, Payload, Tensor
from grace.core.memory import Memory
from grace.errors import payload_of
from grace.exchange.bucket import Bucket
from grace.exchange.codec import PerVariableCodec
from grace.exchange.header import Header
from grace.exchange.sparse_rows import NOTHING, Gradient, SparseRows, sum_rows
from grace.exchange.tracing import recorder
from grace.kernels import Kernels, kernels_of
from grace.kernels.constants import ITEM_SIZE
from grace.kernels.wire_checks import check_count, check_range
from grace.memories.none import NoMemory
from grace.memories.residual import Residual


class RowCompressor(Compressor):
    """The user's compressor on the values of rows; the row numbers are the last tensor of the payload.

    Positions and codes are sent as bytes, because their dtype depends on the number of rows, in which ranks differ.
    """

    def __init__(self, inner: Compressor):
        self.inner = inner
        # Ranks differ in the number of rows.
        self.traits = dataclasses.replace(inner.traits, fixed_size="by data", summable=False, exact=False)
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shapes of the whole variables; the codecs of their buckets add them."""
        self.rows: dict[str, Tensor] = {}
        """Row numbers of the gradients that are about to be compressed."""
        self.received: dict[str, Tensor] = {}
        """Row numbers of the last aggregates."""

    @property
    def spec(self) -> str:
        """Spec of the inner compressor."""
        return self.inner.spec

    @property
    def noisy(self) -> bool:
        """False: the user has been warned of the inner compressor's noise."""
        return False

    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, Ctx]:
        k = kernels_of(tensor)
        payload, ctx = self.inner.compress(tensor, name)
        layout = self._layout(payload)
        each = zip(payload, layout, strict=True)
        coded = [part if is_floating(dtype) else k.to_bytes(part) for part, (dtype, _) in each]
        return [*coded, self.rows[name]], (ctx, tuple(tensor.shape), name, layout)

    def accumulate(self, payload: Payload, ctx: Ctx, out: Tensor, weight: float = 1.0) -> Tensor:
        return self.inner.accumulate(_from_bytes(payload[:-1], ctx[3]), ctx[0], out, weight)

    def context_of(self, count: int, shape: Sequence[int], name: str, like: Tensor) -> Ctx:
        """Return the ctx that decodes any rank's payload of ``count`` rows of this shape."""
        rows = (count, *shape)
        ctx = self.inner.ctx_of(name, rows, like)
        spec = self.inner.payload_spec(rows, self.inner.context.step)
        if ctx is None or spec is None:  # the method gives them only with a payload: compress zeros
            k = kernels_of(like)
            payload, ctx = self.inner.compress(k.zeros(rows, "float32", like), name)
            return ctx, rows, name, self._layout(payload)
        return ctx, rows, name, [(tensor.dtype, self._sizes(tensor.shape)) for tensor in spec]

    def _layout(self, payload: Payload) -> list[tuple[str, tuple[int, ...]]]:
        """Return dtypes and shapes of a payload; a first dimension of -1 means that the data decide it."""
        k = kernels_of(payload[0])
        return [(k.dtype(part), self._sizes(part.shape)) for part in payload]

    def _sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (-1, *shape[1:])[: len(shape)] if self.inner.traits.varies else tuple(shape)

    def aggregate(self, payloads: Sequence[Payload], ctx: Ctx, out: Tensor, count: float) -> Tensor:
        """Return the mean over all ranks of each distinct row, and store the row numbers in ``received``."""
        (own_rows, *shape), name = ctx[1:3]
        k, like = kernels_of(payloads[0][-1]), payloads[0][-1]
        sent = [(rank, payload) for rank, payload in enumerate(payloads) if not is_nothing(payload[-1])]
        if not sent:
            self.received[name] = k.zeros((0,), "int32", like)
            return k.zeros((0, *shape), "float32", like)
        rows, places = k.distinct(k.join([payload[-1] for _, payload in sent]))
        for rank, payload in sent if any_out_of_range(rows, self.shapes[name][0]) else ():
            with payload_of(rank):
                numbers = k.to_list(payload[-1])
                check_range(min(numbers, default=0), max(numbers, default=0), self.shapes[name][0], "row")
        total, start = k.zeros((rows.shape[0], *shape), "float32", like), 0
        for rank, payload in sent:
            n = payload[-1].shape[0]
            theirs = ctx if n == own_rows else self.context_of(n, shape, name, like)
            with payload_of(rank):
                values = self.accumulate(payload, theirs, k.zeros((n, *shape), "float32", like))
            total = k.add_rows(total, places[start : start + n], values, 1.0)
            start += n
        self.received[name] = rows
        return k.divide(total, total, count)


def is_nothing(rows: Tensor) -> bool:
    """Return True if these are the row numbers of a rank without rows."""
    return rows.shape[0] == 1 and kernels_of(rows).to_list(rows) == [NOTHING]


def any_out_of_range(rows: Tensor, n: int) -> bool:
    """Return True if one of the ascending row numbers is not in [0, n)."""
    k = kernels_of(rows)
    return any(not 0 <= row < n for row in k.to_list(k.join([rows[:1], rows[-1:]])))


def is_floating(dtype: str) -> bool:
    """Return True if a dtype is a floating one."""
    return dtype.startswith(("float", "bfloat"))


def _from_bytes(payload: Payload, layout: Sequence[tuple[str, tuple[int, ...]]]) -> Payload:
    """Return the inner compressor's payload; its tensors that are no floats were sent as bytes."""
    k, tensors = kernels_of(payload[0]), []
    for part, (dtype, shape) in zip(payload, layout, strict=True):
        if not is_floating(dtype):
            item = ITEM_SIZE[dtype] * math.prod(shape[1:])
            count = part.shape[0] // item
            check_count("bytes of codes", part.shape[0], count * item)
            part = k.from_bytes(k.join([part]), dtype, (count, *shape[1:])[: len(shape)])  # a copy, which is aligned
        if shape and shape[0] >= 0:
            check_count("rows or values", part.shape[0], shape[0])
        tensors.append(part)
    return tensors


class RowMemory(Memory):
    """Memory of a residual of the whole variable, which is read and written at the rows of each gradient."""

    def __init__(self, inner: Residual, compressor: RowCompressor):
        self.inner = inner
        self.compressor = compressor
        self.state = inner.state

    @property
    def spec(self) -> str:
        """Spec of the inner memory."""
        return self.inner.spec

    def keeps(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def compensate(self, tensor: Tensor, name: str) -> Tensor:
        k, beta, gamma = kernels_of(tensor), self.inner.beta, self.inner.gamma
        if name not in self.state or is_nothing(self.compressor.rows[name]):
            return k.combine(gamma, tensor, 0.0, tensor)
        return k.combine(beta, k.take_rows(self.state[name], self.compressor.rows[name]), gamma, tensor)

    def update(self, tensor: Tensor, name: str, compressor: Compressor, payload: Payload, ctx: Ctx) -> None:
        k = kernels_of(tensor)
        if is_nothing(payload[-1]):
            return
        left = compressor.accumulate(payload, ctx, tensor, -1.0)
        kept = self.state.get(name)
        if kept is None:
            kept = k.zeros(self.compressor.shapes[name], "float32", tensor)
        elif k.mutable:  # committed state must not change before the commit: copy
            kept = k.combine(1.0, kept, 0.0, kept)
        self.state[name] = k.put_rows(kept, payload[-1], left)


def unfit(compressor: Compressor, memory: Memory) -> str:
    """Return the reason why compressor and memory cannot serve sparse gradients; empty if they can."""
    if compressor.traits.rounds > 1:
        return f"{compressor.spec} exchanges a variable in several rounds"
    if compressor.votes:
        return f"{compressor.spec} votes element by element, over ranks that have other rows"
    if compressor.stateful:
        return f"{compressor.spec} keeps something of the whole variable"
    # RowMemory takes the place of a residual, and would not call the methods of a class derived from it.
    if type(memory) is not Residual and not isinstance(memory, NoMemory):
        return f"the memory {memory.spec} is one of whole variables (residual and none know rows)"
    return ""


class SparseGradientCodec(PerVariableCodec):
    """Codec of sparse gradients (embeddings): it adds up duplicate rows, and passes their numbers to the compressor.

    A second compression is one of rows, too: the root's answer holds all ranks' rows.
    """

    def __init__(self, bucket: Bucket, kernels: Kernels, on_device: bool = False):
        super().__init__(bucket, kernels, on_device)
        assert isinstance(self.compressor, RowCompressor)  # see grace.communicators.sparse
        self.rows = self.compressor
        self.answer_rows: RowCompressor | None = None
        shapes = {variable.name: variable.shape for variable in bucket.variables}
        self.rows.shapes.update(shapes)
        if self.mean_compression is not None:
            assert isinstance(self.mean_compression.compressor, RowCompressor)
            self.answer_rows = self.mean_compression.compressor
            self.answer_rows.shapes.update(shapes)

    def encode(self, gradients: Sequence[Gradient], header: Header) -> Tensor:
        self.rows.rows = {}
        return super().encode(recorder.each("sum rows", self.names, self._sum_rows, gradients), header)

    def _sum_rows(self, gradient: SparseRows, name: str) -> Tensor:
        values, self.rows.rows[name] = sum_rows(gradient)
        return values

    def _aggregate(self, i: int, payloads: list[Payload], out: Tensor | None, count: float, name: str) -> SparseRows:
        values = self.aggregated(payloads, self.encoded[i][1], None, count, name)
        return SparseRows(values, self.rows.received[name])

    def mean(self, i: int, payloads: list[Payload], name: str) -> Tensor:
        values = self.aggregated(payloads, self.encoded[i][1], None, self.context.size, name)
        k, rows = self.kernels, self.rows.received[name]
        if not rows.shape[0]:
            rows = k.full([NOTHING], "int32", rows)
            values = k.zeros((1, *values.shape[1:]), "float32", values)
        assert self.answer_rows is not None
        self.answer_rows.rows[name] = self.answer_rows.rows[f"{name}/answer"] = rows
        return values

    def _joined(self, i: int, payloads: list[Payload], out: Tensor | None, count: float, name: str) -> SparseRows:
        assert self.answer_rows is not None
        (payload,), variable = payloads, self.bucket.variables[i]
        rows, shape = payload[-1], variable.shape[1:]
        k = kernels_of(rows)
        if is_nothing(rows):
            return SparseRows(k.zeros((0, *shape), "float32", rows), rows[:0])
        with payload_of(variable=name):
            k.check_indices(rows, variable.shape[0])
            zeros = k.zeros((rows.shape[0], *shape), "float32", rows)
            ctx = self.answer_rows.context_of(rows.shape[0], shape, f"{name}/answer", rows)
            return SparseRows(self.answer_rows.accumulate(payload, ctx, zeros), rows)

    def poisoned(self, value: Gradient) -> SparseRows:
        return SparseRows(super().poisoned(value.values), value.rows)
