"""One rank of ``grace bench pipeline``: it plans a pipeline, and measures it beside other cuts of the same model.

A step of a cut is predicted by the planner, from the times of the model's parts and the links, both measured here.

Usage: python -m grace.bench.pipeline.pipeline_rank FOLDER MODEL COMPRESSOR, where FOLDER holds settings.json; rank 0
writes events.jsonl there.
"""

import time
from typing import TypedDict

import torch

from grace.bench.pipeline.pipeline_command import PipelineSettings
from grace.bench.ranks.rank_program import Emit, join_run, run_as_rank
from grace.bench.report.pipeline_table import CHOSEN, Cut, judge
from grace.bench.workloads.pipelines import Cuttable, cuttable
from grace.core.backend import Backend
from grace.errors import ConfigError, GraceError
from grace.pipeline.planning.baselines import BY_HAND
from grace.pipeline.planning.blocks import cut_at
from grace.pipeline.planning.graph import Graph
from grace.pipeline.planning.search import space_of
from grace.pipeline.torch.node_costs import build_graph
from grace.planner.links import measure_network
from grace.planner.network import Links, Network
from grace.planner.step_timer import undisturbed
from grace.torch import Pipeline

LR = 1e-4
MOST = 50
"""Largest number of steps of a turn."""


class CutArguments(TypedDict, total=False):
    """Arguments of a pipeline that say how the model is cut."""

    stages: int
    replicas: int | list[int]
    cuts: list[str]


class Run:
    """Pipeline that trains on a batch, with the seconds of its steps."""

    def __init__(self, name: str, engine: Pipeline, batch: list[torch.Tensor]):
        self.name, self.engine, self.batch = name, engine, batch
        self.seconds: list[float] = []

    def step(self) -> float:
        """Make a step, and return its seconds."""
        began = time.perf_counter()
        self.engine.step(*self.batch)
        return time.perf_counter() - began

    def take_turn(self, settings: PipelineSettings, backend: Backend) -> None:
        """Measure some steps, after two that do not count."""
        self.step()
        slowest = max(backend.allgather_object(self.step()))  # of all ranks, which must make as many steps
        count = min(MOST, max(1, round(settings.seconds / settings.rounds / slowest)))
        self.seconds += [self.step() for _ in range(count)]

    def document(self) -> Cut:
        """Return the cut with its predicted and measured step."""
        plan = self.engine.plan
        assert plan is not None
        return {
            "name": self.name,
            "replicas": list(plan.replicas),
            "ends": [stage.nodes[-1] for stage in plan.stages[:-1]],
            "predicted_ms": 1e3 * plan.seconds,
            "measured_ms": 1e3 * undisturbed(self.seconds),
            "steps": len(self.seconds),
        }


def baseline_cuts(graph: Graph, settings: PipelineSettings) -> dict[str, CutArguments]:
    """Return the cuts that the plan is compared with: every cut in two, by hand, or other shares of the ranks."""
    found = dict[str, CutArguments]()
    if settings.stages is None:
        count = settings.ranks
        shapes = [(count // s,) * s for s in range(1, count + 1) if count % s == 0]
        if count == 3:
            shapes += [(2, 1), (1, 2)]
        return {"-".join(map(str, shape)): {"stages": len(shape), "replicas": list(shape)} for shape in shapes}
    same: CutArguments = {"stages": settings.stages, "replicas": settings.ranks // settings.stages}
    if settings.stages == 2:
        space = space_of(graph, settings.ranks, int(graph.rows), Links(1e9), most=settings.blocks)
        found.update({f"after {one.nodes[-1]}": {**same, "cuts": [one.nodes[-1]]} for one in space.blocks[:-1]})
    if settings.stages > 1:
        for name, how in BY_HAND.items():
            cuts = how(graph, settings.stages)
            try:
                cut_at(graph, cuts)
            except ConfigError:  # the rule separates nodes that must be in one stage
                continue
            found[name] = {**same, "cuts": cuts}
    return found


def measure(settings: PipelineSettings, model: str, compressor: str, backend: Backend, emit: Emit) -> None:
    """Plan, and measure the plan in turns with other cuts; rank 0 calls ``emit`` with each event."""
    began = time.perf_counter()
    network = measure_network(backend, settings.seconds / 2)
    assert network is not None  # there are two ranks or more
    copies = settings.ranks if settings.stages is None else 1  # so that any number of replicas divides the rows
    work = cuttable(model, copies)
    graph = build_graph(work.model, work.inputs)  # on all ranks at once, as steps compute: they share the machine
    free: CutArguments = {}
    if settings.stages is not None:
        free = {"stages": settings.stages, "replicas": settings.ranks // settings.stages}
    wanted: dict[str, CutArguments] = backend.allgather_object({CHOSEN: free, **baseline_cuts(graph, settings)})[0]
    planning = time.perf_counter()
    runs, missing = list[Run](), dict[str, str]()
    for name, arguments in wanted.items():
        try:
            engine = _engine(cuttable(model, copies), settings, compressor, network, arguments)
            runs.append(Run(name, engine, work.batch))
        except GraceError as error:  # on all ranks: the plan is rank 0's
            if name == CHOSEN:
                raise
            missing[name] = str(error)
        if name == CHOSEN:
            planning = time.perf_counter() - planning
    emit({"blocks": settings.rounds * len(runs)})
    for run in runs:
        run.step()
    for number in range(settings.rounds):
        # backwards in every other round: what grows over a round, as heat, disturbs all cuts alike
        for run in runs if number % 2 == 0 else runs[::-1]:
            run.take_turn(settings, backend)
            emit({"times_ms": [1e3 * s for s in run.seconds]})
    cuts = [run.document() for run in runs]
    seconds = time.perf_counter() - began
    about = {"planning_seconds": planning, "latency": network.links.latency}
    about["bytes_per_second"] = network.links.bandwidth
    emit({"scenario": {**about, "cuts": cuts, "missing": missing, "seconds": seconds, **judge(cuts)}})


def _engine(
    work: Cuttable, settings: PipelineSettings, compressor: str, network: Network, arguments: CutArguments
) -> Pipeline:
    return Pipeline(
        work.model,
        work.inputs,
        work.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LR),
        compressor=compressor,
        microbatches=settings.microbatches,
        schedule=settings.schedule,
        blocks=settings.blocks,
        links=network,
        inputs="global",
        profiles=False,
        **arguments,
    )


def main(folder: str, model: str, compressor: str) -> None:
    """Join the run, and measure."""
    with join_run(folder, PipelineSettings) as (settings, backend, emit):
        torch.manual_seed(0)
        measure(settings, model, compressor, backend, emit)


if __name__ == "__main__":
    run_as_rank(main)
