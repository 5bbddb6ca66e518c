"""``grace pipeline``: plan pipelines, show and check them, and show the graph that they are cut out of."""

import re
from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from grace.bench.common.options import Given, option, split, with_options
from grace.bench.common.tables import Columns, table
from grace.bench.common.text import digits, of_bytes
from grace.cli.inputs import MOST_RANKS, call_model_function
from grace.cli.terminal import check_outputs, standard_output
from grace.core.quantities import SECONDS, parse_bytes, parse_quantity, parse_rate
from grace.core.variable import equal_bounds
from grace.errors import ConfigError
from grace.pipeline.planning.exchange_prediction import strategy_document
from grace.pipeline.planning.graph import Graph, GraphNode
from grace.pipeline.planning.pipeline_plan import HEADINGS, LEGEND, PipelinePlan
from grace.pipeline.planning.predict import predict_data_parallel
from grace.pipeline.planning.search import Numbers, SearchOptions, search_plan, space_of
from grace.planner.costs import DefaultCodecs
from grace.planner.exchange_costs import Costs
from grace.planner.network import Links

app = typer.Typer(no_args_is_help=True, help="Plan pipelines, show them and check them.")

RANGE = "a number, several with commas, or a range as 2-4"
# A range of millions, a slip of the keyboard, would take all memory.
LONGEST_RANGE = 10_000
Profile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        help="File with the model's graph and times: written by grace pipeline graph -o.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option("--model", help="module:function of a function that returns (torch model, example inputs)."),
]
Dry = Annotated[bool, typer.Option("--dry", help="Do not run the model: estimate times from FLOPs and bytes.")]
File = Annotated[Path, typer.Argument(help="File that grace pipeline plan wrote.")]


def parse_numbers(text: str, name: str) -> set[int]:
    """Return the numbers that an option of a name allows.

    >>> parse_numbers("4", "-n"), parse_numbers("1,2", "-n"), parse_numbers("2-4", "-n")
    ({4}, {1, 2}, {2, 3, 4})
    """
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part, re.ASCII)
        if match is None:
            raise ConfigError(f"{name} must be {RANGE}, not {text!r}")
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1)
        if not 1 <= len(numbers) <= LONGEST_RANGE:
            raise ConfigError(
                f"{name}: the range {part.strip()} has {len(numbers):,} numbers, and may have 1 to {LONGEST_RANGE:,}"
            )
        found.update(numbers)
    return found


def _replicas(text: str) -> set[int] | list[int]:
    """Return the numbers of replicas that are allowed; of several with commas, the number of each stage."""
    stages = [parse_numbers(part, "--replicas") for part in text.split(",")]
    if len(stages) == 1:
        return stages[0]
    if any(len(numbers) > 1 for numbers in stages):
        raise ConfigError(f"--replicas must be {RANGE}, not {text!r}")
    return [number for numbers in stages for number in numbers]


def _latency(text: str) -> float:
    return parse_quantity(text, SECONDS, "a latency is a number with s, ms or us, as 50us")


@dataclass
class PlanOptions:
    """Options of ``grace pipeline plan``: of the network, and constraints of the search."""

    batch: int | None = option(
        None,
        "Rows (samples) of a step, of all ranks together.",
        show_default="the profile's or example's rows for each rank",
        min=1,
    )
    bandwidth: float = option(
        10e9, "Bandwidth between nodes, as 10gbit; with one node, between its ranks.", parse=parse_rate, text="10gbit"
    )
    inside: float | None = option(
        None, "Bandwidth within a node, as 100gbit.", parse=parse_rate, show_default="--bandwidth"
    )
    latency: float = option(20e-6, "Time that one message takes over a link, as 50us.", parse=_latency, text="20us")
    nodes: int = option(1, "Number of nodes that the ranks are on.", min=1)
    memory: float | None = option(None, "Memory of a device, as 16GB.", parse=parse_bytes, show_default="no limit")
    memory_margin: float = option(0.1, "Part of --memory that stays free: 0.1 is a tenth.", min=0, max=1)
    compressor: str | None = option(None, "Compressor of all gradients, as 'topk(ratio=0.01)'.")
    strategy: str | None = option(
        None, "How gradients are exchanged, instead of --compressor: a strategy's file, auto, or another builder."
    )
    stages: Numbers = option(None, f"Number of stages: {RANGE}.", parse=partial(parse_numbers, name="--stages"))
    replicas: Numbers = option(
        None, "Replicas of every stage, as 2 or 1-4; or one number for each stage, as 2,1,1.", parse=_replicas
    )
    microbatches: Numbers = option(
        None, f"Number of micro-batches: {RANGE}.", parse=partial(parse_numbers, name="--microbatches")
    )
    schedule: list[str] | None = option(None, "gpipe or 1f1b.", parse=split, show_default="both are tried")
    recompute: bool | None = option(
        None, "Recompute activations in backward, or keep them.", "--recompute/--keep", show_default="both are tried"
    )
    layout: str | None = option(
        None, "What neighbouring ranks are: replicas (of one stage) or stages.", show_default="both are tried"
    )
    blocks: Numbers = option(
        None,
        f"Number of blocks that the model is cut into, from which stages are made: {RANGE}.",
        parse=partial(parse_numbers, name="--blocks"),
        show_default="32,128",
    )
    cuts: list[str] | None = option(
        None,
        "Where to cut: the last graph node of each stage but the last, separated by commas.",
        "--cut",
        parse=split,
    )
    optimizer_state: float = option(
        1.0,
        "Bytes that the optimizer keeps for each byte of parameters: SGD 0, SGD with momentum 1, Adam 2.",
        min=0,
        max=100,
    )
    fewer: bool = option(False, "Also try plans that use fewer devices, down to half of them.", "--fewer")

    def constraints(self) -> SearchOptions:
        """Return those of the search."""
        names = {field.name for field in fields(SearchOptions)} - {"nodes"}
        return SearchOptions(**{name: value for name, value in vars(self).items() if name in names})


@app.command()
@with_options(PlanOptions)
def plan(
    given: Given,
    devices: Annotated[
        int, typer.Option("-n", "--devices", min=1, max=MOST_RANKS, help="Number of ranks, one for each device.")
    ],
    model: Model = None,
    profile: Profile = None,
    dry: Dry = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write the plan to.")] = None,
) -> None:
    """Plan a pipeline: how to cut a model into stages, and how many ranks each stage gets.

    The model is measured here in one process, or was measured elsewhere (--profile). No other device is needed.
    """
    asked = PlanOptions(**given)
    check_outputs(out, sources=[profile])  # before the model is measured
    if asked.compressor is not None and asked.strategy is not None:
        raise ConfigError(
            "--strategy says how each variable is exchanged, and --compressor for all of them: leave one out"
        )
    graph = load_graph(profile, model, dry)
    chosen = asked.strategy and (
        strategy_document(asked.strategy, {**graph.parameters, **graph.held}) or asked.strategy
    )
    rows = graph.rows * devices if asked.batch is None else asked.batch
    if asked.nodes > devices:
        raise ConfigError(f"{devices} devices cannot be on {asked.nodes} nodes")
    bounds = enumerate(equal_bounds(devices, asked.nodes))
    node_of_rank = [node for node, (start, end) in bounds for _ in range(start, end)]
    within = None if asked.inside is None else Links(asked.inside / 8, asked.latency)
    costs = Costs(Links(asked.bandwidth / 8, asked.latency), DefaultCodecs(), within)
    options = replace(asked.constraints(), strategy=chosen, nodes=node_of_rank)
    found = search_plan(graph, devices, rows, costs, options)
    found = replace(found, versions={**found.versions, **_versions(model)})
    print_plan(found, standard_output())
    if found.world_size < devices:
        print(f"It uses {found.world_size} of the {devices} devices: more would be slower.")
    space = space_of(graph, devices, rows, costs, replace(options, cuts=None))
    alone = predict_data_parallel(space)
    if alone is not None and alone < found.seconds:
        print(
            f"Data parallelism alone is faster: {1e3 * alone:.3f} ms a step, {1 - alone / found.seconds:.0%} less. Use "
            "DistributedOptimizer instead."
        )
    if out is not None:
        found.save(out)
        print(f"Wrote {out}: {len(found.stages)} stages for {found.world_size} ranks")


@app.command()
def show(
    plan: File,
    html: Annotated[Path | None, typer.Option("--html", help="HTML file to draw the plan in.")] = None,
) -> None:
    """Show a plan: stages, replicas, times, memory, idle time, and the bytes that cross each cut."""
    check_outputs(html, sources=[plan])
    found = PipelinePlan.load(plan)
    print_plan(found, standard_output())
    if html is not None:
        from grace.cli.pages import write_pipeline

        write_pipeline(html, found, lambda page: print_plan(found, page))
        print(f"Wrote {html} ({html.stat().st_size / 1000:.0f} kB).")


@app.command()
def graph(
    model: Model = None,
    profile: Profile = None,
    dry: Dry = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write, for --profile, also on another machine.")
    ] = None,
    longest: Annotated[int, typer.Option(min=1, help="Number of nodes in the table: those that take longest.")] = 20,
) -> None:
    """Show a model's graph: its operations, the time of each, and the bytes that each gives to later ones."""
    check_outputs(out, sources=[profile])  # before the model is measured
    found = load_graph(profile, model, dry)
    _print_graph(found, longest)
    if out is not None:
        found.save(out)
        print(f"Wrote {out}: {len(found.nodes)} nodes")


@app.command()
def check(
    plan: File,
    model: Model = None,
    profile: Profile = None,
    devices: Annotated[
        int | None, typer.Option("-n", "--devices", min=1, help="Number of ranks that the plan must be for.")
    ] = None,
) -> None:
    """Check that a plan's file is valid, and made for this model and this number of ranks."""
    found = PipelinePlan.load(plan)
    if profile is not None or model is not None:
        known = load_graph(profile, model, dry=model is not None)  # times are not checked
        found.check(known, found.world_size if devices is None else devices, _versions(model))
    elif devices is not None and devices != found.world_size:
        raise ConfigError(f"{plan} is for {found.world_size} ranks, and there are {devices}")
    print(f"{plan}: {len(found.stages)} stages for {found.world_size} ranks, model {found.model[:12]}")


def load_graph(profile: Path | None, model: str | None, dry: bool = False) -> Graph:
    """Return the graph of a profile, or of the (model, example inputs) that ``module:function`` makes; if ``dry``,
    times are estimated without running the model.

    Raises:
        ConfigError: none is given, or both are; there is no such model; or it cannot be cut.
    """
    if (profile is None) == (model is None):
        raise ConfigError("say which model, in one way: --model module:function, or --profile FILE.json")
    if profile is not None:
        if dry:
            raise ConfigError("--dry is for --model: a profile has its times")
        return Graph.load(profile)
    assert model is not None
    result = call_model_function(model)
    if not isinstance(result, tuple) or len(result) != 2 or callable(result[1]):
        items = result if isinstance(result, tuple) else (result,)
        types = ", ".join(type(item).__name__ for item in items)
        raise ConfigError(
            f"{model} must make (model, example inputs): a torch module, and a tensor, a tuple of arguments, or (tuple "
            f"of arguments, dict of keywords); it makes {f'({types})' if isinstance(result, tuple) else types}"
        )
    from grace.pipeline.torch.node_costs import build_graph

    doing = "Estimating" if dry else "Measuring"
    with Console(stderr=True).status(f"{doing} what the parts of {model} take"):
        return build_graph(*result, dry=dry)


def _versions(model: str | None) -> dict[str, str]:
    """Return the version of torch if a model was captured with it, for a plan to remember."""
    if model is None:
        return {}
    from grace.pipeline.torch.plan_search import torch_version

    return torch_version()


def print_plan(plan: PipelinePlan, console: Console) -> None:
    """Print a table of the stages, and a summary."""
    columns: Columns[tuple[str, ...]] = {heading: itemgetter(i) for i, heading in enumerate(HEADINGS)}
    console.print(table(plan.cells(), columns, ["nodes", "ranks"]))
    console.print(LEGEND, style="dim")
    console.print(f"\n{escape(plan.summary)}", soft_wrap=True)


def _print_graph(graph: Graph, longest: int) -> None:
    """Print the nodes that take longest, in the graph's order, and sums over all nodes."""
    by_time = sorted(graph.nodes, key=lambda node: node.forward + node.backward, reverse=True)
    shown = {node.name for node in by_time[:longest]}
    columns: Columns[GraphNode] = {
        "node": lambda node: node.name,
        "kind": lambda node: node.kind,
        "line": lambda node: node.line,
        "ms": lambda node: f"{digits(1e3 * node.forward)} + {digits(1e3 * node.backward)}",
        "weights": lambda node: of_bytes(sum(node.stored.values())),
        "value": lambda node: of_bytes(node.nbytes),
        "keeps": lambda node: of_bytes(node.kept),
    }
    console = standard_output()
    console.print(table([node for node in graph.nodes if node.name in shown], columns, ["kind", "line"]))
    console.print(
        f"ms: forward + backward; value: what it hands on; keeps: for backward; all for {graph.rows} rows", style="dim"
    )
    kinds = Counter(node.kind for node in graph.nodes)
    most = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(5)) + " ..." * (len(kinds) > 5)
    forward = sum(node.forward for node in graph.nodes)
    backward = sum(node.backward for node in graph.nodes)
    summary = (
        f"{len(graph.nodes)} nodes ({most}), {len(graph.parameters)} parameters of "
        f"{of_bytes(sum(graph.parameters.values()))}, {digits(1e3 * forward)} + {digits(1e3 * backward)} ms"
    )
    console.print(f"\n{escape(summary)}", soft_wrap=True)
