"""What ``auto`` does between two steps of training: measure links and codecs, plan, and explain."""

import contextlib
import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grace.backends.topology import Topology
from grace.communicators.choice import break_even, default_communicator
from grace.core.backend import Backend
from grace.core.registry import known, legal_communicators, make
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.planner.asked import Asked
from grace.planner.calibration import NAMED, Calibration, Key, default_path, read
from grace.planner.codecs import measure
from grace.planner.corrections import Step
from grace.planner.costs import Codec
from grace.planner.crowd import crowding
from grace.planner.explain import lost, plan_of
from grace.planner.grouped import grouped
from grace.planner.links import Links, measure_network
from grace.planner.network import Measured
from grace.planner.problem import Problem
from grace.planner.promise import by_promise
from grace.planner.quality import SLACK, allows, class_of
from grace.planner.search import Candidate, Progress, search
from grace.planner.step import Contention, Timeline
from grace.planner.works import works
from grace.session.agreement import gather_or_raise
from grace.strategy.builder import Cluster
from grace.strategy.resources import cluster_of

USUAL = (
    *("none", "fp16", "qsgd", "qsgd(levels=7)", "terngrad", "natural"),
    *("topk(ratio=0.001)", "topk(ratio=0.01)", "topk(ratio=0.05)", "topk(ratio=0.01) | efsignsgd"),
    *("efsignsgd", "onebit", "powersgd(rank=1)", "powersgd(rank=2)", "powersgd(rank=4)", "powersgd(rank=8)"),
)
"""Methods that are measured where the user names none."""
LINK_SECONDS, CODEC_SECONDS = 2.0, 0.5
"""About how long the links are measured, and each method."""
PLAN_SECONDS, VARIABLE_SECONDS = 0.5, 0.01
"""Likewise a search, and each variable in it."""
CODECS_SECONDS = 5.0
"""After which no other method is begun, of those that the user did not name."""
SLOWEST = 10.0
"""The most that the links may be measured for: two plain steps, if they are longer than usual."""
SUMS, BESIDE, FIXED = 0.05, 0.1, 0.01
"""By how much sums, computing beside them, and the rest of a step usually exceed what was measured alone; see
:func:`fitted`."""
MOST, SUMS_MOST = 10.0, 60.0
"""How often these at most, and sums' own."""


class Planning:
    """See :class:`grace.planner.driver.Planner`.

    Args:
        asked: what the user said.
        backend: the engine.
        names: gives the name of each rank's node; every rank asks at the same moment.
        variables: the model's, in declaration order.
        framework: "torch", "tensorflow" or "numpy".
        threads: that a rank computes with.
    """

    def __init__(
        self,
        asked: Asked,
        backend: Backend,
        names: Callable[[], Sequence[str]],
        variables: Sequence[Variable],
        framework: str,
        threads: int,
    ):
        self.asked, self.backend, self.names, self.variables = asked, backend, names, list(variables)
        self.framework, self.threads = framework, threads
        self.shares = LINK_SECONDS, CODEC_SECONDS
        """About how long the links are measured, and each method."""
        self.beside: Sequence[str] = ()
        """Communicator, compressor and memory of what is measured too, and is in no search."""
        self.plain = 0.0
        """Seconds of the uncompressed steps that it was told of."""
        self.found: list[Candidate] = []
        self.problem: Problem | None = None
        self.calibration: Calibration | None = None
        self.path: Path | None = None
        """Of the file that keeps what is measured; None for none."""

    # -- every rank -----------------------------------------------------------------------------------

    def measure(self, gradients: Mapping[str, Any], timeline: Timeline, plain: float) -> None:
        """The links, and what methods take and lose on these gradients; rank 0 makes a problem of it."""
        nodes, self.plain = list(self.names()), plain
        if self.backend.size == 1:
            raise ConfigError("there is one rank, and nothing to exchange")
        slow = max(gather_or_raise(self.backend, "a plain step", plain))
        crowd = crowding(self.backend, nodes)
        links = measure_network(self.backend, max(self.shares[0], min(2 * slow, SLOWEST)), crowded=crowd > 1)
        sparse = any(variable.sparse for variable in self.variables)
        exact = self.options.quality == "exact"  # else the reference's error is the budget
        needed = ["none"] if exact else ["none", make("compressor", self.options.reference).spec]
        wanted = list(dict.fromkeys([*needed, *self.methods()]))
        order = by_promise(wanted, self.variables, timeline, Measured(links.curves), nodes, [*needed, "fp16"])
        choices = [way for method in order for way in ways_of(method, self.backend.size, sparse)]
        choices = list(dict.fromkeys([*choices, *self.beside]))
        limit = math.inf if self.options.methods or self.beside else CODECS_SECONDS
        if crowd > 1 and self.backend.rank:
            return  # rank 0 measures alone, on a core of its own, and the others' turns are added
        # each rank by its own clock, beside the others: rank 0's figures are those that count
        found = measured(choices, gradients, self.backend.size, self.options.seed, limit=limit, seconds=self.shares[1])
        if self.backend.rank == 0:
            codecs = {name: codec.times(crowd) for name, codec in found[0].items()}
            self._pose(nodes, links, codecs, *found[1:], timeline, plain)

    @property
    def options(self) -> Any:
        """What the user said of planning."""
        return self.asked.options

    @property
    def seconds(self) -> float:
        """About what measuring and planning takes."""
        links, one = self.shares
        codecs = 2 * one * (1 + len(self.methods()))
        codecs = codecs if self.options.methods or self.beside else min(codecs, CODECS_SECONDS + one)
        return links + codecs + PLAN_SECONDS + VARIABLE_SECONDS * len(self.variables)

    def methods(self) -> list[str]:
        """Specs of compressors that are measured."""
        return methods_of(self.options.methods, self.options.quality)

    # -- rank 0 ---------------------------------------------------------------------------------------

    def _pose(
        self,
        nodes: Sequence[str],
        links: Links,
        codecs: Mapping[str, Codec],
        errors: Mapping[str, Mapping[str, float]],
        norms: Mapping[str, float],
        timeline: Timeline,
        plain: float,
    ) -> None:
        key = Key.of(self.backend, nodes, self.framework, self.threads)
        made = Calibration(key, time.time(), links.curves, codecs=codecs)
        made = replace(made, by_ring=self.backend.by_ring, concatenates=self.backend.concatenates)
        if former := self._former(key):  # what earlier runs have taught
            known = {**former.codecs, **codecs}
            made = replace(made, codecs=known, corrections=former.corrections, steps=former.steps)
        options = self.options
        cluster: Cluster = cluster_of(self.asked.resources, Topology(list(nodes)))
        problem = Problem(
            self.variables,
            timeline,
            made.costs(),
            cluster,
            errors,
            norms,
            options.quality,
            options.methods,
            options.reference,
            options.seed,
        )
        self.calibration = fitted(problem, made, plain)
        self.problem = replace(problem, costs=self.calibration.costs())

    def _former(self, key: Key) -> Calibration | None:
        """What is kept of earlier runs, if it is for this one. What is refused is told; a file of the cache is then
        written anew, one that the user names is left alone."""
        self.path = path = default_path(key)
        if not os.path.exists(path):  # also where it may not be looked for, as in another user's home
            return None
        try:
            return read(path, key)
        except ConfigError as error:
            named = NAMED in os.environ
            warnings.warn(f"auto does without it{'' if named else ', and writes it anew'}: {error}", stacklevel=2)
            self.path = None if named else path
            return None

    def candidates(self) -> list[Candidate]:
        """What is worth a try, best first."""
        assert self.problem is not None
        self.found = candidates_of(self.problem, self.methods())
        return self.found

    def learned(self, seconds: Mapping[str, float]) -> None:
        """Keep what steps took, for this run's successors."""
        assert self.problem is not None
        assert self.calibration is not None
        self.found = [replace(one, measured=seconds.get(one.name, one.measured)) for one in self.found]
        for one in self.found:
            if one.name in seconds:
                self.calibration = self.calibration.with_step(measured_step(self.problem, one, seconds[one.name]))
        if self.path is not None:
            with contextlib.suppress(OSError):  # a cache that cannot be written is none
                self.calibration.write(self.path)

    def explained(self, chosen: str, why: str) -> tuple[dict[str, Any], str]:
        """The plan as a document, and in one line.

        Args:
            chosen: the name of what was chosen.
            why: not the fastest, if it is not.
        """
        assert self.problem is not None
        plan = plan_of(self.problem, self.found)
        if plan.chosen.name != chosen:
            number = next(i for i, one in enumerate(self.found) if one.name == chosen)
            plan = replace(plan, number=number, rows=())
        return plan.to_dict(), why or plan.why


def methods_of(named: Sequence[str | Mapping[str, str]] | None, quality: str) -> list[str]:
    """Specs of compressors that are measured: those that the user names, and no compression; or the usual ones of the
    class.

    >>> methods_of(["topk", "reduce_broadcast(staleness=1)"], "feedback"), methods_of(None, "half")
    (['none', 'topk'], ['none', 'fp16'])
    """
    if named is not None:
        specs = [one.get("compressor", "none") if isinstance(one, Mapping) else one for one in named]
        specs = [one for one in specs if isinstance(one, str) and one.partition("(")[0] not in known("communicator")]
    else:
        specs = [spec for spec in USUAL if allows(quality, class_of(spec))]
    return list(dict.fromkeys(["none", *specs]))


def ways_of(method: str, ranks: int, sparse: bool = False, every: bool = False) -> list[str]:
    """A method with the communicators that it is planned with, as :func:`grace.planner.codecs.maker` takes them.

    Args:
        method: the compressor's spec.
        ranks: how many there are.
        sparse: whether some gradients are rows, which are gathered.
        every: with those too that would be the usual ones for other numbers of ranks.

    >>> ways_of("qsgd", 2), ways_of("qsgd", 2, every=True)
    (['allgather, qsgd, none'], ['allgather, qsgd, none', 'scatter_reduce, qsgd, none'])
    >>> ways_of("none", 2, sparse=True)
    ['allreduce, none, none', 'allgather, none, none', 'reduce_broadcast, none, none']
    """
    made: Any = make("compressor", method)
    memory = make("memory", made.traits.memory).spec
    legal = legal_communicators(made)
    usual = ["allreduce" if "allreduce" in legal else default_communicator(made, memory, ranks)]
    if every and usual != ["allreduce"] and break_even(made) is not None:
        usual = ["allgather", "scatter_reduce"]
    if sparse and usual == ["allreduce"]:
        usual.append("allgather")
    beside = ["reduce_broadcast"] if made.traits.exact else ["scatter_merge"] if every or ranks > 2 else []
    return [f"{name}, {made.spec}, {memory}" for name in (*usual, *beside) if name in legal]


def measured(
    choices: Sequence[str],
    gradients: Mapping[str, Any],
    ranks: int,
    seed: int,
    told: Callable[[str, float], Any] = lambda what, done: None,
    limit: float = math.inf,
    seconds: float = CODEC_SECONDS,
    **more: Any,
) -> tuple[dict[str, Codec], dict[str, Mapping[str, float]], dict[str, float]]:
    """What methods take and lose on these gradients: codecs, errors by the compressor's spec, and squared norms.

    Args:
        choices: communicator, compressor and memory of each. One that makes no gradient smaller is left out.
        gradients, ranks, seed: as :func:`grace.planner.codecs.measure` takes them, and ``more``.
        told: called with what is measured, and how much of all is done.
        limit: seconds after which no other is begun, once there is one.
        seconds: about how long each is measured.
    """
    ends = time.perf_counter() + limit
    errors: dict[str, Mapping[str, float]] = {}
    codecs, norms = dict[str, Codec](), dict[str, float]()
    for i, choice in enumerate(choices):
        if codecs and time.perf_counter() > ends:
            break
        told(choice, i / len(choices))
        with contextlib.suppress(ConfigError):  # it makes none of these gradients smaller
            found = measure(choice, gradients, ranks, seed, seconds, **more)
            codecs[found.method] = found.codec
            errors[found.method.partition(", ")[2].rpartition(", ")[0]] = found.errors
            norms.update(found.norms)
    return codecs, errors, norms


def candidates_of(problem: Problem, methods: Sequence[str], progress: Progress | None = None) -> list[Candidate]:
    """What is searched, and one method for all in an optimizer's own buckets: plain sums, fp16, and the best two of
    these methods within the budget. By predicted steps.

    Args:
        problem: what is planned.
        methods: specs of compressors, plain sums among them.
        progress: as :func:`grace.planner.search.search` takes it.
    """
    searched = [one for one in search(problem, progress=progress) if not one.baseline]  # which are among the others
    ranks, nodes, found = problem.cluster.world_size, len(set(problem.cluster.ranks)), []
    for method in methods:
        try:
            strategy = grouped(problem.variables, ranks, method, nodes=nodes)
            prediction = problem.predict(strategy)
        except ConfigError:  # it cannot carry rows, or was not measured, since it makes nothing smaller
            continue
        error, plain = lost(problem, strategy), method == "none"
        if plain or error <= problem.budget * SLACK:
            spec = make("compressor", method).spec
            found.append(Candidate(method, strategy, prediction, error, baseline=plain, methods=(spec,)))
    always = [one for one in found if one.name in ("none", "fp16")]
    best = sorted((one for one in found if one not in always), key=lambda one: one.prediction.step)
    return distinct(sorted([*searched, *always, *best[:2]], key=lambda one: one.prediction.step))


def distinct(found: Sequence[Candidate]) -> list[Candidate]:
    """Return them, none called as another is: those who try them tell them apart so, by their numbers of buckets if
    these differ. The baseline keeps its name.

    >>> step = Candidate("none", None, None)
    >>> [one.name for one in distinct([step, step, replace(step, baseline=True)])]
    ['none (2)', 'none (3)', 'none']
    """
    made, taken = list[Candidate](), {one.name for one in found if one.baseline}
    for one in found:
        names = itertools.chain([one.name], _in_buckets(one), (f"{one.name} ({i})" for i in itertools.count(2)))
        name = one.name if one.baseline else next(name for name in names if name not in taken)
        taken.add(name)
        made.append(replace(one, name=name))
    return made


def _in_buckets(one: Candidate) -> list[str]:
    """A name with the number of buckets, where that is known."""
    if one.prediction is None:
        return []
    count = len({bucket for _, bucket, _, _ in one.prediction.events if bucket >= 0})
    return [f"{one.name} in {count} bucket{'s' * (count != 1)}"]


def fitted(problem: Problem, made: Calibration, plain: float) -> Calibration:
    """The calibration with which an uncompressed step takes what it took.

    What it took otherwise than predicted may be the fault of sums, which take longer or shorter than when nothing else
    ran, of computing, which takes longer beside them, or of what every step does besides; one step cannot tell. So
    each gets a share like its usual error: sums exp(t :data:`SUMS`), computing beside them 1 + t :data:`BESIDE`, and
    t :data:`FIXED` of the step's computing besides, with the t that fits. Large ones are the fault of sums alone, and
    only what no sums explain is fixed.

    Args:
        problem: whose costs count for nothing here.
        made: without either.
        plain: seconds of an uncompressed step.
    """
    strategy = grouped(problem.variables, problem.cluster.world_size, nodes=len(set(problem.cluster.ranks)))
    computing = min(problem.timeline.compute, plain)

    def tried(t: float) -> tuple[Calibration, float]:
        factor, more = math.exp(SUMS * t), min(max(0.0, t), MOST)
        curves = {**made.curves}
        if "allreduce" in curves:
            curves["allreduce"] = {n: curve.times(factor) for n, curve in curves["allreduce"].items()}
        loose = replace(made, curves=curves, contention=Contention(BESIDE * more), step=FIXED * more * computing)
        return loose, replace(problem, costs=loose.costs()).predict(strategy).step

    low, high = -SUMS_MOST, SUMS_MOST
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if tried(middle)[1] < plain else (low, middle)
    found, step = tried((low + high) / 2)
    return replace(found, step=found.step + (plain - step if high == SUMS_MOST and plain > step else 0.0))


def measured_step(problem: Problem, one: Candidate, seconds: float) -> Step:
    """What a candidate's steps took, beside what was predicted of their parts."""
    codecs, waits = dict[str, float](), dict[str, float]()
    for work in works(one.strategy, problem.costs, problem.cluster.ranks):
        codecs[work.method] = (
            codecs.get(work.method, 0.0) + work.start + work.finish + work.middle * max(0, len(work.transfers) - 1)
        )
        for transfer in work.transfers:
            waits[transfer.kind] = waits.get(transfer.kind, 0.0) + transfer.seconds
    total, step = sum(waits.values()), one.prediction.step
    exposed = {kind: one.prediction.exposed * s / total for kind, s in waits.items()} if total else {}
    rest = step - sum(codecs.values()) - sum(exposed.values())  # computing, and what every step does besides
    return Step(one.strategy.id, max(0.0, rest), codecs, exposed, seconds)
