"""Times and errors of methods, measured on gradients by one process: it encodes and decodes in real exchanges, over
simulated ranks."""

import contextlib
import copy
import itertools
import math
import random
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from grace.backends.simulated import SimulatedRanks
from grace.core.communicator import Communicator
from grace.core.compressor import Compressor, Tensor
from grace.core.context import Context
from grace.core.variable import Variable
from grace.errors import ConfigError, PayloadError
from grace.exchange.sparse_rows import SparseRows
from grace.kernels import kernels_of
from grace.planner.costs import CodecCost, Cost, fit
from grace.planner.exchange_costs import codec_key
from grace.planner.step_timer import undisturbed
from grace.session.sharding import Chooser, Shard
from grace.session.step_runner import StepRunner

PROBE, MOST_ELEMENTS = 1 << 18, 1 << 24
"""Elements of the bucket that is timed first, to see how many can be, and the most of one."""
PIECES, PIECE = 32, 256
"""Variables of the bucket that tells what a variable costs, and their elements; one of them tells a bucket's cost."""
MOST_RANKS = 8
"""Ranks that are simulated."""
WARM, LEAST, MOST = 2, 3, 9
"""Steps that are not timed (a bucket's codec is found in the first one), and how many are."""
DRAWS = 3
"""Seeds that a random method's error is the mean of."""
SMALL = 1 << 12
"""Elements of a variable that its error is measured on at least."""
TABLE_SAMPLE = 4096
"""Rows that are looked at, to tell tables."""
BEHIND_WARMUPS = 1 << 31
"""The step that methods are measured at: a warm-up sends more at first, for a small part of a run."""
Tensors = Mapping[str, Tensor]
Parts = tuple[float, float, float]
"""Seconds of the three parts of a codec: start, middle and finish."""


@dataclass(frozen=True)
class MeasuredMethod:
    """Measurements of a method: the key of its codec; the codec; and |x - C(x)|^2 / |x|^2 of each variable that it
    shrinks, of what one rank alone sends, without a memory; the mean of some seeds for random methods."""

    method: str
    codec: CodecCost
    errors: Mapping[str, float]


def measure(
    communicator: Communicator, gradients: Mapping[str, Tensor], ranks: int, seed: int = 0, limit_seconds: float = 1.0
) -> MeasuredMethod:
    """Run real exchanges of these gradients over simulated ranks, and time what they compute.

    A bucket of all variables is timed, because what a method takes depends on shapes and values, and on caches that do
    not hold them; and one of many small pieces, and one of a single piece, so that what a bucket, a variable and an
    element take is told apart. Of large models a part is taken, so that it takes about ``limit_seconds`` (and, the
    first time, what compiling loops takes besides). Gradients are copied, never changed.

    Args:
        communicator: the method; copies of it are measured, so that it stays unused.
        gradients: by variable name: tensors of any framework, or sparse rows, of which the values are taken.
        ranks: how many will exchange.

    Raise ConfigError if there is no gradient that the method makes smaller, or one that holds a NaN.

    >>> from grace.communicators.choice import build_communicator
    >>> x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    >>> found = measure(build_communicator("fp16", None, None), {"w": x}, ranks=2, limit_seconds=0.05)
    >>> found.method, 0 < found.errors["w"] < 1e-6
    ('allreduce, cast, none', True)
    """
    method, choose = codec_key(communicator), Chooser()
    tensors = {name: _dense_values(name, x) for name, x in gradients.items()}
    smaller = {
        name: x for name, x in tensors.items() if _numel(x) and choose(_variable(name, x), communicator) is communicator
    }
    if not smaller:
        raise ConfigError(f"{method} makes none of these {len(tensors)} gradients smaller; give it larger ones")
    timing = _CodecTiming(communicator, ranks, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of exchanges that no user sees
        try:
            runs = [timing.largest_part(smaller, limit_seconds / 2)]
        except PayloadError:  # owners of ranges, which differ, cannot all send the same; those of one variable's can
            runs = [timing.largest_part({"x": max(smaller.values(), key=_numel)}, limit_seconds / 2)]
        whole, took = runs[0]
        given = list(whole.values())
        pieces = {f"x{i}": _first_rows(given[i % len(given)], PIECE) for i in range(PIECES)}
        with contextlib.suppress(PayloadError):
            for few in (pieces, {"x0": pieces["x0"]}):
                runs.append((few, timing.seconds(few, limit_seconds / 8)))
        each = max(1e-12, sum(took) / _elements(whole))
        share = min(1.0, limit_seconds / 4 / DRAWS / (each * _elements(smaller)))
        taken = {name: _first_rows(x, max(SMALL, math.ceil(share * _numel(x)))) for name, x in smaller.items()}
        errors, bits = _lost_and_sent(communicator.compressor, taken, seed)
    return MeasuredMethod(method, timing.codec(runs, bits), errors)


def _lost_and_sent(compressor: Compressor, tensors: Tensors, seed: int) -> tuple[dict[str, float], float | None]:
    """Return |x - C(x)|^2 / |x|^2 of each tensor, 0 where x is, and the bits of an element on the wire; None where the
    shape decides them."""
    if compressor.traits.exact:
        return dict.fromkeys(tensors, 0.0), None
    drawn: list[dict[str, float]] = []
    sent = 0
    for draw in range(DRAWS):
        made: Compressor = copy.deepcopy(compressor).with_context(Context(seed=seed + draw, step=BEHIND_WARMUPS))
        drawn.append({})
        for name, x in tensors.items():
            payload, ctx = made.compress(_copied(x, "float32"), name)
            sent += sum(kernels_of(part).nbytes(part) for part in payload)
            drawn[-1][name] = _relative_error(x, made.decompress(payload, ctx))
        if draw and drawn[0] == drawn[1]:  # it draws nothing
            break
    varies = any(compressor.wire_bits(tuple(x.shape)) is None for x in tensors.values())
    bits = 8 * sent / len(drawn) / _elements(tensors) if varies else None
    return {name: fmean(errors[name] for errors in drawn) for name in tensors}, bits


class _CodecTiming:
    """Exchanges of one method over simulated ranks that are timed, each by a copy that remembers nothing. As many ranks
    are simulated as the communicator was made for, or as there are, but few."""

    def __init__(self, communicator: Communicator, ranks: int, seed: int):
        self.communicator, self.seed = communicator, seed
        root = getattr(communicator, "root", 0)
        self.root = root if isinstance(root, int) else 0
        """The rank that computes for others; 0 if there is none."""
        self.ranks = communicator.made_for or max(2, self.root + 1, min(ranks, MOST_RANKS))

    def largest_part(self, tensors: Tensors, seconds: float) -> tuple[Tensors, Parts]:
        """Return the part of all tensors that can be timed for so long, all of them if possible, and what it took.

        It has whole tensors, and rows of one, because what an element takes depends on the shape.
        """
        elements, names = PROBE, random.Random(0).sample(list(tensors), len(tensors))
        while True:
            taken, left = dict[str, Tensor](), elements
            for name in names:
                if left > 0:
                    taken[name] = _first_rows(tensors[name], left)
                    left -= _numel(taken[name])
            took = self.seconds(taken, 0.0, least=1)  # tells how many elements the time suffices for
            most = _elements(taken) * seconds / (WARM + LEAST) / max(sum(took), 1e-9)
            if elements >= _elements(tensors) or elements * 4 > min(most, MOST_ELEMENTS):
                return taken, self.seconds(taken, seconds)
            elements *= 4

    def seconds(self, tensors: Tensors, seconds: float, least: int = LEAST) -> Parts:
        """Return the seconds of start, of what lies between two collectives, and of finish, for a bucket of these: the
        lower quartiles of steps, because what else a machine does makes them longer only. Steps are made for so many
        seconds, and ``least`` of them in any case."""
        communicator = copy.deepcopy(self.communicator)  # memories of one bucket must not serve another
        backend = SimulatedRanks(self.ranks, self.root)
        variables = [_variable(name, x) for name, x in tensors.items()]
        shards = [Shard(variable, variable, communicator) for variable in variables]
        context = Context(seed=self.seed, step=BEHIND_WARMUPS)
        runner = StepRunner(variables, shards, backend, context, communicator.describe())
        k, exact = kernels_of(next(iter(tensors.values()))), communicator.compressor.traits.exact
        outs: dict[str, Tensor | None] = {
            name: _copied(x, k.dtype(x) if exact else "float32") if k.mutable else None for name, x in tensors.items()
        }
        took: list[Parts] = []
        ends = math.inf
        try:
            runner.agree()
            for step in range(WARM + MOST):
                if step == WARM:
                    ends = time.perf_counter() + seconds
                parts = self._step(runner, backend, tensors, outs)
                if step >= WARM:
                    took.append(parts)
                if step >= WARM + least - 1 and time.perf_counter() > ends:
                    break
        finally:
            runner.close()
        start, middle, finish = (max(0.0, undisturbed(column)) for column in zip(*took, strict=True))
        return start, middle, finish

    def codec(self, runs: Sequence[tuple[Tensors, Parts]], bits: float | None) -> CodecCost:
        """Return the codec by which some buckets take what they took; of one bucket the elements are taken to be all.

        The seconds of an element grow with the ranks where the root, or every rank, decodes whole payloads of all;
        pieces that owners decode get shorter instead.
        """
        rooted, piecewise = self.communicator.rooted, self.communicator.piecewise
        grows = (False, rooted, not (rooted or piecewise or self.communicator.sums))
        one = len(runs) > 1
        rows = [(float(one), float(one * len(tensors)), float(_elements(tensors))) for tensors, _ in runs]
        costs = []
        for part, by_rank in enumerate(grows):
            call, variable, element = fit(rows, [max(took[part], 1e-9) for _, took in runs])  # fit divides by seconds
            peer = element / self.ranks if by_rank else 0.0
            costs.append(Cost(call, variable, 0.0 if by_rank else element, peer))
        start, middle, finish = costs
        return CodecCost(start, middle, finish, bits)

    def _step(
        self, runner: StepRunner, backend: SimulatedRanks, given: Tensors, outs: Mapping[str, Tensor | None]
    ) -> Parts:
        """Return the seconds of computing of one step: start, each gap between two collectives, and finish."""
        one = next(iter(given.values()))
        marks, gaps = [_computed(backend, one)], 0
        trips = []
        for bucket in runner.buckets:  # several if dtypes differ and travel as they are
            mine = [given[variable.name] for variable in bucket.variables]
            trips.append(runner.start_round_trip(bucket, mine, [True] * len(mine)))
        marks.append(_computed(backend, one))
        for trip in trips:
            while trip.advance():
                gaps += 1
        marks.append(_computed(backend, one))
        runner.finish_step(lambda bucket: [outs[variable.name] for variable in bucket.variables])
        marks.append(_computed(backend, one))
        start, middle, finish = (after - before for before, after in itertools.pairwise(marks))
        return start, middle / gaps if gaps else 0.0, finish


def _computed(backend: SimulatedRanks, gradient: Tensor) -> float:
    """Return the time without what simulated collectives took so far, once the gradient's device is done."""
    kernels_of(gradient).wait_for(gradient)
    return time.perf_counter() - backend.spent


def is_table(gradient: Tensor | SparseRows) -> bool:
    """Return True if most rows of a gradient are zero, as those of an embedding table are: no sample has used them.

    >>> x = np.zeros((1000, 4), np.float32)
    >>> x[::10] = 1.0
    >>> is_table(x), is_table(x[::10])
    (True, False)
    """
    if isinstance(gradient, SparseRows) or len(gradient.shape) != 2:
        return isinstance(gradient, SparseRows)
    rows = _array(gradient[:: 1 + int(gradient.shape[0]) // TABLE_SAMPLE])
    return bool(np.mean(np.any(rows != 0, axis=1)) < 0.5)


def _dense_values(name: str, gradient: Tensor | SparseRows) -> Tensor:
    """Return the values of a gradient, whether it is sparse or not. Raise ConfigError if they are not finite, or of a
    dtype that is not exchanged."""
    x = gradient.values if isinstance(gradient, SparseRows) else gradient
    try:
        x = kernels_of(x).given(x)
    except ConfigError as error:
        raise ConfigError(f"the gradient of {name!r}: {error}") from None
    if not math.isfinite(float(np.square(_array(x)).sum())):
        raise ConfigError(f"the gradient of {name!r} holds a NaN or an infinite value; measure another step's")
    return x


def _variable(name: str, x: Tensor) -> Variable:
    return Variable(name, tuple(map(int, x.shape)), kernels_of(x).dtype(x), str(getattr(x, "device", "cpu")))


def _numel(x: Tensor) -> int:
    return math.prod(map(int, x.shape))


def _elements(tensors: Tensors) -> int:
    return sum(map(_numel, tensors.values()))


def _first_rows(x: Tensor, most: int) -> Tensor:
    """Return the first rows of a tensor, of no more than so many elements, if a row has no more."""
    if _numel(x) <= most or not len(x.shape):
        return x
    return x[: max(1, most // max(1, _numel(x) // int(x.shape[0])))]


def _copied(x: Tensor, dtype: str) -> Tensor:
    k = kernels_of(x)
    return k.cast(k.reshape(k.join([k.flat(x)]), tuple(x.shape)), dtype)


def _array(x: Tensor) -> np.ndarray:
    x = kernels_of(x).cast(x, "float64")
    return np.asarray(x.cpu() if hasattr(x, "cpu") else x)


def _relative_error(x: Tensor, other: Tensor) -> float:
    array = _array(x)
    square = float(np.square(array).sum())
    return float(np.square(array - _array(other)).sum()) / square if square else 0.0
