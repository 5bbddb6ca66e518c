"""Predictions: a cut as a plan, with its simulated schedule, its exchange and memory; and data parallelism alone."""

from collections.abc import Sequence

from grace.pipeline.planning.pipeline_plan import PipelinePlan, Stage
from grace.pipeline.planning.rank_layout import groups_of
from grace.pipeline.planning.schedules import micro_batches_in_flight
from grace.pipeline.planning.simulation import simulate_schedule
from grace.pipeline.planning.stage_costs import Setting, Space
from grace.pipeline.planning.stage_search import StageCut
from grace.planner.step_simulation import Timeline


def predict_cut(space: Space, setting: Setting, cut: StageCut) -> PipelinePlan | None:
    """Return the plan of a cut; None if its memory does not suffice."""
    memory = memory_of(space, setting, cut)
    if max(memory) > space.limit * (1 + 1e-12):
        return None
    groups = groups_of(setting.layout, cut.replicas)
    stages = [_predicted_stage(space, setting, cut, groups, stage) for stage in range(len(groups))]
    simulated = simulate_schedule(setting.schedule, stages, setting.microbatches)
    updates = [float(space.parameters[run]) * space.update for run in cut.bounds]
    done = [seconds + update for seconds, update in zip(simulated.done, updates, strict=True)]
    seconds = max(one + stage.exchange for one, stage in zip(done, stages, strict=True))
    by_rank = {rank: nbytes for nbytes, group in zip(memory, groups, strict=True) for rank in group}
    return PipelinePlan(
        space.graph.key,
        tuple(stages),
        batch=space.batch,
        microbatches=setting.microbatches,
        schedule=setting.schedule,
        recompute=setting.recompute,
        layout=setting.layout,
        seconds=seconds,
        bubble=simulated.bubble,
        exposed=seconds - max(done),
        memory=tuple(by_rank[rank] for rank in sorted(by_rank)),
    )


def memory_of(space: Space, setting: Setting, cut: StageCut) -> list[float]:
    """Return the bytes on a rank of each stage."""
    count = len(cut.ends)
    in_flight = [micro_batches_in_flight(setting.schedule, s, count, setting.microbatches) for s in range(count)]
    each = zip(cut.bounds, cut.replicas, in_flight, strict=True)
    return [float(space.needed_bytes(setting, replicas, most)[run]) for run, replicas, most in each]


def _predicted_stage(
    space: Space, setting: Setting, cut: StageCut, groups: Sequence[tuple[int, ...]], stage: int
) -> Stage:
    """Return a stage of a cut, with the predicted seconds and bytes of a rank."""
    i, j = cut.bounds[stage]
    names = [name for block in space.blocks[i:j] for name in block.nodes]
    forward, backward = space.seconds(i, j, space.rows(setting.microbatches, cut.replicas[stage]))
    sends: tuple[str, ...] = ()
    there = back = sent = returned = 0.0
    if j < space.count:
        sends = space.passed[j - 1]
        scale = space.batch / setting.microbatches / space.graph.rows
        sent, returned = float(space.there[j]) * scale, float(space.back[j]) * scale
        there = space.devices.crossing(groups[stage], groups[stage + 1], sent)
        back = space.devices.crossing(groups[stage + 1], groups[stage], returned)
    return Stage(
        nodes=tuple(names),
        ranks=groups[stage],
        sends=sends,
        forward=forward,
        backward=backward + (forward if setting.recompute else 0.0),
        crossing=there,
        returning=back,
        sent=sent,
        returned=returned,
        parameters=float(space.parameters[i, j] + space.untrained[i, j]),
        exchange=_exchange_seconds(space, cut, groups, stage),
    )


def _exchange_seconds(space: Space, cut: StageCut, groups: Sequence[tuple[int, ...]], stage: int) -> float:
    """Return the seconds of a stage's exchange: of tied parameters over the stages that have them, then of all over the
    replicas."""
    i, j = cut.bounds[stage]
    own = {name for names in space.names[i:j] for name in names} & space.tied
    total = 0.0
    for other, (a, b) in enumerate(cut.bounds):
        theirs = {name for names in space.names[a:b] for name in names} & own if own else set()
        if other != stage and theirs:
            nodes = {space.devices.nodes[rank] for rank in (groups[stage][0], groups[other][0])}
            nbytes = sum(space.graph.parameters[name] for name in sorted(theirs))
            total += space.devices.exchange_network(len(nodes) > 1, 1).seconds("allreduce", nbytes, 2)
    return total + space.exchange(i, j, len(groups[stage]), *space.devices.exchange(groups, stage))


def predict_data_parallel(space: Space) -> float | None:
    """Return the seconds of a step of data parallelism alone, whose exchange overlaps backward. It accumulates over as
    few micro-batches as memory suffices for; None if memory suffices for none."""
    graph, count = space.graph, space.devices.count
    cut = StageCut(0.0, (space.count,), (count,))
    for many in (m for m in range(1, space.batch // count + 1) if space.batch % (m * count) == 0):
        if memory_of(space, Setting("1f1b", many, equal_stages=1), cut)[0] <= space.limit:
            break
    else:
        return None
    rows = space.rows(many, count)
    forward, backward = space.seconds(0, space.count, rows)
    ready, at = dict[str, float](), 0.0
    for node in reversed(graph.nodes):
        at += graph.seconds(node, rows)[1]
        ready.update(dict.fromkeys(node.parameters, min(at, backward)))
    variables = [graph.variable(name) for name in graph.parameters]
    network = space.devices.exchange_network(*space.devices.exchange([tuple(range(count))], 0))
    before = many * forward + (many - 1) * backward
    return space.exchanges.seconds(variables, count, network, Timeline(ready, before, backward))
