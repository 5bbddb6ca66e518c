"""The search for a plan: the best cut for every setting, and the best few of those played through."""

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
"""Cuts that are played through."""
REFINED = 4
"""Of those, whose blocks and ranks are then moved one by one."""
MOST_UNEQUAL = 16
"""Ranks up to which stages may have different numbers of replicas."""
MOST_LOCAL = 4
"""Stages on a rank, at most, of schedules that take several."""
MOST_MICROBATCHES = 8
"""Micro-batches for each rank, at most, where nobody says how many."""
BLOCKS = (32, 128)
"""Numbers of blocks that are tried where nobody says how many: on slow links the best cut may lie within one of few."""
FINER, MOST_BLOCKS = 2, 128
"""Times as many blocks are tried where memory nearly suffices for the cuts between these, and up to how many."""
LEAST_USED = 0.5
"""The part of the devices that a plan must use, where it may use fewer."""
Some = int | Iterable[int] | None


class TooLittleMemory(ConfigError):
    """Memory suffices for no cut between a space's blocks.

    Attributes:
        nearly: True if no more is missing than a cut within a block may bring.
    """

    def __init__(self, said: str, nearly: bool):
        super().__init__(said)
        self.nearly = nearly


def plan(
    graph: Graph,
    devices: int,
    batch: int,
    links: Network | Costs,
    *,
    memory: float | None = None,
    memory_margin: float = 0.1,
    compressor: Any = None,
    residual: Any = None,
    communicator: Any = None,
    strategy: Any = None,
    nodes: Sequence[int] | None = None,
    stages: Some = None,
    replicas: Some = None,
    microbatches: Some = None,
    schedule: str | Iterable[str] | None = None,
    recompute: bool | None = None,
    layout: str | None = None,
    cuts: Sequence[str] | None = None,
    blocks: Some = None,
    optimizer_state: float = 1.0,
    optimizer_seconds: float = 0.0,
    fewer: bool = False,
) -> Plan:
    """Return the plan whose step is expected to be shortest.

    Args:
        graph: the model, measured.
        devices: how many ranks.
        batch: rows of a step, all replicas together.
        links: between ranks; or costs, with the network between nodes and within them, and codecs.
        memory: bytes of a device; no limit if left out.
        memory_margin: part of them that stays free.
        compressor, residual, communicator: of gradients; specs, or None for defaults. ``residual`` is Grace's memory.
        strategy: instead of these, as :class:`~grace.partition.exchange.Exchanges` takes it.
        nodes: the number of the node of each rank; all on one if left out.
        stages: how many; one number or several that may be. Those of all ranks together, several on a rank counted.
        replicas: how many of every stage, or several numbers that may be; a list is one number for each stage.
        microbatches: how many, or several that may be.
        schedule: one of :data:`~grace.partition.plan.SCHEDULES`, or several; "gpipe" and "1f1b" if left out.
        recompute: whether stages compute forward again; both are tried if left out.
        layout: "replicas" or "stages" (:mod:`grace.partition.layout`); both are tried if left out.
        cuts: names of the last nodes of all stages but the last, in the graph's order.
        blocks: k, from how many blocks stages are made; several are tried each, :data:`BLOCKS` if left out.
        optimizer_state: bytes for each byte of parameters: 0 of plain SGD, 1 with momentum, 2 of Adam.
        optimizer_seconds: of its step for each byte of parameters.
        fewer: True if the plan may leave devices (the last ones) unused, up to half of them; else all are used.

    Raises:
        ConfigError: memory does not suffice (the message names the stage and what is missing), or nothing fits what
            was asked for.

    >>> from grace.partition.graph import Node
    >>> from grace.planner.network import Links
    >>> chain = [Node(f"n{i}", (f"n{i - 1}",) if i else ("x",), 8.0, 1.0, 2.0) for i in range(8)]
    >>> found = plan(Graph(tuple(chain), {"x": 8.0}, ("n7",), rows=8), 2, 8, Links(1e9), stages=2, microbatches=4)
    >>> [len(stage.nodes) for stage in found.stages], round(found.seconds, 6)
    ([4, 4], 15.0)
    """
    of_stage = tuple(replicas) if isinstance(replicas, (list, tuple)) else None
    asked = Asked(
        stages=_some(stages) if cuts is None else {len(cuts) + 1},
        replicas=None if of_stage else _some(replicas),
        of_stage=of_stage,
        microbatches=_some(microbatches),
        schedules=SINGLE if schedule is None else (schedule,) if isinstance(schedule, str) else tuple(schedule),
        recompute=(False, True) if recompute is None else (recompute,),
        layouts=LAYOUTS if layout is None else (layout,),
    )
    found: list[Plan] = []
    refused: ConfigError | None = None
    if cuts is not None:
        numbers = [len(cuts) + 1]
    else:
        numbers = sorted(_some(blocks) or {k for k in BLOCKS if k == BLOCKS[0] or len(graph.nodes) > BLOCKS[0]})
    least = math.ceil(devices * LEAST_USED) if fewer else devices
    tries = [(most, used) for used in range(devices, least - 1, -1) for most in numbers]
    while tries:
        most, used = tries.pop(0)
        space = space_of(
            graph,
            used,
            batch,
            links,
            memory=None if memory is None else memory * (1 - memory_margin),
            choices=(compressor, residual, communicator, strategy),
            nodes=None if nodes is None else nodes[:used],
            cuts=cuts,
            most=most,
            state=optimizer_state,
            update=optimizer_seconds,
        )
        try:
            found.append(search(space, asked))
        except TooLittleMemory as error:
            refused = error
            if error.nearly and not (found or tries or cuts) and space.count < MOST_BLOCKS:
                tries = [(min(FINER * space.count, MOST_BLOCKS), devices)]
        except ConfigError as error:
            refused = error
    if not found:
        raise refused or ConfigError("blocks= must be at least one number")
    best = min(found, key=lambda one: round(one.seconds, 9))
    return dataclasses.replace(best, limit=memory, compressor=_described(compressor if strategy is None else strategy))


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
    """What :func:`plan` searches: the model in blocks, on the devices.

    Raises:
        ConfigError: no device or row, nodes of another number of ranks, or cuts that cannot be.
    """
    if devices < 1 or batch < 1:
        raise ConfigError(f"a plan needs at least one device and one row, not {devices} and {batch}")
    if nodes is not None and len(nodes) != devices:
        raise ConfigError(f"nodes= tells the nodes of {len(nodes)} ranks, and there are {devices}")
    costs = links if isinstance(links, Costs) else Costs(links, DefaultCodecs())
    ranks = Devices(tuple(nodes or [0] * devices), costs.network, costs.inside)
    limit = math.inf if memory is None else memory
    least = 1 / graph.rows  # a micro-batch has a row at least

    def fits(parameters: float, kept: float) -> bool:
        return parameters * (2 + state) + kept * least <= limit

    made = blocks(graph, most, fits) if cuts is None else cut_at(graph, cuts)
    return Space(graph, made, ranks, Exchanges(costs, *choices), batch, memory, state, update)


@dataclasses.dataclass(frozen=True)
class Asked:
    """What plans may be; None where anything may."""

    stages: set[int] | None = None
    replicas: set[int] | None = None
    of_stage: tuple[int, ...] | None = None
    microbatches: set[int] | None = None
    schedules: tuple[str, ...] = SINGLE
    recompute: tuple[bool, ...] = (False, True)
    layouts: tuple[str, ...] = LAYOUTS

    def __post_init__(self) -> None:
        for schedule in self.schedules:
            if schedule not in SCHEDULES:
                raise ConfigError(f"schedule {schedule!r} is unknown; there are {', '.join(SCHEDULES)}")
        for layout in self.layouts:
            if layout not in LAYOUTS:
                raise ConfigError(f"layout {layout!r} is unknown; there are {', '.join(LAYOUTS)}")


def search(space: Space, asked: Asked) -> Plan:
    """The plan of a space whose step is expected to be shortest.

    Raises:
        ConfigError: see :func:`plan`.
    """
    drafts: list[tuple[float, int, Program, int]] = []
    tried = list(_programs(space, asked))
    if not tried:
        raise ConfigError(_nothing(space, asked))
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


def settings(space: Space, asked: Asked) -> Iterator[tuple[Setting, list[int]]]:
    """All settings that are possible, each with its numbers of stages."""
    count, many = space.devices.count, space.devices.count
    divisors = [m for m in range(1, space.batch + 1) if space.batch % m == 0]
    usual = [m for m in divisors if m <= max(MOST_MICROBATCHES * many, 1)]
    wanted = usual if asked.microbatches is None else [m for m in divisors if m in asked.microbatches]
    for m in wanted:
        for schedule in asked.schedules:
            for recompute in asked.recompute:
                plain = Setting(schedule, m, recompute)
                if schedule in SINGLE:
                    if count <= MOST_UNEQUAL and "replicas" in asked.layouts:
                        stages = [s for s in range(1, min(count, space.count) + 1) if not check(schedule, s, s, m)]
                        yield plain, stages
                    for places in (p for p in range(1, min(count, space.count) + 1) if count % p == 0):
                        if check(schedule, places, places, m):
                            continue
                        for layout in _layouts(space, asked, places):
                            if layout == "stages" or count > MOST_UNEQUAL:
                                yield dataclasses.replace(plain, layout=layout, places=places), [places]
                    continue
                for places in (p for p in range(2, count + 1) if count % p == 0):
                    for local in range(1 if schedule == "zero_bubble" else 2, MOST_LOCAL + 1):
                        if places * local > space.count or check(schedule, places, places * local, m):
                            continue
                        for layout in _layouts(space, asked, places):
                            for share in dict.fromkeys((1.0, 1 / local) if math.isfinite(space.limit) else (1.0,)):
                                yield Setting(schedule, m, recompute, layout, places, local, share), [places * local]


def _layouts(space: Space, asked: Asked, places: int) -> list[str]:
    """Those that differ."""
    if space.devices.one_node or places in (1, space.devices.count):
        return [layout for layout in LAYOUTS if layout in asked.layouts][:1]
    return list(asked.layouts)


def _programs(space: Space, asked: Asked) -> Iterator[tuple[Program, int]]:
    for setting, stages in settings(space, asked):
        wanted = [s for s in stages if asked.stages is None or s in asked.stages]
        if asked.of_stage is not None:
            wanted = [s for s in wanted if s == len(asked.of_stage)]
        for count in wanted:
            yield Program(space, setting, [count], asked.replicas, asked.of_stage), count


def _estimate(setting: Setting, stages: int, longest: float) -> float:
    """About what a step takes: the longest stage, and the pipeline's filling and draining."""
    places = stages // setting.local
    fill = {"zero_bubble": 1 / 3, "zbv": 1 / 6}.get(setting.schedule, 1 / setting.local)
    return setting.local * longest * (1 + fill * (places - 1) / setting.microbatches)


def _some(value: Some) -> set[int] | None:
    return None if value is None else {value} if isinstance(value, int) else set(value)


def _described(compressor: Any) -> str:
    """In a plan: a spec, or a strategy's."""
    if isinstance(compressor, dict) and "name" not in compressor:
        return "a strategy's"
    return "none" if compressor is None else str(getattr(compressor, "spec", compressor))


def _nothing(space: Space, asked: Asked) -> str:
    wanted = {
        "stages": asked.stages,
        "replicas": asked.of_stage or asked.replicas,
        "microbatches": asked.microbatches,
        "schedule": asked.schedules,
        "layout": asked.layouts if len(asked.layouts) == 1 else None,
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
