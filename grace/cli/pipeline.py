"""``grace pipeline``: plan pipelines, show them and check them, and draw what they are cut out of."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from grace.bench.common.text import digits, of_bytes, parse_rate
from grace.cli.consoles import plain_table
from grace.cli.graph_table import print_graph
from grace.cli.pipeline_inputs import graph_of, versions_of
from grace.core.variable import equal_bounds
from grace.errors import ConfigError
from grace.pipeline.planning import baselines, profiles
from grace.pipeline.planning.exchange_prediction import documented
from grace.pipeline.planning.pipeline_plan import Plan
from grace.pipeline.planning.search import SearchOptions, search_plan, space_of
from grace.planner.default_costs import DefaultCodecs
from grace.planner.exchange_costs import Costs
from grace.planner.network import Links

app = typer.Typer(no_args_is_help=True, help="Plan pipelines, show them and check them.")

BYTES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
RANGE = "a number, several with commas, or a range as 2-4"
Profile = Annotated[
    Path | None, typer.Option("--profile", help="A graph with its times: Grace's JSON, or a profile of PipeDream's.")
]
Model = Annotated[
    str | None, typer.Option("--model", help="module:function, which makes (model, example inputs) of torch.")
]
Dry = Annotated[bool, typer.Option("--dry", help="Estimate times from FLOPs and bytes; the model is not run.")]
File = Annotated[Path, typer.Argument(help="A plan, as `grace pipeline plan` writes it.")]


@app.command()
def plan(
    devices: Annotated[int, typer.Option("-n", "--devices", min=1, help="How many ranks.")],
    model: Model = None,
    profile: Profile = None,
    dry: Dry = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file to write.")] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of a step, of all ranks; those of the profile for each, if left out."),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Of a device, as 16GB; without a limit if left out.")] = None,
    memory_margin: Annotated[float, typer.Option(min=0, max=1, help="The part of it that stays free.")] = 0.1,
    bandwidth: Annotated[str, typer.Option(help="Between nodes (between ranks, on one), as 10gbit.")] = "10gbit",
    inside: Annotated[str | None, typer.Option(help="Within a node, as 100gbit.")] = None,
    latency: Annotated[str, typer.Option(help="Of a message, as 50us.")] = "20us",
    nodes: Annotated[int, typer.Option(min=1, help="On how many nodes the ranks are.")] = 1,
    compressor: Annotated[str | None, typer.Option(help="Of gradients, as 'topk(ratio=0.01)'.")] = None,
    strategy: Annotated[
        str | None, typer.Option(help="How gradients are exchanged, instead: a file, auto, or another builder.")
    ] = None,
    stages: Annotated[str | None, typer.Option(help=f"How many: {RANGE}.")] = None,
    replicas: Annotated[
        str | None, typer.Option(help="Of every stage, as 2 or 1-4; or of each, with commas: 2,1,1.")
    ] = None,
    microbatches: Annotated[str | None, typer.Option(help=f"How many: {RANGE}.")] = None,
    schedule: Annotated[str | None, typer.Option(help="gpipe or 1f1b; both are tried.")] = None,
    recompute: Annotated[
        bool | None, typer.Option("--recompute/--keep", help="Compute stages' forward again; both are tried.")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="Neighbours in the order of ranks: replicas or stages.")] = None,
    blocks: Annotated[
        str | None, typer.Option(help=f"From how many blocks stages are made: {RANGE}.", show_default="32,128")
    ] = None,
    cuts: Annotated[
        str | None, typer.Option("--cut", help="Last nodes of all stages but the last, with commas.")
    ] = None,
    optimizer_state: Annotated[
        float, typer.Option(min=0, help="Bytes for each byte of parameters: SGD 0, with momentum 1, Adam 2.")
    ] = 1.0,
    fewer: Annotated[
        bool, typer.Option("--fewer", help="Leave devices unused where that is faster, up to half of them.")
    ] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Show what cuts by hand would take, too.")] = False,
) -> None:
    """Plan a pipeline for a model, or for one that was measured elsewhere: no devices are needed."""
    if compressor is not None and strategy is not None:
        raise ConfigError(
            "--strategy says how each variable is exchanged, and --compressor for all of them: leave one out"
        )
    graph = graph_of(profile, model, dry)
    chosen = None if strategy is None else documented(strategy, {**graph.parameters, **graph.held}) or strategy
    rows = graph.rows * devices if batch is None else batch
    if nodes > devices:
        raise ConfigError(f"{devices} devices cannot be on {nodes} nodes")
    at = [node for node, (start, end) in enumerate(equal_bounds(devices, nodes)) for _ in range(start, end)]
    wait = quantity(latency, SECONDS, "a latency is a number with s, ms or us, as 50us")
    network = Links(parse_rate(bandwidth) / 8, wait)
    costs = Costs(network, DefaultCodecs(), None if inside is None else Links(parse_rate(inside) / 8, wait))
    limit = None if memory is None else size(memory)
    each = replicas is not None and "," in replicas
    options = SearchOptions(
        memory=limit,
        memory_margin=memory_margin,
        compressor=compressor,
        strategy=chosen,
        nodes=at,
        stages=numbers(stages, "--stages"),
        replicas=[int(one) for one in _listed(replicas, "--replicas")] if each else numbers(replicas, "--replicas"),
        microbatches=numbers(microbatches, "--microbatches"),
        schedule=None if schedule is None else [one.strip() for one in schedule.split(",")],
        recompute=recompute,
        layout=layout,
        cuts=None if cuts is None else [one.strip() for one in cuts.split(",")],
        blocks=numbers(blocks, "--blocks"),
        optimizer_state=optimizer_state,
        fewer=fewer,
    )
    found = search_plan(graph, devices, rows, costs, options)
    found = replace(found, versions={**found.versions, **versions_of(model)})
    _print(found)
    if found.world_size < devices:
        print(f"It uses {found.world_size} of the {devices} devices: more would be slower.")
    usable = None if limit is None else limit * (1 - memory_margin)
    choices = (compressor, None, None, chosen)
    space = space_of(graph, devices, rows, costs, memory=usable, choices=choices, nodes=at, state=optimizer_state)
    alone = baselines.data_parallel(space)
    if alone is not None and alone < found.seconds:
        less = 1 - alone / found.seconds
        print(f"Data parallelism alone is faster: {_step(alone)}, {less:.0%} less. Use DistributedOptimizer instead.")
    if compare:
        print("\ndata parallelism alone:", _step(alone))
        for name, how in baselines.BY_HAND.items():
            made = baselines.cut_by_hand(space, how)
            print(f"{name}:", _step(None if made is None else made.seconds))
    if out is not None:
        found.save(out)
        print(f"Wrote {out}: {len(found.stages)} stages for {found.world_size} ranks")


@app.command()
def show(
    plan: File,
    html: Annotated[Path | None, typer.Option("--html", help="Draw it: an HTML file to write.")] = None,
) -> None:
    """Show a plan: stages, replicas, times, memory, the bubble, and what crosses each cut."""
    found = Plan.load(plan)
    _print(found)
    if html is not None:
        from grace.cli.pipeline_page import write_page

        write_page(found, html)
        print(f"Wrote {html} ({html.stat().st_size / 1000:.0f} kB).")


@app.command()
def graph(
    model: Model = None,
    profile: Profile = None,
    dry: Dry = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file to write, which --profile takes elsewhere.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Draw it: an HTML file to write.")] = None,
    longest: Annotated[int, typer.Option(min=1, help="How many nodes the table has, those that take longest.")] = 20,
) -> None:
    """Show what a model is made of: its operations, what each takes, and what it hands on."""
    found = graph_of(profile, model, dry)
    print_graph(found, longest)
    if out is not None:
        profiles.write(found, out)
        print(f"Wrote {out}: {len(found.nodes)} nodes")
    if html is not None:
        from grace.cli.graph_page import write_page

        write_page(found, html)
        print(f"Wrote {html} ({html.stat().st_size / 1000:.0f} kB).")


@app.command()
def check(
    plan: File,
    model: Model = None,
    profile: Profile = None,
    devices: Annotated[int | None, typer.Option("-n", "--devices", min=1, help="How many ranks there are.")] = None,
) -> None:
    """Check a plan: its form, and that it is for the model and the ranks."""
    found = Plan.load(plan)
    if profile is not None or model is not None:
        known = graph_of(profile, model, dry=model is not None)  # of times nothing is checked
        found.check(known, found.world_size if devices is None else devices, versions_of(model))
    elif devices is not None and devices != found.world_size:
        raise ConfigError(f"{plan} is for {found.world_size} ranks, and there are {devices}")
    print(f"{plan}: {len(found.stages)} stages for {found.world_size} ranks, model {found.model[:12]}")


def size(text: str) -> float:
    """Bytes.

    >>> size("16GB"), size("500 MB"), size("1e9")
    (16000000000.0, 500000000.0, 1000000000.0)
    """
    return quantity(
        text.removesuffix("B").removesuffix("b"), BYTES, "a size is a number with kB, MB, GB or TB, as 16GB"
    )


def quantity(text: str, units: dict[str, float], what: str) -> float:
    """A number with a unit.

    Raises:
        ConfigError: it is none.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)\s*([a-z]*)\s*", text, re.ASCII | re.IGNORECASE)
    if not found or found[2].lower() not in units:
        raise ConfigError(f"{what}, not {text!r}")
    return float(found[1]) * units[found[2].lower()]


def numbers(text: str | None, option: str) -> set[int] | None:
    """Numbers that may be.

    >>> numbers("4", "-n"), numbers("1,2", "-n"), numbers("2-4", "-n"), numbers(None, "-n")
    ({4}, {1, 2}, {2, 3, 4}, None)
    """
    if text is None:
        return None
    found: set[int] = set()
    for part in _listed(text, option, r"\d+(-\d+)?"):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _listed(text: str | None, option: str, form: str = r"\d+") -> list[str]:
    parts = [part.strip() for part in (text or "").split(",")]
    if not all(re.fullmatch(form, part, re.ASCII) for part in parts):
        raise ConfigError(f"{option} must be {RANGE}, not {text!r}")
    return parts


def _step(seconds: float | None) -> str:
    return "memory does not suffice" if seconds is None else f"{1e3 * seconds:.3f} ms a step"


def _print(plan: Plan) -> None:
    console = Console(highlight=False)
    headings = ("stage", "nodes", "ranks", "ms", "exchange", "weights", "sends", "memory")
    table = plain_table(headings, ("nodes", "ranks"))
    for i, stage in enumerate(plan.stages):
        memory = plan.memory[stage.ranks[0]] if plan.memory else None
        times = f"{digits(1e3 * stage.forward)} + {digits(1e3 * stage.backward)}", digits(1e3 * stage.exchange)
        sizes = map(of_bytes, (stage.parameters, stage.sent, memory))
        table.add_row(*map(escape, [str(i), _ends(stage.nodes), ", ".join(map(str, stage.ranks)), *times, *sizes]))
    console.print(table)
    console.print(
        "ms: forward + backward of a micro-batch on a rank; exchange: of gradients, in ms; sends: for a micro-batch",
        style="dim",
    )
    console.print(f"\n{escape(plan.summary)}", soft_wrap=True)


def _ends(nodes: Any) -> str:
    return nodes[0] if len(nodes) == 1 else f"{nodes[0]} .. {nodes[-1]} ({len(nodes)})"
