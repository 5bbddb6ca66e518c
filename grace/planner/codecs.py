"""Times and errors of methods, measured on gradients by one process: it encodes and decodes in real exchanges, over
simulated ranks."""

import contextlib
import copy
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from grace.communicators.choice import build_communicator
from grace.core.communicator import Communicator
from grace.core.compressor import Tensor
from grace.core.context import Context
from grace.core.variable import Variable
from grace.errors import ConfigError, PayloadError
from grace.exchange.bucket import Outcome
from grace.exchange.sparse_rows import SparseRows
from grace.kernels import kernels_of
from grace.planner.costs import Codec, Cost, fit
from grace.planner.exchange_costs import codec_key
from grace.planner.simulated_ranks import SimulatedRanks
from grace.planner.step_timer import undisturbed
from grace.session.sharding import Chooser, Shard
from grace.session.step_runner import StepRunner

MOST_ELEMENTS = 1 << 24
"""Elements of a bucket that is timed."""
PROBE, SAMPLED = 1 << 18, 1 << 16
"""Elements of the bucket that is timed first, and of each variable whose bits are counted."""
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
"""The step that methods are timed at: a warm-up sends more at first, for a small part of a run."""


@dataclass(frozen=True)
class MeasuredMethod:
    """Measurements of a method.

    Attributes:
        method: the key of its codec: communicator, compressor and memory.
        codec: seconds by variables, elements and ranks, and bits where data decide.
        errors: |x - C(x)|^2 / |x|^2 of each variable that the method shrinks, of what one rank alone sends, without a
            memory; the mean of some seeds for random methods.
    """

    method: str
    codec: Codec
    errors: Mapping[str, float]


def measure(
    communicator: Communicator,
    gradients: Mapping[str, Tensor],
    ranks: int,
    seed: int = 0,
    limit_seconds: float = 1.0,
    synchronize: Callable[[], object] = lambda: None,
) -> MeasuredMethod:
    """Run real exchanges of these gradients over simulated ranks, and time what they compute.

    A bucket of all variables is timed, because what a method takes depends on shapes and values, and on caches that do
    not hold them; and one of many small pieces, and one of a single piece, so that what a bucket, a variable and an
    element take is told apart. Of
    large models a part is taken, so that it takes about ``limit_seconds`` (and, the first time, what compiling loops
    takes besides). Gradients are copied, never changed.

    Args:
        communicator: the method; copies of it are measured, so that it stays unused.
        gradients: by variable name: tensors of any framework, or sparse rows, of which the values are taken.
        ranks: how many will exchange.
        seed: of random methods.
        limit_seconds: see above.
        synchronize: waits until a device has computed all that was asked of it.

    Raises:
        ConfigError: there is no gradient that the method makes smaller, or one that holds a NaN; the method applies
            means in later steps.

    >>> x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    >>> found = measure(build_communicator("fp16", None, None), {"w": x}, ranks=2, limit_seconds=0.05)
    >>> found.method, 0 < found.errors["w"] < 1e-6
    ('allreduce, cast, none', True)
    """
    if not limit_seconds > 0:
        raise ConfigError(f"a time limit is above 0 s, not {limit_seconds!r}")
    method = codec_key(communicator)
    if communicator.delayed:
        raise ConfigError(f"{method} applies means in later steps; measure it without that, which computes the same")
    tensors = {name: dense_values(name, x) for name, x in gradients.items()}
    for name, x in tensors.items():
        _check_finite(name, x)
    choose = Chooser()
    smaller = {
        name: x for name, x in tensors.items() if numel(x) and choose(_variable(name, x), communicator) is communicator
    }
    if not smaller:
        raise ConfigError(f"{method} makes none of these {len(tensors)} gradients smaller; give it larger ones")
    trials, simulated = _Trials(communicator, seed, synchronize), _simulated_ranks(communicator, ranks)
    largest = max(smaller.values(), key=numel)
    # the root, or every rank, decodes whole payloads of all; pieces that owners decode get shorter instead
    every_rank = not (communicator.rooted or communicator.sums or communicator.cuts)
    grows_with_ranks = (False, communicator.rooted, every_rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        timed: Mapping[str, Tensor] = smaller
        try:
            whole, took = trials.time_whole(timed, simulated, limit_seconds / 2)
        except PayloadError:  # owners of ranges, which differ, cannot all send the same; those of one variable's can
            timed = {"x": largest}
            whole, took = trials.time_whole(timed, simulated, limit_seconds / 2)
        given = list(timed.values())
        pieces = {f"x{i}": shortened(given[i % len(given)], PIECE) for i in range(PIECES)}
        runs = [(whole, took)]
        with contextlib.suppress(PayloadError):
            for few in (pieces, {"x0": pieces["x0"]}):
                runs.append((few, trials.time(few, simulated, limit_seconds / 8)))
        start, middle, finish = (
            _cost([(tensors, seconds[part]) for tensors, seconds in runs], simulated if grows else 0)
            for part, grows in enumerate(grows_with_ranks)
        )
        each = max(1e-12, sum(took) / sum(map(numel, whole.values())))
        share = min(1.0, limit_seconds / 4 / DRAWS / (each * sum(map(numel, tensors.values()))))
        errors = trials.errors(smaller, share)
        bits = None
        if communicator.compressor.wire_bits(tuple(largest.shape)) is None:
            bits = trials.bits({name: shortened(smaller[name], SAMPLED) for name in list(smaller)[:32]})
    return MeasuredMethod(method, Codec(start, middle, finish, bits), errors)


def _cost(runs: Sequence[tuple[Mapping[str, Tensor], float]], ranks: int) -> Cost:
    """Return the cost of a bucket, of each variable and of each element by which some buckets take what they took.

    Args:
        runs: buckets, and the seconds of each; of one alone the elements are taken to be all.
        ranks: of how many ranks' payloads each element is computed; 0 if it does not grow with the ranks.
    """
    rows = [(1, len(tensors), sum(map(numel, tensors.values()))) for tensors, _ in runs]
    if len(runs) == 1:
        rows = [(0, 0, rows[0][2])]
    call, variable, element = fit(rows, [max(seconds, 1e-9) for _, seconds in runs])
    if ranks:
        return Cost(call, variable, peer=element / ranks)
    return Cost(call, variable, element)


class _Trials:
    """Exchanges of one method over simulated ranks, each by a copy of a communicator that remembers nothing."""

    def __init__(self, communicator: Communicator, seed: int, synchronize: Callable[[], object]):
        self.communicator, self.seed, self.synchronize = communicator, seed, synchronize

    def time_whole(
        self, tensors: Mapping[str, Tensor], ranks: int, seconds: float
    ) -> tuple[dict[str, Tensor], tuple[float, float, float]]:
        """Return the part of all tensors that can be timed for so long, all of them if possible, and what it took."""
        whole, elements = sum(map(numel, tensors.values())), PROBE
        while True:
            taken = share_of(tensors, elements)
            took = self.time(taken, ranks, 0.0, least=1)
            size = sum(map(numel, taken.values()))
            most = size * seconds / (WARM + LEAST) / max(sum(took), 1e-9)
            if size >= whole or elements * 4 > min(most, MOST_ELEMENTS):
                return taken, self.time(taken, ranks, seconds)
            elements *= 4

    def time(
        self, tensors: Mapping[str, Tensor], ranks: int, seconds: float, least: int = LEAST
    ) -> tuple[float, float, float]:
        """Return the seconds of start, of what lies between two collectives, and of finish, for a bucket of these: the
        lower quartiles of some steps, because what else a machine does makes them longer only.

        Args:
            tensors: all compressed.
            ranks: how many are simulated.
            seconds: for all steps, if they are enough for some.
            least: so many.
        """
        communicator = copy.deepcopy(self.communicator)
        backend = SimulatedRanks(ranks, _root(communicator))
        with _runner(communicator, tensors, backend, self.seed) as runner:
            given = list(tensors.values())
            k = kernels_of(given[0])
            outs = [k.zeros(tuple(x.shape), "float32", x) for x in given] if k.mutable else [None] * len(given)
            if communicator.compressor.traits.exact and k.mutable:
                outs = [_copied(x) for x in given]
            took: list[tuple[float, float, float]] = []
            ends = math.inf
            for step in range(WARM + MOST):
                if step == WARM:
                    ends = time.perf_counter() + seconds
                parts = self._step(runner, backend, given, outs)
                if step >= WARM:
                    took.append(parts)
                if step >= WARM + least - 1 and self._now() > ends:
                    break
        start, middle, finish = (max(0.0, undisturbed(column)) for column in zip(*took, strict=True))
        return start, middle, finish

    def _step(
        self, runner: StepRunner, backend: SimulatedRanks, given: list[Tensor], outs: list[Tensor]
    ) -> tuple[float, float, float]:
        """Return the seconds of computing of one step: start, each gap between two collectives, and finish."""
        marks, gaps = [self._computed(backend)], 0
        exchange = runner.start(runner.buckets[0], given, [True] * len(given))
        marks.append(self._computed(backend))
        while exchange.advance():
            gaps += 1
        marks.append(self._computed(backend))
        runner.finish_step(lambda bucket: outs)
        marks.append(self._computed(backend))
        start, middle, finish = (after - before for before, after in itertools.pairwise(marks))
        return start, middle / gaps if gaps else 0.0, finish

    def _computed(self, backend: SimulatedRanks) -> float:
        """Return the time without what simulated collectives took so far."""
        return self._now() - backend.spent

    def _now(self) -> float:
        self.synchronize()
        return time.perf_counter()

    def errors(self, tensors: Mapping[str, Tensor], share: float) -> dict[str, float]:
        """Return |x - C(x)|^2 / |x|^2 of a share of the elements of each; 0 where x is."""
        taken = {name: shortened(x, max(SMALL, math.ceil(share * numel(x)))) for name, x in tensors.items()}
        drawn: list[dict[str, float]] = []
        for draw in range(DRAWS):
            with _runner(self._alone(False), taken, SimulatedRanks(1), self.seed + draw) as runner:
                found = {outcome.variable.name: outcome.value for outcome in _exchange(runner, taken)}
            drawn.append({name: _relative_error(taken[name], found[name]) for name in taken})
            if draw and drawn[0] == drawn[1]:  # it draws nothing
                break
        return {name: fmean(errors[name] for errors in drawn) for name in taken}

    def bits(self, tensors: Mapping[str, Tensor], steps: int = 4) -> float:
        """Return the bits of a payload per element, with the memory."""
        with _runner(self._alone(True), tensors, SimulatedRanks(1), self.seed) as runner:
            for _ in range(steps):
                _exchange(runner, tensors)
            sent = sum(runner.traffic.payload_bytes.values())
        return 8 * sent / steps / sum(map(numel, tensors.values()))

    def _alone(self, memory: bool) -> Communicator:
        """Return the method in its default communicator, which decodes what was sent and does nothing else to it."""
        made = copy.deepcopy(self.communicator)
        if not memory:
            with contextlib.suppress(ConfigError):
                return build_communicator(made.compressor, "none", None)
        return build_communicator(made.compressor, made.memory, None)


def _exchange(runner: StepRunner, tensors: Mapping[str, Tensor]) -> list[Outcome]:
    runner.start(runner.buckets[0], list(tensors.values()), [True] * len(tensors))
    return runner.finish_step(lambda bucket: [None] * len(tensors))


@contextlib.contextmanager
def _runner(
    communicator: Communicator, tensors: Mapping[str, Tensor], backend: SimulatedRanks, seed: int
) -> Iterator[StepRunner]:
    """Yield a runner of one bucket, which all tensors travel in."""
    variables = [_variable(name, x) for name, x in tensors.items()]
    shards = [Shard(variable, variable, communicator) for variable in variables]
    context = Context(seed=seed, step=BEHIND_WARMUPS)
    runner = StepRunner(variables, shards, backend, context, communicator.describe())
    runner.claim_components()
    try:
        runner.agree()
        yield runner
    finally:
        runner.close()


def _simulated_ranks(communicator: Communicator, ranks: int) -> int:
    """Return how many ranks are simulated: as many as the communicator was made for, or as there are, but few."""
    if communicator.made_for is not None:
        return communicator.made_for
    return max(2, _root(communicator) + 1, min(ranks, MOST_RANKS))


def _root(communicator: Communicator) -> int:
    """Return the rank that computes for others; 0 if there is none."""
    root = getattr(communicator, "root", 0)
    return root if isinstance(root, int) else 0


def _variable(name: str, x: Tensor) -> Variable:
    return Variable(name, tuple(map(int, x.shape)), kernels_of(x).dtype(x), str(getattr(x, "device", "cpu")))


# -- gradients of any framework ------------------------------------------------------------------------


def dense_values(name: str, gradient: Tensor | SparseRows) -> Tensor:
    """Return the values of a gradient, whether it is sparse or not.

    Raises:
        ConfigError: they are of a dtype that is not exchanged.
    """
    x = gradient.values if isinstance(gradient, SparseRows) else gradient
    try:
        return kernels_of(x).given(x)
    except ConfigError as error:
        raise ConfigError(f"the gradient of {name!r}: {error}") from None


def is_table(gradient: Tensor | SparseRows) -> bool:
    """Return True if most rows of a gradient are zero, as those of an embedding table are: no sample has used them.

    >>> x = np.zeros((1000, 4), np.float32)
    >>> x[::10] = 1.0
    >>> is_table(x), is_table(x[::10])
    (True, False)
    """
    if isinstance(gradient, SparseRows):
        return True
    if len(gradient.shape) != 2:
        return False
    rows = _array(gradient[:: 1 + int(gradient.shape[0]) // TABLE_SAMPLE])
    return bool(np.mean(np.any(rows != 0, axis=1)) < 0.5)


def numel(x: Tensor) -> int:
    """Return the number of elements."""
    return math.prod(map(int, x.shape))


def shortened(x: Tensor, most: int) -> Tensor:
    """Return the first rows of a tensor, of no more than so many elements, if a row has no more."""
    if numel(x) <= most or not len(x.shape):
        return x
    return x[: max(1, most // max(1, numel(x) // int(x.shape[0])))]


def share_of(tensors: Mapping[str, Tensor], elements: int) -> dict[str, Tensor]:
    """Return the first rows of each tensor, in proportion, so that all have about so many elements."""
    share = elements / sum(map(numel, tensors.values()))
    if share >= 1:
        return dict(tensors)
    return {name: shortened(x, max(1, int(share * numel(x)))) for name, x in tensors.items()}


def _copied(x: Tensor) -> Tensor:
    k = kernels_of(x)
    return k.reshape(k.join([k.flat(x)]), tuple(x.shape))


def _array(x: Tensor) -> np.ndarray:
    x = kernels_of(x).cast(x, "float64")
    return np.asarray(x.cpu() if hasattr(x, "cpu") else x)


def _check_finite(name: str, x: Tensor) -> None:
    """Raise if a gradient is not finite.

    Raises:
        ConfigError: naming the variable.
    """
    if not math.isfinite(float(np.square(_array(x)).sum())):
        raise ConfigError(f"the gradient of {name!r} holds a NaN or an infinite value; measure another step's")


def _relative_error(x: Tensor, other: Tensor) -> float:
    array = _array(x)
    square = float(np.square(array).sum())
    return float(np.square(array - _array(other)).sum()) / square if square else 0.0
