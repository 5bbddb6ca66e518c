"""A cut as a plan: its schedule played through, what of the gradients' exchange is not hidden, and memory by rank."""

from collections.abc import Sequence

from grace.partition.costs import Setting, Space
from grace.partition.layout import groups_of
from grace.partition.orders import rank_of
from grace.partition.plan import Plan, Stage
from grace.partition.schedule import Played, Times, most_kept, play
from grace.partition.stages import Cut

HALF = 0.5
"""Of backward, what is for parameters alone: a matrix product for each of the two gradients."""


def predicted(space: Space, setting: Setting, cut: Cut) -> Plan | None:
    """The plan of a cut; None if ranks with several stages have too little memory."""
    count, many = len(cut.ends), setting.microbatches
    places = setting.places or count
    groups = groups_of(setting.layout, cut.replicas[:places])
    at = [groups[rank_of(setting.schedule, stage, places)] for stage in range(count)]
    times = _times(space, setting, cut, at)
    played = play(setting.schedule, places, times, many)
    exchanges = [_exchange(space, cut, at, stage, groups) for stage in range(count)]
    place_of = [rank_of(setting.schedule, stage, places) for stage in range(count)]
    waits = [sum(e for e, p in zip(exchanges, place_of, strict=True) if p == place) for place in range(places)]
    updates = [0.0] * places
    for (i, j), place in zip(cut.bounds, place_of, strict=True):
        updates[place] += float(space.parameters[i, j]) * space.update
    done = [one + update for one, update in zip(played.done, updates, strict=True)]
    seconds = max(one + wait for one, wait in zip(done, waits, strict=True))
    memory = memory_of(space, setting, cut)
    if max(memory) > space.limit * (1 + 1e-12):
        return None
    scale = space.batch / many / space.graph.rows
    made = []
    for stage, (i, j) in enumerate(cut.bounds):
        sent, back = (float(of[j]) * scale if j < space.count else 0.0 for of in (space.there, space.back))
        made.append(
            Stage(
                nodes=tuple(_nodes(space, i, j)),
                ranks=at[stage],
                sends=space.passed[j - 1] if j < space.count else (),
                forward=times[stage].forward,
                backward=times[stage].backward,
                crossing=times[stage].there,
                returning=times[stage].back,
                sent=sent,
                returned=back,
                parameters=float(space.parameters[i, j] + space.untrained[i, j]),
                exchange=exchanges[stage],
            )
        )
    by_rank = {rank: memory[place] for place, group in enumerate(groups) for rank in group}
    return Plan(
        space.graph.key,
        tuple(made),
        batch=space.batch,
        microbatches=many,
        schedule=setting.schedule,
        recompute=setting.recompute,
        layout=setting.layout,
        seconds=seconds,
        bubble=played.bubble,
        exposed=seconds - max(done),
        memory=tuple(by_rank[rank] for rank in sorted(by_rank)),
    )


def timeline(plan: Plan) -> Played:
    """The schedule of a plan, played through with the plan's own times."""
    places = len({stage.ranks for stage in plan.stages})
    times = [Times(s.forward, s.backward, HALF, s.crossing, s.returning) for s in plan.stages]
    return play(plan.schedule, places, times, plan.microbatches)


def _times(space: Space, setting: Setting, cut: Cut, at: Sequence[tuple[int, ...]]) -> list[Times]:
    found = []
    whole = space.batch / setting.microbatches / space.graph.rows
    for stage, (i, j) in enumerate(cut.bounds):
        forward, backward = space.seconds(i, j, space.rows(setting.microbatches, cut.replicas[stage]))
        there = back = 0.0
        if j < space.count:
            here, behind = at[stage], at[stage + 1]
            there = space.devices.crossing(here, behind, float(space.there[j]) * whole)
            back = space.devices.crossing(behind, here, float(space.back[j]) * whole)
        found.append(Times(forward, backward + (forward if setting.recompute else 0.0), HALF, there, back))
    return found


def _nodes(space: Space, i: int, j: int) -> list[str]:
    """In the graph's order."""
    return sorted((name for block in space.blocks[i:j] for name in block.nodes), key=space.graph.index.__getitem__)


def _exchange(
    space: Space, cut: Cut, at: Sequence[tuple[int, ...]], stage: int, groups: Sequence[tuple[int, ...]]
) -> float:
    """Seconds of a stage's exchange: tied parameters over the stages that have them, then all over the replicas."""
    i, j = cut.bounds[stage]
    own, total = {name for names in space.names[i:j] for name in names} & space.tied, 0.0
    for other, (a, b) in enumerate(cut.bounds):
        theirs = {name for names in space.names[a:b] for name in names} & own if own else set()
        if other != stage and theirs and at[stage] != at[other]:
            ends = {space.devices.nodes[rank] for rank in (at[stage][0], at[other][0])}
            nbytes = sum(space.graph.parameters[name] for name in sorted(theirs))
            total += space.devices.between(len(ends) > 1, 1).seconds("allreduce", nbytes, 2)
    return total + space.exchange(i, j, len(at[stage]), *space.devices.exchange(groups, groups.index(at[stage])))


def memory_of(space: Space, setting: Setting, cut: Cut) -> list[float]:
    """Bytes on a rank of each place."""
    many, found, places = setting.microbatches, [], setting.places or len(cut.ends)
    place_of = [rank_of(setting.schedule, stage, places) for stage in range(len(cut.ends))]
    peaks = most_kept(setting.schedule, places, len(cut.ends), many)
    for place in range(places):
        own = [stage for stage, p in enumerate(place_of) if p == place]
        runs, of = [cut.bounds[stage] for stage in own], space.memory(cut.replicas[own[0]], many)
        again = [setting.recompute and j < space.count for _, j in runs]
        most = 0.0
        for counts in peaks[place]:
            stages = list(zip(runs, counts, again, strict=True))
            kept = sum(n * (of.arrived[run] + (0.0 if one else of.made[run])) for run, n, one in stages)
            computed = max((of.made[run] for run, n, one in stages if one and n), default=0.0)
            most = max(most, kept + computed)
        beside = sum(of.static[run] for run in runs) + max(of.working[run] for run in runs)
        if setting.schedule != "gpipe":
            beside += sum(of.returning[run] for run in runs)
        found.append(float(beside + most))
    return found
