"""What a method computes and loses, measured on gradients by one process: it encodes and decodes in real exchanges, for
ranks that it pretends."""

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from grace.communicators.choice import build_communicator
from grace.core.communicator import Communicator
from grace.core.context import Context
from grace.core.registry import make
from grace.core.variable import Variable
from grace.errors import ConfigError, PayloadError
from grace.kernels import kernels_of
from grace.planner.clock import undisturbed
from grace.planner.costs import Codec, Cost
from grace.planner.mirror import Mirror
from grace.planner.payloads import of_all_ranks
from grace.planner.samples import copied, dense_values, distance, numel, scale_of, share_of, shortened, square
from grace.planner.works import codec_key
from grace.session.sharding import Chooser, Shard
from grace.session.step_runner import StepRunner

Choice = str | Mapping[str, Any] | Callable[[], Communicator]
MOST_ELEMENTS = 1 << 24
"""Of a bucket that is timed."""
PROBE, SAMPLED = 1 << 18, 1 << 16
"""Elements of what is timed first, and of each variable whose bits are counted."""
MOST_VARIABLES = 256
"""Small ones that are timed together."""
PART, WEIGHT, LARGE = 4, 8, 2
"""The whole model is timed, and such a part of each variable; and as how many measurements the former counts, and the
largest variable alone, which a plan may treat alone."""
MINOR = 0.1
"""Of what the whole takes; by how much of what takes less a cost is off matters less."""
WARM, LEAST, MOST = 2, 3, 9
"""Steps that are not timed (a bucket's codec is found in the first one), and how many are."""
DRAWS = 3
"""Seeds that a random method's error is the mean of."""
SMALL = 1 << 12
"""Elements up to which a variable is small."""


@dataclass(frozen=True)
class Measured:
    """What was measured of a method.

    Attributes:
        method: by what the planner knows its codec: communicator, compressor and memory.
        codec: seconds by variables, elements and ranks, and bits where data decide.
        errors: of each variable, |x - C(x)|^2: what one rank alone sends loses of the gradient, without a memory; the
            mean of some seeds for random methods; 0 for variables that the method leaves dense.
        norms: of each variable, |x|^2.
    """

    method: str
    codec: Codec
    errors: Mapping[str, float]
    norms: Mapping[str, float]


BEHIND_WARMUPS = 1 << 31
"""The step that methods are timed at: a warm-up sends more at first, for a small part of a run."""


def maker(choice: Choice, ranks: int = 1) -> Callable[[], Communicator]:
    """A function that makes a new communicator, with a compressor and a memory that remember nothing, at each call.

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
    """Run real exchanges of these gradients over pretended ranks, and time what they compute.

    Several sets of variables are timed, for two numbers of ranks, so that costs can be told apart: one small variable,
    many, the largest, a part of all, and all: what a step of this very model takes counts most, because caches do not
    hold it, and what a method takes depends on shapes and values. Of large models a part is taken, so that it takes
    about ``limit_seconds`` (and, the first time, what compiling loops takes besides). Gradients are copied, never
    changed.

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
    >>> found.method, 0 < found.errors["w"] < 1e-6 * found.norms["w"]
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
    norms = {name: square(name, x) for name, x in tensors.items()}
    smaller = [name for name in tensors if norms[name] is not None and _shrinks(communicator, name, tensors[name])]
    if not smaller:
        raise ConfigError(f"{method} makes none of these {len(tensors)} gradients smaller; give it larger ones")
    timing = _Timing(fresh, seed, synchronize)
    largest = max((tensors[name] for name in smaller), key=numel)
    numbers = _ranks(communicator, ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compressed = {name: tensors[name] for name in smaller}
        try:
            elements, each = timing.fitting(compressed, numbers[0], limit_seconds / 2 / (WARM + LEAST))
        except PayloadError:  # owners of ranges, which differ, cannot all send the same; those of one variable's can
            compressed = {"x": largest}
            elements, each = timing.fitting(compressed, numbers[0], limit_seconds / 2 / (WARM + LEAST))
        turns = _turns(compressed, numbers, elements)
        sizes, took = [], []
        for chosen, number, weight in turns:
            with contextlib.suppress(PayloadError):
                took += [timing.run(chosen, number, limit_seconds / 4 / len(turns))] * weight
                sizes += [(len(chosen), float(sum(map(numel, chosen.values()))), number)] * weight
        start, middle, finish = map(_fitted, [sizes] * 3, zip(*took, strict=True), of_all_ranks(communicator))
        share = min(1.0, limit_seconds / 4 / DRAWS / (each * sum(map(numel, tensors.values()))))
        losses = _Losses(fresh, seed)
        errors = losses.errors({name: tensors[name] for name in smaller}, share)
        unknown = communicator.compressor.wire_bits(tuple(largest.shape)) is None
        bits = losses.bits({name: shortened(tensors[name], SAMPLED) for name in smaller[:32]}) if unknown else None
    codec = Codec(start, middle, finish, bits)
    return Measured(method, codec, {name: errors.get(name, 0.0) for name in tensors}, norms)


def _fitted(sizes: Sequence[tuple[int, float, int]], seconds: Sequence[float], peers: bool) -> Cost:
    """The cost nearest to measurements; none, if none took any time."""
    if not any(seconds):
        return Cost()
    measured = [(*size, max(each, 1e-9)) for size, each in zip(sizes, seconds, strict=True)]
    return Cost.fitted(measured, MINOR * max(seconds), peers)


class _Timing:
    """Times exchanges over pretended ranks.

    Args:
        fresh: makes a communicator.
        seed: of random methods.
        synchronize: waits for a device.
    """

    def __init__(self, fresh: Callable[[], Communicator], seed: int, synchronize: Callable[[], Any]):
        self.fresh, self.seed, self.synchronize = fresh, seed, synchronize

    def fitting(self, tensors: Mapping[str, Any], ranks: int, seconds: float) -> tuple[float, float]:
        """Of how many elements a step takes about so long, and seconds for each; more and more of all are tried."""
        whole, elements = sum(map(numel, tensors.values())), PROBE
        while True:
            taken = share_of(tensors, elements)
            took = sum(self.run(taken, ranks, 0.0, least=1))
            size = sum(map(numel, taken.values()))
            most = size * seconds / max(took, 1e-9)
            if size >= whole or elements * 4 > min(most, MOST_ELEMENTS):
                return max(most, size), took / size
            elements *= 4

    def run(
        self, tensors: Mapping[str, Any], ranks: int, seconds: float, least: int = LEAST
    ) -> tuple[float, float, float]:
        """Seconds of start, of what lies between two collectives, and of finish, for a bucket of these: the lower
        quartiles of some steps, because what else a machine does makes them longer only.

        Args:
            tensors: all compressed.
            ranks: how many are pretended.
            seconds: for all steps, if they are enough for some.
            least: so many.
        """
        communicator = self.fresh()
        with _runner(communicator, tensors, Mirror(ranks, _root(communicator)), self.seed) as (runner, mirror):
            names, given = list(tensors), list(tensors.values())
            k = kernels_of(given[0])
            outs = [k.zeros(tuple(x.shape), "float32", x) for x in given] if k.mutable else [None] * len(given)
            if communicator.compressor.traits.exact and k.mutable:
                outs = [copied(x) for x in given]
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
        """|x - C(x)|^2 of each; of a share of the elements of each, scaled by what these are of |x|^2."""
        taken = {name: shortened(x, max(SMALL, math.ceil(share * numel(x)))) for name, x in tensors.items()}
        drawn: list[dict[str, float]] = []
        for draw in range(DRAWS):
            with _runner(self.alone(False), taken, Mirror(1), self.seed + draw) as (runner, _):
                runner.start(runner.buckets[0], list(taken.values()), [True] * len(taken))
                found = {o.variable.name: o.value for o in runner.finish_step(lambda bucket: [None] * len(taken))}
            drawn.append({name: distance(taken[name], found[name]) for name in taken})
            if draw and drawn[0] == drawn[1]:  # it draws nothing
                break
        mean = {name: fmean(errors[name] for errors in drawn) for name in taken}
        return {name: error * scale_of(name, tensors[name], taken[name]) for name, error in mean.items()}

    def bits(self, tensors: Mapping[str, Any], steps: int = 4) -> float:
        """Of a payload, per element, with the memory."""
        with _runner(self.alone(True), tensors, Mirror(1), self.seed) as (runner, _):
            for _ in range(steps):
                runner.start(runner.buckets[0], list(tensors.values()), [True] * len(tensors))
                runner.finish_step(lambda bucket: [None] * len(tensors))
            sent = sum(runner.traffic.payload_bytes.values())
        return 8 * sent / steps / sum(map(numel, tensors.values()))


@contextlib.contextmanager
def _runner(communicator: Communicator, tensors: Mapping[str, Any], mirror: Mirror, seed: int) -> Any:
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


def _turns(
    tensors: Mapping[str, Any], numbers: Sequence[int], elements: float
) -> list[tuple[dict[str, Any], int, int]]:
    """Variables that are timed together, for how many ranks, and how much that counts: one small variable, the small
    ones, the largest, a part of all, and all, as far as so many elements allow."""
    order = sorted(tensors, key=lambda name: numel(tensors[name]))
    small = [name for name in order if numel(tensors[name]) <= SMALL] or order[:1]
    whole = share_of(tensors, int(min(max(elements, SMALL), MOST_ELEMENTS)))
    size = sum(map(numel, whole.values()))
    few = {name: whole[name] for name in small[:MOST_VARIABLES]}
    one = {order[0]: whole[order[0]]}
    if len(tensors) == 1:
        piece = shortened(next(iter(whole.values())), max(1, size // 32))
        few = {f"x{i}": piece for i in range(32)}
    turns = [(chosen, number, 1) for chosen in (few, share_of(tensors, size // PART)) for number in numbers]
    large = {order[-1]: shortened(tensors[order[-1]], int(min(max(elements, SMALL), MOST_ELEMENTS)))}
    return [(one, numbers[0], 1), (large, numbers[0], LARGE), *turns, (whole, numbers[0], WEIGHT)]


def _ranks(communicator: Communicator, ranks: int) -> list[int]:
    """How many ranks there are (or so many that they can be pretended), and another number; or that which the
    communicator was made for."""
    if communicator.made_for is not None:
        return [communicator.made_for]
    least = max(2, _root(communicator) + 1)
    actual = max(least, min(ranks, 8))
    return [actual, least if actual > least + 1 else actual + 2]


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
