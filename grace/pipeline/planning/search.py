"""Search for the plan with the shortest step: the best cut for every setting, of which the best few are simulated."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from numbers import Real
from typing import NamedTuple

from grace.core.communicator import CommunicatorArg, CompressorArg, MemoryArg
from grace.core.quantities import show_bytes
from grace.errors import ConfigError
from grace.pipeline.planning.blocks import blocks, cut_at
from grace.pipeline.planning.exchange_prediction import Exchanges
from grace.pipeline.planning.graph import Graph
from grace.pipeline.planning.pipeline_plan import PipelinePlan
from grace.pipeline.planning.predict import memory_of, predict_cut
from grace.pipeline.planning.rank_layout import LAYOUTS, Devices
from grace.pipeline.planning.schedules import SCHEDULES, schedule_error
from grace.pipeline.planning.stage_costs import Setting, Space
from grace.pipeline.planning.stage_search import StageCut, StageSearch
from grace.planner.costs import DefaultCodecs
from grace.planner.exchange_costs import Costs
from grace.planner.network import Network
from grace.strategy.execution import StrategyArg

BEST = 32
"""Number of cuts that are simulated."""
REFINED = 4
"""Number of these cuts whose blocks and ranks are then moved one by one."""
MOST_UNEQUAL = 16
"""Largest number of ranks for which different numbers of replicas are tried."""
MOST_MICROBATCHES = 8
"""Largest number of micro-batches for each rank that is tried if none is given."""
BLOCKS = (32, 128)
"""Numbers of blocks that are tried if none is given: on slow links the best cut may lie within one of few blocks."""
LEAST_USED = 0.5
"""Least share of the devices that a plan uses if it may use fewer."""
Numbers = int | Iterable[int] | None
"""A number, several possible numbers, or None for any."""


class MemoryShortage(ConfigError):
    """Error of a search of which every cut needs more memory than there is; the fullest rank misses ``missing`` bytes
    where memory is used least."""

    def __init__(self, message: str, missing: float):
        super().__init__(message)
        self.missing = missing


def nearest_error(refused: Sequence[ConfigError]) -> ConfigError:
    """Return the error of the search that came nearest to a plan: the smallest shortage of memory, or the last error if
    memory suffices for all."""
    shortages = [one for one in refused if isinstance(one, MemoryShortage)]
    return min(shortages, key=lambda one: one.missing) if shortages else refused[-1]


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """Constraints of a search, and facts about the devices and the training.

    Attributes:
        stages: number of stages, or several possible numbers.
        replicas: number of replicas of every stage, or several possible numbers; a list or tuple has one number for
            each stage.
        microbatches: number of micro-batches, or several possible numbers.
        schedule: one of :data:`~grace.pipeline.planning.schedules.SCHEDULES`, or several; all are tried if left out.
        recompute: True to compute forward again for backward; None tries both.
        layout: "replicas" or "stages" (:mod:`grace.pipeline.planning.rank_layout`); None tries both.
        cuts: names of the last nodes of all stages but the last, in the graph's order.
        blocks: number of blocks that stages are made of, or several that are tried; :data:`BLOCKS` if left out.
        memory: bytes of a device; None for no limit.
        memory_margin: share of them that stays free.
        compressor, residual, communicator: specs for gradients, or None for defaults. ``residual`` is Grace's memory.
        strategy: a strategy instead of these, as
            :class:`~grace.pipeline.planning.exchange_prediction.Exchanges` takes it.
        nodes: number of the node that each rank is on; all are on one node if left out.
        optimizer_state: bytes for each byte of parameters: 0 for plain SGD, 1 with momentum, 2 for Adam.
        optimizer_seconds: seconds of the optimizer's step for each byte of parameters.
        fewer: True if the plan may leave devices (the last ones) unused, up to half of them.

    Raises:
        ConfigError: a number is less than 1, several values come as an iterator, ``memory`` or its margin is no such
            number, or a schedule or layout is unknown.
    """

    stages: Numbers = None
    replicas: Numbers = None
    microbatches: Numbers = None
    schedule: str | Iterable[str] | None = None
    recompute: bool | None = None
    layout: str | None = None
    cuts: Sequence[str] | None = None
    blocks: Numbers = None
    memory: float | None = None
    memory_margin: float = 0.1
    compressor: CompressorArg | None = None
    residual: MemoryArg | None = None
    communicator: CommunicatorArg | None = None
    strategy: StrategyArg | None = None
    nodes: Sequence[int] | None = None
    optimizer_state: float = 1.0
    optimizer_seconds: float = 0.0
    fewer: bool = False

    def __post_init__(self) -> None:
        for name in ("stages", "replicas", "microbatches", "blocks", "schedule", "cuts"):
            given = getattr(self, name)
            if isinstance(given, Iterator):  # it could be read once only
                raise ConfigError(
                    f"{name} must be one value, or a list of several, not a {type(given).__name__}: give its list()"
                )
        for schedule in self.schedules:
            if schedule not in SCHEDULES:
                raise ConfigError(f"schedule {schedule!r} is unknown; there are {', '.join(SCHEDULES)}")
        if self.layout not in (None, *LAYOUTS):
            raise ConfigError(f"layout {self.layout!r} is unknown; there are {', '.join(LAYOUTS)}")
        if self.recompute not in (None, False, True):
            raise ConfigError(f"recompute must be True, False or None, not {self.recompute!r}")
        if self.memory is not None and not (isinstance(self.memory, Real) and self.memory > 0):
            raise ConfigError(f"memory must be a number of bytes above 0, as 16e9, not {self.memory!r}")
        if not (isinstance(self.memory_margin, Real) and 0 <= self.memory_margin < 1):
            raise ConfigError(f"memory_margin must be a share from 0 to below 1, not {self.memory_margin!r}")
        for name in ("stages", "replicas", "microbatches", "blocks"):
            given = getattr(self, name)
            several = isinstance(given, Iterable) and not isinstance(given, str)
            for one in given if several else (given,):
                if one is not None and (not isinstance(one, int) or isinstance(one, bool) or one < 1):
                    raise ConfigError(f"{name} must be a whole number of at least 1, not {one!r}")

    @property
    def stage_counts(self) -> set[int] | None:
        """Possible numbers of stages; None for any."""
        return _possible(self.stages) if self.cuts is None else {len(self.cuts) + 1}

    @property
    def replicas_by_stage(self) -> tuple[int, ...] | None:
        """Number of replicas of each stage; None unless one was given for each."""
        return tuple(self.replicas) if isinstance(self.replicas, (list, tuple)) else None

    @property
    def replica_counts(self) -> set[int] | None:
        """Possible numbers of replicas of every stage; None for any."""
        return None if self.replicas_by_stage else _possible(self.replicas)

    @property
    def schedules(self) -> tuple[str, ...]:
        """Schedules to try."""
        if self.schedule is None:
            return SCHEDULES
        return (self.schedule,) if isinstance(self.schedule, str) else tuple(self.schedule)

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layouts to try."""
        return LAYOUTS if self.layout is None else (self.layout,)


def _possible(numbers: Numbers) -> set[int] | None:
    """Return possible numbers as a set; None for any."""
    if numbers is None:
        return None
    return {numbers} if isinstance(numbers, int) else set(numbers)


def search_plan(
    graph: Graph, devices: int, batch: int, links: Network | Costs, options: SearchOptions | None = None
) -> PipelinePlan:
    """Return the plan with the shortest predicted step.

    Args:
        graph: the model, with its costs.
        devices: number of ranks.
        batch: rows of a step, of all replicas.
        links: the network between ranks; or costs, with the networks between nodes and within them, and codecs.
        options: constraints of the search.

    Raises:
        ConfigError: memory does not suffice (the message names the stage and the missing bytes), or no plan satisfies
            the constraints.

    >>> from grace.pipeline.planning.graph import GraphNode
    >>> from grace.planner.network import Links
    >>> chain = [GraphNode(f"n{i}", (f"n{i - 1}",) if i else ("x",), 8.0, 1.0, 2.0) for i in range(8)]
    >>> graph = Graph(tuple(chain), {"x": 8.0}, ("n7",), rows=8)
    >>> found = search_plan(graph, 2, 8, Links(1e9), SearchOptions(stages=2, microbatches=4))
    >>> [len(stage.nodes) for stage in found.stages], round(found.seconds, 6)
    ([4, 4], 15.0)
    """
    options = options or SearchOptions()
    if options.cuts is None:
        default_counts = {k for k in BLOCKS if k == BLOCKS[0] or len(graph.nodes) > BLOCKS[0]}
        block_counts = sorted(_possible(options.blocks) or default_counts)
    else:
        block_counts = [len(options.cuts) + 1]
    least = math.ceil(devices * LEAST_USED) if options.fewer else devices
    found: list[PipelinePlan] = []
    refused = [ConfigError("blocks= must be at least one number")]
    for used, most in itertools.product(range(devices, least - 1, -1), block_counts):
        space = space_of(graph, used, batch, links, options, most)
        try:
            found.append(search(space, options))
        except ConfigError as error:
            refused.append(error)
    if not found:
        raise nearest_error(refused)
    best = min(found, key=lambda plan: round(plan.seconds, 9))  # of equal plans the one with most devices
    method = options.compressor if options.strategy is None else options.strategy
    return dataclasses.replace(best, limit=options.memory, compressor=_described(method))


def space_of(
    graph: Graph,
    devices: int,
    batch: int,
    links: Network | Costs,
    options: SearchOptions | None = None,
    most: int = BLOCKS[0],
) -> Space:
    """Return the model in at most ``most`` blocks, or cut at ``options.cuts``, on the first devices, as
    :func:`search_plan` searches it.

    Raises:
        ConfigError: there is no device or row, ``options.nodes`` is of fewer ranks, or cuts are impossible.
    """
    options = options or SearchOptions()
    if devices < 1 or batch < 1:
        raise ConfigError(f"a plan needs at least one device and one row, not {devices} and {batch}")
    nodes = [0] * devices if options.nodes is None else options.nodes[:devices]
    if len(nodes) != devices:
        raise ConfigError(f"nodes= tells the nodes of {len(nodes)} ranks, and there are {devices}")
    costs = links if isinstance(links, Costs) else Costs(links, DefaultCodecs())
    ranks = Devices(tuple(nodes), costs.network, costs.inside)
    exchanges = Exchanges(costs, options.compressor, options.residual, options.communicator, options.strategy)
    limit = math.inf if options.memory is None else options.memory * (1 - options.memory_margin)
    state = options.optimizer_state

    def fits(parameters: float, kept: float) -> bool:
        """Return True if a block fits on a device, in micro-batches of one row."""
        return parameters * (2 + state) + kept / graph.rows <= limit

    made = blocks(graph, most, fits) if options.cuts is None else cut_at(graph, options.cuts)
    return Space(graph, made, ranks, exchanges, batch, limit, state, options.optimizer_seconds)


class _Candidate(NamedTuple):
    """A simulated cut, and the search that found it."""

    seconds: float
    number: int
    search: StageSearch
    cut: StageCut
    plan: PipelinePlan


def search(space: Space, options: SearchOptions) -> PipelinePlan:
    """Return the plan of a space with the shortest predicted step, or raise as :func:`search_plan` does."""
    searches = list(_searches(space, options))
    if not searches:
        raise ConfigError(_no_plan_message(space, options))
    estimates = [(_estimated_seconds(one), number) for number, one in enumerate(searches)]
    candidates: list[_Candidate] = []
    for seconds, number in sorted(estimates):
        one = searches[number]
        cut = one.cut() if math.isfinite(seconds) else None
        found = None if cut is None else predict_cut(space, one.setting, cut)
        if cut is not None and found is not None:
            candidates.append(_Candidate(round(found.seconds, 9), number, one, cut, found))
        if len(candidates) >= BEST:  # settings come in the order of their estimates
            break
    if not candidates:
        raise _memory_error(space, searches)
    candidates.sort(key=lambda candidate: (candidate.seconds, candidate.number))
    refined = []
    for candidate in candidates[:REFINED]:
        stages = candidate.search.stages
        near = [one.setting for one in searches if one.stages == stages and _is_near(one, candidate.search)]
        refined.append(_refine(space, candidate, near))
    return min(refined, key=lambda plan: round(plan.seconds, 9))


def _estimated_seconds(search: StageSearch) -> float:
    """Return an estimate of a step's seconds: the longest stage, and the filling and draining of the pipeline."""
    return search.longest() * (1 + (search.stages - 1) / search.setting.microbatches)


def _is_near(one: StageSearch, other: StageSearch) -> bool:
    """Return True if a cut for one setting is possible for the other, with at most twice as many micro-batches."""
    a, b = one.setting, other.setting
    same = (a.equal_stages, a.layout) == (b.equal_stages, b.layout)
    return same and a != b and 0.5 <= a.microbatches / b.microbatches <= 2


def _refine(space: Space, candidate: _Candidate, near: Sequence[Setting]) -> PipelinePlan:
    """Return the plan after moves of one or two blocks, or ranks, to a neighbouring stage, and to settings near by, as
    long as the step gets shorter."""
    cut, best = candidate.cut, candidate.plan
    setting = candidate.search.setting
    ranks_move = candidate.search.replicas is None and not setting.equal_stages  # the user said no number of replicas

    def improves(other: StageCut, under: Setting) -> bool:
        """Adopt another cut and setting if its step is shorter."""
        nonlocal best, cut, setting
        possible = all(i < j for i, j in other.bounds) and all(
            r > 0 and space.rows(under.microbatches, r) for r in other.replicas
        )
        found = predict_cut(space, under, other) if possible else None
        if found is None or found.seconds >= best.seconds * (1 - 1e-9):  # rounding errors must not move for ever
            return False
        best, cut, setting = found, other, under
        return True

    improved = True
    while improved:
        improved = False
        for stage, by in itertools.product(range(len(cut.ends) - 1), (-1, 1, -2, 2)):
            ends, replicas = list(cut.ends), list(cut.replicas)
            ends[stage] += by
            replicas[stage] += by
            replicas[stage + 1] -= by
            others = [cut._replace(ends=tuple(ends))]
            if ranks_move:
                others += [one._replace(replicas=tuple(replicas)) for one in (cut, *others)]
            # the first one that is better; further ones would start from the former cut
            improved |= any(improves(other, setting) for other in others)
        for other_setting in near:
            improved |= improves(cut, other_setting)
    return best


def _searches(space: Space, options: SearchOptions) -> Iterator[StageSearch]:
    """Yield a search for each possible setting and number of stages."""
    counts, by_stage, every = options.stage_counts, options.replicas_by_stage, options.replica_counts
    for setting, stages in _settings(space, options):
        if (counts is None or stages in counts) and (by_stage is None or stages == len(by_stage)):
            replicas = None if every is None else [every] * stages
            yield StageSearch(space, setting, stages, [{r} for r in by_stage] if by_stage else replicas)


def _settings(space: Space, options: SearchOptions) -> Iterator[tuple[Setting, int]]:
    """Yield all possible settings with their numbers of stages."""
    count = space.devices.count
    possible = _possible(options.microbatches) or range(1, MOST_MICROBATCHES * count + 1)
    numbers = [m for m in range(1, space.batch + 1) if space.batch % m == 0 and m in possible]
    recomputes = (False, True) if options.recompute is None else (options.recompute,)
    for m, schedule, recompute in itertools.product(numbers, options.schedules, recomputes):
        setting = Setting(schedule, m, recompute)
        stage_counts = [s for s in range(1, min(count, space.count) + 1) if not schedule_error(schedule, s, m)]
        if count <= MOST_UNEQUAL and "replicas" in options.layouts:
            for stages in stage_counts:
                yield setting, stages
        for stages in (s for s in stage_counts if count % s == 0):
            # layouts differ only if there are several stages of several replicas, on several nodes
            alike = space.devices.one_node or stages in (1, count)
            for layout in options.layouts[:1] if alike else options.layouts:
                # unequal replicas include equal ones in the layout "replicas"
                if layout == "stages" or count > MOST_UNEQUAL:
                    yield dataclasses.replace(setting, layout=layout, equal_stages=stages), stages


def _described(compressor: CompressorArg | StrategyArg | None) -> str:
    """Return the description of a compressor or strategy in a plan."""
    if isinstance(compressor, dict) and "name" not in compressor:
        return "a strategy's"
    return "none" if compressor is None else str(getattr(compressor, "spec", compressor))


def _no_plan_message(space: Space, options: SearchOptions) -> str:
    """Return the message for constraints that no plan satisfies."""
    wanted = {
        "stages": options.stage_counts,
        "replicas": options.replicas_by_stage or options.replica_counts,
        "microbatches": _possible(options.microbatches),
        "schedule": options.schedules,
        "layout": options.layouts if options.layout is not None else None,
    }
    said = ", ".join(
        f"{key}={value if isinstance(value, tuple) else sorted(value)}" for key, value in wanted.items() if value
    )
    return (
        f"no plan for {space.devices.count} devices, {space.count} blocks and {space.batch} rows is as asked ({said}): "
        "micro-batches divide the batch, 1f1b needs as many as stages, and each stage needs a block and a device"
    )


def _memory_error(space: Space, searches: Sequence[StageSearch]) -> ConfigError:
    """Return the error that names the missing memory, of the plan whose fullest rank has least."""
    by_memory = [StageSearch(space, one.setting, one.stages, one.replicas, by_memory=True) for one in searches]
    cuts = [(one.setting, cut) for one in by_memory if (cut := one.cut()) is not None]
    if not cuts:
        return ConfigError(
            f"no number of replicas of {space.devices.count} devices divides the rows of a micro-batch: "
            f"the batch has {space.batch} rows"
        )
    setting, cut = min(cuts, key=lambda found: found[1].longest)
    memory = memory_of(space, setting, cut)
    needed = max(memory)
    stage = memory.index(needed)
    i, j = cut.bounds[stage]
    first, last = space.blocks[i].nodes[0], space.blocks[j - 1].nodes[-1]
    again = ", recomputing" if setting.recompute else ""
    missing = needed - space.limit
    alone = space.needed_bytes(setting, cut.replicas[stage], 1)  # of each block as a stage
    several = [alone[b, b + 1] for b, block in enumerate(space.blocks) if len(block.nodes) > 1]
    # a border that moves within two blocks might do
    finer = space.count > len(cut.ends) and missing <= 2 * max(several, default=0.0)
    return MemoryShortage(
        f"memory does not suffice: even where it is used least ({len(cut.ends)} stages, {setting.schedule}, "
        f"micro-batches: {setting.microbatches}{again}), a rank of stage {stage} ({first} to {last}) needs "
        f"{show_bytes(needed)}, and may use {show_bytes(space.limit)}: {show_bytes(missing)} are missing"
        + (f"; blocks={2 * space.count} cuts finer" if finer else ""),
        missing,
    )
