"""Search for the plan with the shortest step: the best cut for every setting, of which the best few are simulated."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from grace.errors import ConfigError
from grace.partition.blocks import blocks, cut_at
from grace.partition.costs import Setting, Space
from grace.partition.exchange import Exchanges
from grace.partition.graph import Graph
from grace.partition.layout import LAYOUTS, Devices
from grace.partition.orders import SINGLE, check, rank_of
from grace.partition.plan import SCHEDULES, Plan
from grace.partition.predict import memory_of, predicted
from grace.partition.stages import Cut, Program
from grace.planner.default_costs import DefaultCodecs
from grace.planner.exchange_costs import Costs
from grace.planner.network import Network

BEST = 32
"""Number of cuts that are simulated."""
REFINED = 4
"""Number of these cuts whose blocks and ranks are then moved one by one."""
MOST_UNEQUAL = 16
"""Largest number of ranks for which different numbers of replicas are tried."""
MOST_LOCAL = 4
"""Stages on a rank, at most, of schedules that take several."""
MOST_MICROBATCHES = 8
"""Largest number of micro-batches for each rank that is tried if none is given."""
BLOCKS = (32, 128)
"""Numbers of blocks that are tried if none is given: on slow links the best cut may lie within one of few blocks."""
FINER, MOST_BLOCKS = 2, 128
"""Factor by which the number of blocks grows if memory nearly suffices, and the largest number of blocks."""
LEAST_USED = 0.5
"""Least share of the devices that a plan uses if it may use fewer."""
Numbers = int | Iterable[int] | None
"""A number, several possible numbers, or None for any."""


class TooLittleMemory(ConfigError):
    """Memory suffices for no cut between a space's blocks.

    Attributes:
        nearly: True if no more is missing than a cut within a block may bring.
    """

    def __init__(self, said: str, nearly: bool):
        super().__init__(said)
        self.nearly = nearly


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """Constraints of a search, and facts about the devices and the training.

    Attributes:
        stages: number of stages, or several possible numbers. Several stages on a rank count each.
        replicas: number of replicas of every stage, or several possible numbers; a list or tuple has one number for
            each stage.
        microbatches: number of micro-batches, or several possible numbers.
        schedule: one of :data:`~grace.partition.plan.SCHEDULES`, or several; "gpipe" and "1f1b" if left out.
        recompute: True to compute forward again for backward; None tries both.
        layout: "replicas" or "stages" (:mod:`grace.partition.layout`); None tries both.
        cuts: names of the last nodes of all stages but the last, in the graph's order.
        blocks: number of blocks that stages are made of, or several that are tried; :data:`BLOCKS` if left out.
        memory: bytes of a device; None for no limit.
        memory_margin: share of them that stays free.
        compressor, residual, communicator: specs for gradients, or None for defaults. ``residual`` is Grace's memory.
        strategy: a strategy instead of these, as :class:`~grace.partition.exchange.Exchanges` takes it.
        nodes: number of the node that each rank is on; all are on one node if left out.
        optimizer_state: bytes for each byte of parameters: 0 for plain SGD, 1 with momentum, 2 for Adam.
        optimizer_seconds: seconds of the optimizer's step for each byte of parameters.
        fewer: True if the plan may leave devices (the last ones) unused, up to half of them.

    Raises:
        ConfigError: a number is less than 1, or a schedule or layout is unknown.
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
    compressor: Any = None
    residual: Any = None
    communicator: Any = None
    strategy: Any = None
    nodes: Sequence[int] | None = None
    optimizer_state: float = 1.0
    optimizer_seconds: float = 0.0
    fewer: bool = False

    def __post_init__(self) -> None:
        for schedule in self.schedules:
            if schedule not in SCHEDULES:
                raise ConfigError(f"schedule {schedule!r} is unknown; there are {', '.join(SCHEDULES)}")
        if self.layout not in (None, *LAYOUTS):
            raise ConfigError(f"layout {self.layout!r} is unknown; there are {', '.join(LAYOUTS)}")
        for name in ("stages", "replicas", "microbatches"):
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
            return SINGLE
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
) -> Plan:
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

    >>> from grace.partition.graph import Node
    >>> from grace.planner.network import Links
    >>> chain = [Node(f"n{i}", (f"n{i - 1}",) if i else ("x",), 8.0, 1.0, 2.0) for i in range(8)]
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
    tries = [(most, used) for used in range(devices, least - 1, -1) for most in block_counts]
    found: list[Plan] = []
    refused = ConfigError("blocks= must be at least one number")
    while tries:
        most, used = tries.pop(0)
        space = space_of(
            graph,
            used,
            batch,
            links,
            memory=None if options.memory is None else options.memory * (1 - options.memory_margin),
            choices=(options.compressor, options.residual, options.communicator, options.strategy),
            nodes=None if options.nodes is None else options.nodes[:used],
            cuts=options.cuts,
            most=most,
            state=options.optimizer_state,
            update=options.optimizer_seconds,
        )
        try:
            found.append(search(space, options))
        except TooLittleMemory as error:
            refused = error
            if error.nearly and not (found or tries or options.cuts) and space.count < MOST_BLOCKS:
                tries = [(min(FINER * space.count, MOST_BLOCKS), devices)]
        except ConfigError as error:
            refused = error
    if not found:
        raise refused
    best = min(found, key=lambda plan: round(plan.seconds, 9))
    method = options.compressor if options.strategy is None else options.strategy
    return dataclasses.replace(best, limit=options.memory, compressor=_described(method))


def space_of(
    graph: Graph,
    devices: int,
    batch: int,
    links: Network | Costs,
    *,
    memory: float | None = None,
    choices: tuple[Any, ...] = (),
    nodes: Sequence[int] | None = None,
    cuts: Sequence[str] | None = None,
    most: int = 32,
    state: float = 1.0,
    update: float = 0.0,
) -> Space:
    """Return the model in blocks, on the devices, as :func:`search_plan` searches it.

    Raises:
        ConfigError: there is no device or row, ``nodes`` is of another number of ranks, or cuts are impossible.
    """
    if devices < 1 or batch < 1:
        raise ConfigError(f"a plan needs at least one device and one row, not {devices} and {batch}")
    if nodes is not None and len(nodes) != devices:
        raise ConfigError(f"nodes= tells the nodes of {len(nodes)} ranks, and there are {devices}")
    costs = links if isinstance(links, Costs) else Costs(links, DefaultCodecs())
    ranks = Devices(tuple(nodes or [0] * devices), costs.network, costs.inside)
    limit = math.inf if memory is None else memory
    least = 1 / graph.rows  # a micro-batch has at least one row

    def fits(parameters: float, kept: float) -> bool:
        """Return True if a block fits on a device."""
        return parameters * (2 + state) + kept * least <= limit

    made = blocks(graph, most, fits) if cuts is None else cut_at(graph, cuts)
    return Space(graph, made, ranks, Exchanges(costs, *choices), batch, memory, state, update)


def search(space: Space, options: SearchOptions) -> Plan:
    """Return the plan of a space with the shortest predicted step.

    Raises:
        ConfigError: see :func:`search_plan`.
    """
    drafts: list[tuple[float, int, Program, int]] = []
    tried = list(_programs(space, options))
    if not tried:
        raise ConfigError(_no_plan_message(space, options))
    for program, stages in tried:
        longest = program.longest(stages)
        if math.isfinite(longest):
            drafts.append((_estimate(program.setting, stages, longest), len(drafts), program, stages))
    drafts.sort(key=lambda draft: draft[:2])
    played: list[tuple[float, int, Plan, Program, Cut]] = []
    for _, number, program, stages in drafts:
        cut = program.cut(stages)
        found = None if cut is None else predicted(space, program.setting, cut)
        if cut is not None and found is not None:
            played.append((round(found.seconds, 9), number, found, program, cut))
        if len(played) >= BEST:
            break
    if not played:
        raise _too_little(space, tried)
    played.sort(key=lambda one: one[:2])
    moved = []
    for _, _, found, program, cut in played[:REFINED]:
        near = [
            other.setting
            for other, stages in tried
            if stages == len(cut.ends) and _alike(other.setting, program.setting)
        ]
        moved.append(_moved(space, program, cut, found, near))
    return min(moved, key=lambda plan: round(plan.seconds, 9))


def _alike(one: Setting, other: Setting) -> bool:
    """Whether a cut for one is one for the other, with up to twice as many micro-batches."""
    same = (one.places, one.local, one.layout) == (other.places, other.local, other.layout)
    return same and one != other and 0.5 <= one.microbatches / other.microbatches <= 2


def _moved(space: Space, program: Program, cut: Cut, best: Plan, near: Sequence[Setting]) -> Plan:
    """The plan after moves of one or two blocks, or ranks, to a neighbour, and to another setting, as long as the step
    gets shorter."""
    ranks_move = not program.setting.places and program.allowed is None and program.of_stage is None
    setting, better = program.setting, True

    def tried(one: Cut, under: Setting) -> bool:
        nonlocal best, cut, setting, better
        possible = all(i < j for i, j in one.bounds) and all(
            r > 0 and space.rows(under.microbatches, r) for r in one.replicas
        )
        found = predicted(space, under, one) if possible else None
        if found is None or found.seconds >= best.seconds * (1 - 1e-9):
            return False
        best, cut, setting, better = found, one, under, True
        return True

    while better:
        better = False
        for at, by in itertools.product(range(len(cut.ends) - 1), (-1, 1, -2, 2)):
            ends, replicas = list(cut.ends), list(cut.replicas)
            ends[at] += by
            replicas[at] += by
            replicas[at + 1] -= by
            others = [cut._replace(ends=tuple(ends))]
            if ranks_move:
                others += [one._replace(replicas=tuple(replicas)) for one in (cut, *others)]
            any(tried(one, setting) for one in others)
        any([tried(cut, other) for other in near])
    return best


def settings(space: Space, options: SearchOptions) -> Iterator[tuple[Setting, list[int]]]:
    """All settings that are possible, each with its numbers of stages."""
    count, many = space.devices.count, space.devices.count
    divisors = [m for m in range(1, space.batch + 1) if space.batch % m == 0]
    usual = [m for m in divisors if m <= max(MOST_MICROBATCHES * many, 1)]
    possible = _possible(options.microbatches)
    wanted = usual if possible is None else [m for m in divisors if m in possible]
    for m in wanted:
        for schedule in options.schedules:
            for recompute in (False, True) if options.recompute is None else (options.recompute,):
                plain = Setting(schedule, m, recompute)
                if schedule in SINGLE:
                    if count <= MOST_UNEQUAL and "replicas" in options.layouts:
                        stages = [s for s in range(1, min(count, space.count) + 1) if not check(schedule, s, s, m)]
                        yield plain, stages
                    for places in (p for p in range(1, min(count, space.count) + 1) if count % p == 0):
                        if check(schedule, places, places, m):
                            continue
                        for layout in _layouts(space, options, places):
                            if layout == "stages" or count > MOST_UNEQUAL:
                                yield dataclasses.replace(plain, layout=layout, places=places), [places]
                    continue
                for places in (p for p in range(2, count + 1) if count % p == 0):
                    for local in range(1 if schedule == "zero_bubble" else 2, MOST_LOCAL + 1):
                        if places * local > space.count or check(schedule, places, places * local, m):
                            continue
                        for layout in _layouts(space, options, places):
                            for share in dict.fromkeys((1.0, 1 / local) if math.isfinite(space.limit) else (1.0,)):
                                yield Setting(schedule, m, recompute, layout, places, local, share), [places * local]


def _layouts(space: Space, options: SearchOptions, places: int) -> tuple[str, ...]:
    """Return the layouts to try that differ."""
    if space.devices.one_node or places in (1, space.devices.count):
        return options.layouts[:1]
    return options.layouts


def _programs(space: Space, options: SearchOptions) -> Iterator[tuple[Program, int]]:
    """Yield the dynamic program of each possible setting, and its number of stages."""
    by_stage = options.replicas_by_stage
    for setting, stages in settings(space, options):
        for count in stages:
            wanted = options.stage_counts is None or count in options.stage_counts
            if wanted and (by_stage is None or count == len(by_stage)):
                yield Program(space, setting, [count], options.replica_counts, by_stage), count


def _estimate(setting: Setting, stages: int, longest: float) -> float:
    """About what a step takes: the longest stage, and the pipeline's filling and draining."""
    places = stages // setting.local
    fill = {"zero_bubble": 1 / 3, "zbv": 1 / 6}.get(setting.schedule, 1 / setting.local)
    return setting.local * longest * (1 + fill * (places - 1) / setting.microbatches)


def _described(compressor: Any) -> str:
    """In a plan: a spec, or a strategy's."""
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


def _too_little(space: Space, tried: Sequence[tuple[Program, int]]) -> ConfigError:
    """Return the error that says how much is missing, of the plan whose fullest rank has least."""
    best: tuple[float, Program, Cut] | None = None
    for program, stages in tried:
        small = Program(space, program.setting, [stages], program.allowed, program.of_stage, True)
        cut = small.cut(stages)
        if cut is not None and (best is None or cut.longest < best[0]):
            best = cut.longest, small, cut
    if best is None:
        return ConfigError(
            f"no number of replicas of {space.devices.count} devices divides the rows of a micro-batch: "
            f"the batch has {space.batch} rows"
        )
    _, program, cut = best
    setting = program.setting
    memory, places = memory_of(space, setting, cut), setting.places or len(cut.ends)
    needed = max(memory)
    own = [s for s in range(len(cut.ends)) if rank_of(setting.schedule, s, places) == memory.index(needed)]
    stage = max(own, key=lambda s: space.memory(cut.replicas[s], setting.microbatches).static[cut.bounds[s]])
    i, j = cut.bounds[stage]
    first, last = space.blocks[i].nodes[0], space.blocks[j - 1].nodes[-1]
    again = ", recomputing" if setting.recompute else ""
    others = f", with the {len(own) - 1} other stages on it," if len(own) > 1 else ""
    missing, usual = needed - space.limit, space.memory(cut.replicas[stage], setting.microbatches)
    alone = usual.static + usual.made
    several = [alone[b, b + 1] for b, block in enumerate(space.blocks) if len(block.nodes) > 1]
    nearly = missing <= FINER * max(several, default=0.0)  # a border that moves within two blocks
    return TooLittleMemory(
        f"memory does not suffice: even where it is used least ({len(cut.ends)} stages, {setting.schedule}, "
        f"micro-batches: {setting.microbatches}{again}), a rank of stage {stage} ({first} to {last}){others} needs "
        f"{needed / 1e9:.3f} GB, and may use {space.limit / 1e9:.3f} GB: "
        f"{missing / 1e9:.3f} GB are missing"
        + (f"; blocks={FINER * space.count} cuts finer" if nearly and space.count >= MOST_BLOCKS else ""),
        nearly,
    )
