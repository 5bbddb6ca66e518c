"""What a method computes and loses, measured on gradients by one process: it encodes and decodes in real exchanges, for
ranks that it pretends."""

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from grace.communicators.choice import build_communicator
from grace.core.communicator import Communicator
from grace.core.context import Context
from grace.core.registry import make
from grace.core.variable import Variable
from grace.errors import ConfigError, PayloadError
from grace.exchange.sparse_rows import SparseRows
from grace.kernels import kernels_of
from grace.planner.costs import Codec, Cost
from grace.planner.exchange_costs import codec_key, of_all_ranks
from grace.planner.simulated_ranks import SimulatedRanks
from grace.planner.step_timer import undisturbed
from grace.session.sharding import Chooser, Shard
from grace.session.step_runner import StepRunner

Choice = str | Mapping[str, Any] | Callable[[], Communicator]
MOST_ELEMENTS = 1 << 24
"""Elements of a bucket that is timed."""
PROBE, SAMPLED = 1 << 18, 1 << 16
"""Elements of the bucket that is timed first, and of each variable whose bits are counted."""
PIECES, PIECE = 32, 256
"""Variables of the bucket that tells what a variable costs, and their elements."""
MOST_RANKS = 8
"""Ranks that are pretended."""
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
class Measured:
    """What was measured of a method.

    Attributes:
        method: by what the planner knows its codec: communicator, compressor and memory.
        codec: seconds by variables, elements and ranks, and bits where data decide.
        errors: |x - C(x)|^2 / |x|^2 of each variable that the method shrinks, of what one rank alone sends, without a
            memory; the mean of some seeds for random methods.
    """

    method: str
    codec: Codec
    errors: Mapping[str, float]


def maker(choice: Choice, ranks: int = 1) -> Callable[[], Communicator]:
    """Return a function that makes a new communicator at each call, whose parts remember nothing.

    Args:
        choice: a compressor's spec; a communicator's, a compressor's and a memory's as ``describe()`` writes them; the
            three as a mapping, each of which may be left out; or such a function itself.
        ranks: for the default communicator.

    Raises:
        ConfigError: unknown names, or parts that do not go together.

    >>> maker("topk")().describe(), maker("scatter_reduce, qsgd(levels=7), none")().describe()
    ('allgather, topk, residual', 'scatter_reduce, qsgd(levels=7), none')
    """
    if callable(choice):
        return choice
    if isinstance(choice, str):
        parts = _specs(choice)
        if len(parts) not in (1, 3):
            raise ConfigError(
                f"a method is a compressor's spec, as in topk(ratio=0.01), or a communicator's, a compressor's and a "
                f"memory's, as in 'allgather, topk, residual', not {choice!r}"
            )
        keys = ("compressor",) if len(parts) == 1 else ("communicator", "compressor", "memory")
        choice = dict(zip(keys, parts, strict=True))
    if unknown := set(choice) - {"compressor", "memory", "communicator"}:
        raise ConfigError(f"a method has compressor, memory and communicator, and no {sorted(map(str, unknown))[0]!r}")
    compressor, memory, communicator = (choice.get(key) for key in ("compressor", "memory", "communicator"))
    return lambda: build_communicator(compressor, memory, communicator, ranks)


def measure(
    choice: Choice,
    gradients: Mapping[str, Any],
    ranks: int,
    seed: int = 0,
    limit_seconds: float = 1.0,
    synchronize: Callable[[], Any] = lambda: None,
) -> Measured:
    """Run real exchanges of these gradients over simulated ranks, and time what they compute.

    A bucket of all variables is timed, because what a method takes depends on shapes and values, and on caches that do
    not hold them; and one of many small pieces, so that what a variable takes is told from what an element takes. Of
    large models a part is taken, so that it takes about ``limit_seconds`` (and, the first time, what compiling loops
    takes besides). Gradients are copied, never changed.

    Args:
        choice: what :func:`maker` takes.
        gradients: by variable name: tensors of any framework, or sparse rows, of which the values are taken.
        ranks: how many will exchange.
        seed: of random methods.
        limit_seconds: see above.
        synchronize: waits until a device has computed all that was asked of it.

    Raises:
        ConfigError: unknown names or parts that do not go together; there is no gradient that the method makes
            smaller, or one that holds a NaN; the method applies means in later steps.

    >>> import numpy as np
    >>> x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    >>> found = measure("fp16", {"w": x}, ranks=2, limit_seconds=0.05)
    >>> found.method, 0 < found.errors["w"] < 1e-6
    ('allreduce, cast, none', True)
    """
    if not limit_seconds > 0:
        raise ConfigError(f"a time limit is above 0 s, not {limit_seconds!r}")
    fresh = maker(choice, ranks)
    communicator = fresh()
    method = codec_key(communicator)
    if communicator.delayed:
        raise ConfigError(f"{method} applies means in later steps; measure it without that, which computes the same")
    tensors = {name: dense_values(name, x) for name, x in gradients.items()}
    for name, x in tensors.items():
        _check_finite(name, x)
    smaller = [name for name in tensors if _shrinks(communicator, name, tensors[name])]
    if not smaller:
        raise ConfigError(f"{method} makes none of these {len(tensors)} gradients smaller; give it larger ones")
    timing, pretended = _Timing(fresh, seed, synchronize), _pretended(communicator, ranks)
    largest = max((tensors[name] for name in smaller), key=numel)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compressed = {name: tensors[name] for name in smaller}
        try:
            whole, took = timing.whole(compressed, pretended, limit_seconds / 2)
        except PayloadError:  # owners of ranges, which differ, cannot all send the same; those of one variable's can
            compressed = {"x": largest}
            whole, took = timing.whole(compressed, pretended, limit_seconds / 2)
        given = list(compressed.values())
        pieces = {f"x{i}": shortened(given[i % len(given)], PIECE) for i in range(PIECES)}
        took_pieces = took
        with contextlib.suppress(PayloadError):
            took_pieces = timing.run(pieces, pretended, limit_seconds / 4)
        start, middle, finish = (
            _cost((pieces, seconds), (whole, all_seconds), pretended if grows else 0)
            for seconds, all_seconds, grows in zip(took_pieces, took, of_all_ranks(communicator), strict=True)
        )
        each = max(1e-12, sum(took) / sum(map(numel, whole.values())))
        share = min(1.0, limit_seconds / 4 / DRAWS / (each * sum(map(numel, tensors.values()))))
        losses = _Losses(fresh, seed)
        errors = losses.errors({name: tensors[name] for name in smaller}, share)
        unknown = communicator.compressor.wire_bits(tuple(largest.shape)) is None
        bits = losses.bits({name: shortened(tensors[name], SAMPLED) for name in smaller[:32]}) if unknown else None
    codec = Codec(start, middle, finish, bits)
    return Measured(method, codec, errors)


def _cost(pieces: tuple[Mapping[str, Any], float], whole: tuple[Mapping[str, Any], float], ranks: int) -> Cost:
    """Return the cost of each variable and of each element by which two buckets take what they took, neither below 0.

    Args:
        pieces: a bucket of small variables, and its seconds.
        whole: the same of all variables.
        ranks: of how many ranks' payloads each element is computed; 0 if it does not grow with the ranks.
    """
    (few, some), (many, all_) = ((len(tensors), sum(map(numel, tensors.values()))) for tensors, _ in (pieces, whole))
    both = few * all_ - many * some
    element = max(0.0, (few * whole[1] - many * pieces[1]) / both) if both > 0 else whole[1] / all_
    variable = max(0.0, (whole[1] - element * all_) / many)
    return Cost(variable=variable, peer=element / ranks) if ranks else Cost(variable=variable, element=element)


class _Timing:
    """Times exchanges over pretended ranks.

    Args:
        fresh: makes a communicator.
        seed: of random methods.
        synchronize: waits for a device.
    """

    def __init__(self, fresh: Callable[[], Communicator], seed: int, synchronize: Callable[[], Any]):
        self.fresh, self.seed, self.synchronize = fresh, seed, synchronize

    def whole(
        self, tensors: Mapping[str, Any], ranks: int, seconds: float
    ) -> tuple[dict[str, Any], tuple[float, float, float]]:
        """Return the part of all tensors that can be timed for so long, all of them if possible, and what it took."""
        whole, elements = sum(map(numel, tensors.values())), PROBE
        while True:
            taken = share_of(tensors, elements)
            took = self.run(taken, ranks, 0.0, least=1)
            size = sum(map(numel, taken.values()))
            most = size * seconds / (WARM + LEAST) / max(sum(took), 1e-9)
            if size >= whole or elements * 4 > min(most, MOST_ELEMENTS):
                return taken, self.run(taken, ranks, seconds)
            elements *= 4

    def run(
        self, tensors: Mapping[str, Any], ranks: int, seconds: float, least: int = LEAST
    ) -> tuple[float, float, float]:
        """Return the seconds of start, of what lies between two collectives, and of finish, for a bucket of these: the
        lower quartiles of some steps, because what else a machine does makes them longer only.

        Args:
            tensors: all compressed.
            ranks: how many are pretended.
            seconds: for all steps, if they are enough for some.
            least: so many.
        """
        communicator = self.fresh()
        with _runner(communicator, tensors, SimulatedRanks(ranks, _root(communicator)), self.seed) as (runner, mirror):
            names, given = list(tensors), list(tensors.values())
            k = kernels_of(given[0])
            outs = [k.zeros(tuple(x.shape), "float32", x) for x in given] if k.mutable else [None] * len(given)
            if communicator.compressor.traits.exact and k.mutable:
                outs = [_copied(x) for x in given]
            took: list[tuple[float, float, float]] = []
            ends = math.inf
            for step in range(WARM + MOST):
                if step == WARM:
                    ends = time.perf_counter() + seconds
                row, between = [], 0
                mirror.spent, began = 0.0, self._now()
                exchange = runner.start(runner.buckets[0], given, [True] * len(names))
                row.append(self._now() - began - mirror.spent)
                mirror.spent, began = 0.0, self._now()
                while exchange.advance():
                    between += 1
                row.append((self._now() - began - mirror.spent) / between if between else 0.0)
                mirror.spent, began = 0.0, self._now()
                runner.finish_step(lambda bucket: outs)
                row.append(self._now() - began - mirror.spent)
                if step >= WARM:
                    took.append((row[0], row[1], row[2]))
                if step >= WARM + least - 1 and self._now() > ends:
                    break
            start, middle, finish = (max(0.0, undisturbed(column)) for column in zip(*took, strict=True))
            return start, middle, finish

    def _now(self) -> float:
        self.synchronize()
        return time.perf_counter()


class _Losses:
    """What one rank alone sends, and loses.

    Args:
        fresh: makes a communicator.
        seed: the first of those that are tried.
    """

    def __init__(self, fresh: Callable[[], Communicator], seed: int):
        self.fresh, self.seed = fresh, seed

    def alone(self, memory: bool) -> Communicator:
        """The compressor in its usual communicator, which decodes what was sent and does nothing else to it."""
        made = self.fresh()
        if not memory:
            with contextlib.suppress(ConfigError):
                return build_communicator(made.compressor, "none", None)
        return build_communicator(made.compressor, make("memory", made.memory.to_dict()), None)

    def errors(self, tensors: Mapping[str, Any], share: float) -> dict[str, float]:
        """Return |x - C(x)|^2 / |x|^2 of a share of the elements of each; 0 where x is."""
        taken = {name: shortened(x, max(SMALL, math.ceil(share * numel(x)))) for name, x in tensors.items()}
        drawn: list[dict[str, float]] = []
        for draw in range(DRAWS):
            with _runner(self.alone(False), taken, SimulatedRanks(1), self.seed + draw) as (runner, _):
                runner.start(runner.buckets[0], list(taken.values()), [True] * len(taken))
                found = {o.variable.name: o.value for o in runner.finish_step(lambda bucket: [None] * len(taken))}
            drawn.append({name: _relative_error(taken[name], found[name]) for name in taken})
            if draw and drawn[0] == drawn[1]:  # it draws nothing
                break
        return {name: fmean(errors[name] for errors in drawn) for name in taken}

    def bits(self, tensors: Mapping[str, Any], steps: int = 4) -> float:
        """Of a payload, per element, with the memory."""
        with _runner(self.alone(True), tensors, SimulatedRanks(1), self.seed) as (runner, _):
            for _ in range(steps):
                runner.start(runner.buckets[0], list(tensors.values()), [True] * len(tensors))
                runner.finish_step(lambda bucket: [None] * len(tensors))
            sent = sum(runner.traffic.payload_bytes.values())
        return 8 * sent / steps / sum(map(numel, tensors.values()))


@contextlib.contextmanager
def _runner(communicator: Communicator, tensors: Mapping[str, Any], mirror: SimulatedRanks, seed: int) -> Any:
    """A runner of one bucket, which all travel in, and its backend."""
    variables = [_variable(name, x) for name, x in tensors.items()]
    shards = [Shard(variable, variable, communicator) for variable in variables]
    context = Context(seed=seed, step=BEHIND_WARMUPS)
    runner = StepRunner(variables, shards, mirror, context, communicator.describe())
    runner.claim_components()
    try:
        runner.agree()
        yield runner, mirror
    finally:
        runner.close()


def _pretended(communicator: Communicator, ranks: int) -> int:
    """Return how many ranks are pretended: as many as there are, or as the communicator was made for, but few."""
    if communicator.made_for is not None:
        return communicator.made_for
    return max(2, _root(communicator) + 1, min(ranks, MOST_RANKS))


def _root(communicator: Communicator) -> int:
    """The rank that computes for others, if there is one."""
    root = getattr(communicator, "root", 0)
    return root if isinstance(root, int) else 0


def _specs(text: str) -> list[str]:
    """Cut at commas that are in no parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _variable(name: str, x: Any) -> Variable:
    return Variable(name, tuple(map(int, x.shape)), kernels_of(x).dtype(x), str(getattr(x, "device", "cpu")))


def _shrinks(communicator: Communicator, name: str, x: Any) -> bool:
    """Whether the method carries it itself."""
    return bool(numel(x)) and Chooser()(_variable(name, x), communicator) is communicator


# -- gradients of any framework ------------------------------------------------------------------------


def dense_values(name: str, gradient: Any) -> Any:
    """Return the values of a gradient, whether it is sparse or not.

    Raises:
        ConfigError: they are of a dtype that is not exchanged.
    """
    x = gradient.values if isinstance(gradient, SparseRows) else gradient
    try:
        return kernels_of(x).given(x)
    except ConfigError as error:
        raise ConfigError(f"the gradient of {name!r}: {error}") from None


def is_table(gradient: Any) -> bool:
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


def numel(x: Any) -> int:
    """Return the number of elements."""
    return math.prod(map(int, x.shape))


def shortened(x: Any, most: int) -> Any:
    """Return the first rows of a tensor, of no more than so many elements, if a row has no more."""
    if numel(x) <= most or not len(x.shape):
        return x
    return x[: max(1, most // max(1, numel(x) // int(x.shape[0])))]


def share_of(tensors: Mapping[str, Any], elements: int) -> dict[str, Any]:
    """Return the first rows of each tensor, in proportion, so that all have about so many elements."""
    share = elements / sum(map(numel, tensors.values()))
    if share >= 1:
        return dict(tensors)
    return {name: shortened(x, max(1, int(share * numel(x)))) for name, x in tensors.items()}


def _copied(x: Any) -> Any:
    k = kernels_of(x)
    return k.reshape(k.join([k.flat(x)]), tuple(x.shape))


def _array(x: Any) -> np.ndarray:
    x = kernels_of(x).cast(x, "float64")
    return np.asarray(x.cpu() if hasattr(x, "cpu") else x)


def _check_finite(name: str, x: Any) -> None:
    """Raise if a gradient is not finite.

    Raises:
        ConfigError: naming the variable.
    """
    if not math.isfinite(float(np.square(_array(x)).sum())):
        raise ConfigError(f"the gradient of {name!r} holds a NaN or an infinite value; measure another step's")


def _relative_error(x: Any, other: Any) -> float:
    array = _array(x)
    square = float(np.square(array).sum())
    return float(np.square(array - _array(other)).sum()) / square if square else 0.0
