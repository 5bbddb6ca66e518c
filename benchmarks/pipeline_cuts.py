"""Planned cuts of models into stages beside others: ``python -m benchmarks.pipeline_cuts --models gpt,unet``.

Ranks measure the parts of a model and the link, and plan. Then the plan is measured in turns with all cuts in two at
the ends of blocks, and with what people cut by hand: stages with as many layers, with as many parameters, and with as
long a time (GPipe's). With ``--stages 0`` ways to share out the ranks are compared instead: data parallelism alone, as
many replicas of every stage, and of 3 ranks two for one stage. A step of a cut is predicted by the planner, from the
times of the model's parts and the links, both measured here. A call goes on where an interrupted one ended.
"""

import itertools
import os
import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import TypedDict

import torch
from rich.console import Console

from benchmarks import scenarios
from benchmarks.hand_cuts import BY_HAND
from benchmarks.pipeline_models import MODELS, Cuttable, cuttable
from grace.bench.common import options
from grace.bench.common.results import Row
from grace.bench.common.tables import Columns, table
from grace.bench.common.text import digits
from grace.bench.ranks.rank_program import Emit, join_run, run_as_rank
from grace.core.backend import Backend
from grace.errors import ConfigError, GraceError
from grace.pipeline.planning.blocks import cut_at
from grace.pipeline.planning.graph import Graph
from grace.pipeline.planning.search import space_of
from grace.pipeline.torch.node_costs import build_graph
from grace.planner.measure_network import measure_network
from grace.planner.network import Links, Network
from grace.planner.step_timer import undisturbed
from grace.torch import Pipeline

CHOSEN = "planned"
"""Name of the cut that the search finds."""
LR = 1e-4
MOST = 50
"""Largest number of steps of a turn."""


class Cut(TypedDict):
    """Cut of a model that was measured; ``ends`` are the last nodes of its stages but the last one."""

    name: str
    replicas: list[int]
    ends: list[str]
    predicted_ms: float
    measured_ms: float
    steps: int


class NamedCut(Cut):
    """Cut with all its names."""

    names: list[str]


def relative_error(cut: Cut) -> float:
    """Return the relative error of a prediction; positive if it is too long.

    >>> round(relative_error({"predicted_ms": 9.0, "measured_ms": 10.0}), 3)
    -0.1
    """
    return cut["predicted_ms"] / cut["measured_ms"] - 1


def merged(cuts: Sequence[Cut]) -> list[NamedCut]:
    """Return each cut once, with all its names; of the same cut measured twice the faster one counts, since
    disturbances make steps longer only."""
    found = dict[tuple[tuple[str, ...], tuple[int, ...]], NamedCut]()
    for cut in cuts:
        key = tuple(cut["ends"]), tuple(cut["replicas"])
        known = found.setdefault(key, {**cut, "names": []})
        known["names"].append(cut["name"])
        known["measured_ms"] = min(known["measured_ms"], cut["measured_ms"])
    return list(found.values())


def judge(cuts: Sequence[Cut]) -> Row:
    """Return the verdict on the cuts of a scenario, as values of its row. A cut that has several names counts once.

    - ``step_ms``, ``error``: the planned cut's step, and its predicted over its measured step, minus 1.
    - ``fastest``, ``regret``: the name of the fastest of all measured cuts, and the planned over it, minus 1.
    - ``median_error``: the median over all cuts of the error without its sign.
    - ``by_hand``: milliseconds by the name of a rule; None where its cut is not possible.
    """
    found = merged(cuts)
    by_name = {name: cut for cut in found for name in cut["names"]}
    planned, best = by_name[CHOSEN], min(found, key=lambda cut: cut["measured_ms"])
    errors = sorted(abs(relative_error(cut)) for cut in found)
    return {
        "step_ms": planned["measured_ms"],
        "error": relative_error(planned),
        "fastest": best["names"][0],
        "regret": planned["measured_ms"] / best["measured_ms"] - 1,
        "median_error": errors[len(errors) // 2],
        "by_hand": {name: by_name[name]["measured_ms"] if name in by_name else None for name in BY_HAND},
    }


def verdict(scenario: Row) -> str:
    """Return the verdict on a scenario, in a sentence or two."""
    regret = "The planned cut is the fastest"
    if scenario["regret"]:
        regret = f"The planned cut takes {scenario['regret']:.1%} longer than the fastest, {scenario['fastest']}"
    return f"{regret}; predicted {scenario['error']:+.0%}, all cuts {scenario['median_error']:.0%} off in the median."


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

    def take_turn(self, settings: Namespace, backend: Backend) -> None:
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


def baseline_cuts(graph: Graph, settings: Namespace, ranks: int) -> dict[str, CutArguments]:
    """Return the cuts that the plan is compared with: every cut in two, by hand, or other shares of the ranks."""
    found = dict[str, CutArguments]()
    if not settings.stages:
        shapes = [(ranks // s,) * s for s in range(1, ranks + 1) if ranks % s == 0]
        if ranks == 3:
            shapes += [(2, 1), (1, 2)]
        return {"-".join(map(str, shape)): {"stages": len(shape), "replicas": list(shape)} for shape in shapes}
    same: CutArguments = {"stages": settings.stages, "replicas": ranks // settings.stages}
    if settings.stages == 2:
        space = space_of(graph, ranks, int(graph.rows), Links(1e9), most=settings.blocks)
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


def measure(settings: Namespace, model: str, compressor: str, backend: Backend, emit: Emit) -> None:
    """Plan, and measure the plan in turns with other cuts; rank 0 calls ``emit`` with each event."""
    began = time.perf_counter()
    network = measure_network(backend, settings.seconds / 2)
    assert network is not None  # there are two ranks or more
    copies = 1 if settings.stages else backend.size  # so that any number of replicas divides the rows
    work = cuttable(model, copies)
    graph = build_graph(work.model, work.inputs)  # on all ranks at once, as steps compute: they share the machine
    free: CutArguments = {}
    if settings.stages:
        free = {"stages": settings.stages, "replicas": backend.size // settings.stages}
    cuts = baseline_cuts(graph, settings, backend.size)
    wanted: dict[str, CutArguments] = backend.allgather_object({CHOSEN: free, **cuts})[0]
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
    measured = [run.document() for run in runs]
    seconds = time.perf_counter() - began
    about = {"planning_seconds": planning, "latency": network.links.latency}
    about["bytes_per_second"] = network.links.bandwidth
    emit({"scenario": {**about, "cuts": measured, "missing": missing, "seconds": seconds, **judge(measured)}})


def _engine(
    work: Cuttable, settings: Namespace, compressor: str, network: Network, arguments: CutArguments
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


def show(console: Console, row: Row) -> None:
    """Show the cuts of a scenario, with predicted and measured steps, and the verdict; the planned one is bold."""
    columns: Columns[NamedCut] = {
        "cut": lambda cut: ", ".join(cut["names"]),
        "replicas": lambda cut: "-".join(map(str, cut["replicas"])),
        "predicted\nms": lambda cut: digits(cut["predicted_ms"]),
        "measured\nms": lambda cut: digits(cut["measured_ms"]),
        "error": lambda cut: f"{relative_error(cut):+.0%}",
        "to the\nplanned": lambda cut: f"{cut['measured_ms'] / row['step_ms']:.2f}",
    }
    cuts = table(merged(row["cuts"]), columns, style=lambda cut: "bold" if CHOSEN in cut["names"] else "")
    console.print(f"\n{scenarios.name_of(row)}", cuts, verdict(row), sep="\n")
    for left_out, why in row["missing"].items():
        console.print(f"Left out: {left_out}: {why}", style="dim")


def show_all(console: Console, rows: Sequence[Row]) -> None:
    """Show a table of all scenarios."""
    columns: Columns[Row] = {
        "": scenarios.name_of,
        "planned": lambda row: _planned_cut(merged(row["cuts"])),
        "step\nms": lambda row: digits(row["step_ms"]),
        "predicted": lambda row: f"{row['error']:+.0%}",
        "regret": lambda row: f"{row['regret']:.1%}",
        **{name.replace(" ", "\n"): partial(_to_planned, name) for name in BY_HAND},
    }
    console.print("", table(rows, columns), sep="\n")


def _planned_cut(cuts: Sequence[NamedCut]) -> str:
    cut = next(cut for cut in cuts if CHOSEN in cut["names"])
    named = next((name for name in cut["names"] if name.startswith("after ")), "-".join(cut["ends"]))
    return "-".join(map(str, cut["replicas"])) + (f", {named}" if cut["ends"] else "")


def _to_planned(name: str, row: Row) -> str:
    """Return the step of a cut by hand over that of the planned one."""
    ms = row["by_hand"][name]
    return "-" if ms is None else f"{ms / row['step_ms']:.2f}"


def rank_main(folder: str, model: str, compressor: str) -> None:
    """Measure, as one of the ranks."""
    with join_run(folder, Namespace) as (settings, backend, emit):
        torch.manual_seed(0)
        measure(settings, model, compressor, backend, emit)


def main() -> None:
    """Measure the scenarios that are not there yet, and show all."""
    parser = scenarios.parser_of(__doc__, ",".join(MODELS), "2", "out/pipeline_cuts.json", 2.0)
    parser.add_argument("--stages", type=int, default=2, help="how many; 0 compares shares of the ranks (%(default)s)")
    parser.add_argument("--methods", default="none", help="compressors between replicas, each a scenario (%(default)s)")
    parser.add_argument("--microbatches", type=int, default=4, help="into how many a batch is cut (%(default)s)")
    parser.add_argument("--schedule", default="1f1b", choices=["gpipe", "1f1b"], help="(%(default)s)")
    parser.add_argument("--blocks", type=int, default=16, help="from how many stages are made (%(default)s)")
    given, console = parser.parse_args(), Console(highlight=False, markup=False)
    rates, ranks = scenarios.bandwidths_and_ranks(given)
    if given.stages and any(count % given.stages for count in ranks):
        parser.error(f"--stages must divide the ranks, and {given.stages} does not")
    each = itertools.product(options.split(given.models), rates, options.methods(given.methods), ranks)
    wanted = [dict(zip(("model", "bandwidth", "compressor", "ranks"), one, strict=True)) for one in each]
    which = (*scenarios.WHICH, "methods")
    show_all(console, scenarios.measure("benchmarks.pipeline_cuts", given, wanted, show, console, which))


if __name__ == "__main__":
    if "RANK" in os.environ:  # the ranks of a scenario run this file, too
        run_as_rank(rank_main)
    else:
        main()
