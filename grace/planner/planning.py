"""Measuring links and codecs, planning and explaining, which ``auto`` does between two steps of training."""

import contextlib
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grace.backends.topology import Topology
from grace.communicators.choice import build_communicator
from grace.core.backend import Backend
from grace.core.communicator import Communicator
from grace.core.compressor import Tensor
from grace.core.registry import legal_communicators, make
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.planner.calibration import NAMED, Calibration, Key, default_path, read
from grace.planner.codecs import is_table, measure
from grace.planner.default_costs import DefaultCodecs
from grace.planner.error_budget import ErrorModel
from grace.planner.explain import plan_of
from grace.planner.greedy import Candidate, Names, find_candidates
from grace.planner.links import measure_network, oversubscription
from grace.planner.network import MeasuredNetwork
from grace.planner.problem import ExchangeMethod, Problem
from grace.planner.step import Timeline
from grace.planner.uniform import assigned_strategy, uniform_strategy
from grace.strategy.builder import Cluster
from grace.strategy.choices import AutoRequest
from grace.strategy.resources import cluster_of

if TYPE_CHECKING:  # which a request brings
    from grace.planner.builders.auto import Auto

LINK_SECONDS, CODEC_SECONDS = 2.0, 0.3
"""About how long the links are measured, and each method."""
LONGEST = 10.0
"""The most seconds that the links may be measured for: two plain steps, if they are longer than usual."""
PROMISING = 2
"""Methods that are measured before the first plan, beside no compression and the reference."""
MOST_FACTOR = 4.0
"""The largest factor by which collectives in a step may be slower, or faster, than measured alone."""
SKEWED = 0.1
"""The part of a step by which a rank's computing must be longer than another's to be told."""


class Planning:
    """Measures, finds candidates and explains, for :class:`grace.planner.driver.Driver`.

    Args:
        request: what the user said.
        backend: the engine.
        names: gives the name of each rank's node; every rank asks at the same moment.
        variables: the model's, in declaration order.
        framework: "torch", "tensorflow" or "numpy".
        threads: that a rank computes with.
        adaptive: True if the optimizer divides each element by its history, as Adam does.
    """

    problem: Problem
    """The problem with the methods that were measured so far; on rank 0, once links were measured."""

    def __init__(
        self,
        request: AutoRequest,
        backend: Backend,
        names: Callable[[], Sequence[str]],
        variables: Sequence[Variable],
        framework: str,
        threads: int,
        adaptive: bool = False,
    ):
        self.options: Auto = request.options
        self.resources = request.resources
        self.backend, self.names, self.variables = backend, names, list(variables)
        self.framework, self.threads, self.adaptive = framework, threads, adaptive
        self.calibration: Calibration | None = None
        self.path: Path | None = None
        """The file that keeps what is measured; None for none."""
        self.pending: list[Communicator] = []
        """Methods that are yet to be measured, the most promising first."""
        self.left_out: dict[str, str] = {}
        """Why methods could not be measured."""
        self.found: list[Candidate] = []
        self.plan_names: Names = {}
        """The name of each plan that was ever a candidate."""
        self.skew = 0.0
        self.oversubscribed = 1.0

    # -- every rank -----------------------------------------------------------------------------------

    def measure_links(self, plain: float) -> None:
        """Measure the links for about as long as two steps take. Every rank must call it.

        Raises:
            ConfigError: there is one rank, and nothing to exchange.
        """
        if self.backend.size == 1:
            raise ConfigError("there is one rank, and nothing to exchange")
        self.nodes = list(self.names())
        self.oversubscribed = oversubscription(self.backend, self.nodes)
        seconds = max(LINK_SECONDS, min(2 * plain, LONGEST))
        self.network = measure_network(self.backend, seconds, crowded=self.oversubscribed > 1)

    # -- rank 0 ---------------------------------------------------------------------------------------

    def prepare(self, gradients: Mapping[str, Tensor], timeline: Timeline, plain: float, skew: float = 0.0) -> None:
        """Measure no compression, the reference and the most promising methods on these gradients.

        Args:
            gradients: of this rank, by name.
            timeline: when the slowest rank computes what.
            plain: seconds of an uncompressed step.
            skew: seconds by which the slowest rank computes longer than the fastest.
        """
        self.gradients, self.skew, self.found, self.left_out = gradients, skew, [], {}
        options = self.options
        tables = {name for name, x in gradients.items() if is_table(x)}
        errors = ErrorModel({}, tables, self.adaptive, make("compressor", options.reference).spec)
        cluster: Cluster = cluster_of(self.resources, Topology(list(self.nodes)))
        made = self._calibration(self.nodes, self.network)
        costs = replace(made.costs(), codecs={})  # what is not measured on these gradients is not chosen
        problem = Problem(
            self.variables, timeline, costs, cluster, errors, options.quality, options.methods, options.seed
        )
        needed, promising = methods_to_measure(problem)
        self.calibration, self.problem, self.pending = made, problem, [*needed, *promising]
        for _ in range(len(needed) + PROMISING):
            self.measure_next()
        self.problem = fitted(self.problem, plain)

    def measure_next(self) -> bool:
        """Measure the next method; return False if there is none left."""
        if not self.pending:
            self.gradients = {}
            return False
        choice = self.pending.pop(0)
        try:
            self.problem = with_measured(self.problem, choice, self.gradients, self.oversubscribed)
        except ConfigError as error:  # it makes none of these gradients smaller
            self.left_out[choice.describe()] = str(error)
        return True

    def candidates(self) -> list[Candidate]:
        """Return the plans that are worth a try, best first; a plan keeps its name when there are more methods."""
        measured = {one.name: one.measured for one in self.found}
        found = find_candidates(self.problem, names=self.plan_names)
        found = [replace(one, measured=measured.pop(one.name, None)) for one in found]
        self.found = [*found, *(one for one in self.found if one.name in measured)]
        return found

    def learned(self, seconds: Mapping[str, float]) -> None:
        """Keep what steps took, and what was measured for this run's successors."""
        assert self.calibration is not None
        self.found = [replace(one, measured=seconds.get(one.name, one.measured)) for one in self.found]
        codecs = {**self.calibration.codecs, **self.problem.costs.codecs}
        self.calibration = replace(self.calibration, codecs=codecs)
        if self.path is not None:
            with contextlib.suppress(OSError):  # a cache that cannot be written is none
                self.calibration.write(self.path)

    def explained(self, chosen: str, note: str) -> tuple[dict[str, Any], str]:
        """Return the plan as a document, and in one line.

        Args:
            chosen: the name of what was chosen.
            note: why it is not the fastest, if it is not.
        """
        remarks = [f"not measured: {choice}: {why}" for choice, why in self.left_out.items()]
        slow = self.problem.timeline.compute
        if self.skew > SKEWED * slow:
            remarks.append(
                f"the slowest rank computes {1e3 * slow:.3g} ms a step, the fastest {1e3 * (slow - self.skew):.3g}: no "
                "compression shortens what the others wait for it"
            )
        plan = plan_of(self.problem, self.found, chosen=chosen, note=note, remarks=remarks)
        return plan.to_dict(), "; ".join([plan.why, *plan.remarks[len(remarks) :]])

    def _calibration(self, nodes: Sequence[str], network: MeasuredNetwork | None) -> Calibration:
        """Return what is known before codecs are measured: the links, and the codecs that earlier runs have kept."""
        key = Key.of(self.backend, nodes, self.framework, self.threads)
        former = self._former(key) or Calibration(key, 0.0)
        by_ring, concatenates = self.backend.by_ring, self.backend.concatenates
        return replace(former, made=time.time(), network=network, by_ring=by_ring, concatenates=concatenates)

    def _former(self, key: Key) -> Calibration | None:
        """Return what is kept of earlier runs, if it is for this one. What is refused is told; a file of the cache is
        then written anew, one that the user names is left alone."""
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


def methods_to_measure(problem: Problem) -> tuple[list[Communicator], list[Communicator]]:
    """Return the communicators by which methods are measured: no compression's and the reference's, which every plan is
    compared with; and those of the methods that may be chosen, best first (:func:`by_predicted_step`).

    Where some gradients are rows, which are gathered, a method that is summed is measured by the all-gather as well, if
    that can carry it.

    Args:
        problem: with the links and tables as they are; codecs are taken as they were measured elsewhere.

    >>> from grace.planner.builders.auto import Auto
    >>> from grace.strategy.builder import OneNode
    >>> rows = [Variable("table", (9, 2), sparse=True)]
    >>> needed, others = methods_to_measure(Auto(quality="exact").problem(rows, OneNode(2)))
    >>> [made.describe() for made in needed], others
    (['allreduce, none, none', 'allgather, none, none'], [])
    """
    compared = ["none"]
    if problem.quality != "exact":  # the reference bounds errors, of whatever class it is itself
        compared.append(problem.errors.reference)
    needed = _measured_by([build_communicator(spec, None, None, problem.ranks) for spec in compared], problem)
    others = _measured_by([method.communicator for method in by_predicted_step(problem)], problem)
    return list(needed.values()), [choice for name, choice in others.items() if name not in needed]


def _measured_by(methods: Sequence[Communicator], problem: Problem) -> dict[str, Communicator]:
    """Return the communicators by which methods are measured, by their descriptions."""
    sparse, found = any(variable.sparse for variable in problem.variables), dict[str, Communicator]()
    for communicator in methods:
        found[communicator.describe()] = communicator
        if sparse and communicator.name == "allreduce" and "allgather" in legal_communicators(communicator.compressor):
            other = build_communicator(communicator.compressor.spec, communicator.memory.spec, "allgather")
            found[other.describe()] = other
    return found


def by_predicted_step(problem: Problem) -> list[ExchangeMethod]:
    """Return the methods, best first by the predicted step of each for all variables that it serves, with codecs as
    they were measured elsewhere."""
    problem = replace(problem, costs=replace(problem.costs, codecs=DefaultCodecs()))
    methods = problem.candidates()
    dense = methods[0].communicator

    def step(method: ExchangeMethod) -> float:
        served = [method.serves(variable, problem.errors.tables) for variable in problem.variables]
        wanted = [method.communicator if serves else dense for serves in served]
        try:
            return problem.predict(assigned_strategy(problem.variables, wanted, problem.ranks, problem.nodes)).step
        except ConfigError:  # it cannot carry rows
            return math.inf

    return sorted(methods, key=step)


def with_measured(
    problem: Problem, choice: Communicator, gradients: Mapping[str, Tensor], oversubscribed: float = 1.0
) -> Problem:
    """Return the problem with a method's codec and errors, measured on gradients.

    Args:
        problem: the problem.
        choice: the method.
        gradients: by variable name.
        oversubscribed: ranks per core, which take turns at a codec.

    Raises:
        ConfigError: the method makes none of the gradients smaller.
    """
    found = measure(choice, gradients, problem.ranks, problem.seed, CODEC_SECONDS)
    codecs = {**problem.costs.codecs, found.method: found.codec.times(oversubscribed)}
    measured = {**problem.errors.measured, choice.compressor.spec: found.errors}
    return replace(
        problem, costs=replace(problem.costs, codecs=codecs), errors=replace(problem.errors, measured=measured)
    )


def fitted(problem: Problem, plain: float) -> Problem:
    """Return the problem with collectives scaled so that an uncompressed step takes what it took: beside computing, and
    on links that others use too, they take longer than alone.

    Args:
        problem: with the links as they were measured alone.
        plain: seconds of an uncompressed step.
    """
    network, factor = problem.costs.network, 1.0
    if not isinstance(network, MeasuredNetwork):
        return problem
    strategy = uniform_strategy(problem.variables, problem.ranks, nodes=problem.nodes)
    compute = problem.timeline.compute
    for _ in range(6):  # what computing hides is not in proportion to the factor
        costs = replace(problem.costs, network=network.times(factor))
        found = replace(problem, costs=costs)
        waits, wanted = found.predict(strategy).step - compute, plain - compute
        if waits <= 0 or wanted <= 0:
            break
        factor = min(max(factor * wanted / waits, 1 / MOST_FACTOR), MOST_FACTOR)
    return replace(problem, costs=replace(problem.costs, network=network.times(factor)))
