"""``grace strategy``: build, show and check strategies."""

import json
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from grace.bench.common.tables import Columns, table
from grace.bench.common.text import of_bytes
from grace.cli.inputs import MOST_RANKS, load_cluster, load_variables
from grace.cli.terminal import check_outputs, standard_output
from grace.core import documents
from grace.core.component import is_ours
from grace.core.registry import make
from grace.errors import ConfigError
from grace.strategy.builder import OneNode
from grace.strategy.execution import make_shards
from grace.strategy.plan import ShardPlan, Strategy, communicator_of
from grace.strategy.predicted_bytes import bytes_by_rank, collectives_of, payload_bytes
from grace.strategy.sync import ALONE

app = typer.Typer(no_args_is_help=True, help="Build, show and check strategies.")

MODEL = (
    "module:function that returns a model, as in examples.torch.models:lstm, or (model, loss, samples), as for bench."
)
Model = Annotated[str | None, typer.Option("--model", help=MODEL)]
Resources = Annotated[Path | None, typer.Option("-r", "--resources", help="The cluster, for a file that names none.")]
Ranks = Annotated[
    int | None,
    typer.Option(
        "-n", "--ranks", min=1, max=MOST_RANKS, help="Ranks on one machine, for a file that names no cluster."
    ),
]
File = Annotated[Path, typer.Argument(help="A strategy: YAML, or JSON if its name ends in .json.")]
MOST_ROWS = 8
"""Ranks whose traffic is printed one by one."""


@app.command()
def build(
    model: Annotated[str, typer.Option("--model", help=MODEL)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write: YAML, or JSON if it ends in .json.")],
    builder: Annotated[
        str, typer.Option(help="A builder's spec, as in 'parallax(compressor=topk(ratio=0.05))'; see `grace list`.")
    ] = "all_reduce",
    resources: Annotated[
        Path | None, typer.Option("-r", "--resources", help="The cluster; this machine if left out.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n", "--ranks", min=1, max=MOST_RANKS, help="Ranks on this machine, without a cluster.", show_default="1"
        ),
    ] = None,
) -> None:
    """Build a strategy for a model on a cluster, and write it to a file."""
    from grace.strategy import schema

    check_outputs(out, sources=[resources])
    cluster = load_cluster(resources, ranks) or OneNode(1)
    strategy = make("builder", builder).build(load_variables(model), cluster)
    make_shards(strategy, strategy.variables)  # a run refuses variables that are too large for their method
    schema.dump(strategy, out)
    print(f"Wrote {out}: {_summary(strategy)}")


@app.command()
def show(strategy: File, model: Model = None, resources: Resources = None, ranks: Ranks = None) -> None:
    """Show a strategy as a table, and what every rank sends in a step."""
    loaded = _load(strategy, model, resources, ranks)
    headings = ("variable", "shape", "bytes", "cut", "sync", "to", "compressor, memory", "wire bytes")
    columns: Columns[list[str]] = {heading: itemgetter(i) for i, heading in enumerate(headings)}
    console = standard_output()
    console.print(table(_rows(loaded), columns, words=headings[1::2] + headings[4:7]))
    console.print(f"\n{escape(_summary(loaded))}; id {loaded.id[:12]}")
    console.print("wire bytes: one rank's payload in a step; ~: at most, the data decide", style="dim")
    used = {part.sync.type: part for plan in loaded.plans for part in plan.parts}
    for kind, part in sorted(used.items()):
        if kind == ALONE or is_ours(type(communicator_of(part))):
            continue
        console.print(f"{kind}: counted as {', '.join(collectives_of(part))}", style="dim")
    for line in _traffic_lines(loaded):
        console.print(line, soft_wrap=True)


@app.command()
def check(strategy: File, model: Model = None, resources: Resources = None, ranks: Ranks = None) -> None:
    """Check a strategy: its form, its methods, and that it is for the model."""
    loaded = _load(strategy, model, resources, ranks)
    print(f"{strategy}: {_summary(loaded)}; id {loaded.id[:12]}")


@app.command()
def schema(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file to write; the screen if left out.")] = None,
) -> None:
    """Print the JSON Schema of strategy files, with which editors complete and check them."""
    from grace.strategy.schema import json_schema

    check_outputs(out)
    if out is None:
        print(json.dumps(json_schema(), indent=1))
    else:
        documents.write(out, json_schema())


def _load(path: Path, model: str | None, resources: Path | None, ranks: int | None) -> Strategy:
    from grace.strategy import schema

    cluster = load_cluster(resources, ranks)
    loaded = schema.load(path, None if model is None else load_variables(model), cluster)
    if cluster is not None and cluster.world_size != loaded.world_size:
        raise ConfigError(
            f"{path} is for {loaded.world_size} ranks, and {resources or f'-n {ranks}'} has {cluster.world_size}: they "
            "are for a file that names no cluster"
        )
    make_shards(loaded, loaded.variables)  # as in a run, which refuses variables that are too large for their method
    return loaded


def _summary(strategy: Strategy) -> str:
    parts = sum(len(plan.parts) for plan in strategy.plans)
    cut = "" if parts == len(strategy.plans) else f" in {parts} parts"
    by = f", by {strategy.builder['name']}" if strategy.builder else ""
    size = f"{strategy.world_size} rank{'s' * (strategy.world_size != 1)}"
    return f"{len(strategy.plans)} variables{cut}, for {size} on {strategy.nodes} node{'s' * (strategy.nodes != 1)}{by}"


def _traffic_lines(strategy: Strategy) -> Iterator[str]:
    """Yield a line for each rank's traffic, or for the ranks that send most, and one for the busiest link."""
    sends = "{} sends, and receives, {} a step".format
    roots, other = bytes_by_rank(strategy)
    if strategy.world_size <= MOST_ROWS:
        for rank in range(strategy.world_size):
            yield sends(f"rank {rank}", of_bytes(roots.get(rank, other)))
    else:
        busiest_first = sorted(roots.items(), key=lambda root: -root[1])
        for rank, nbytes in busiest_first[:MOST_ROWS]:
            yield sends(f"rank {rank}", of_bytes(nbytes))
        if len(roots) > MOST_ROWS:
            fewest = of_bytes(busiest_first[-1][1])
            yield f"{len(roots) - MOST_ROWS} more destinations send, and receive, {fewest} or more"
        if len(roots) < strategy.world_size:
            others = f"each of the other {strategy.world_size - len(roots)} ranks" if roots else "each rank"
            yield sends(others, of_bytes(other))
    least = min([*roots.values(), *([other] if len(roots) < strategy.world_size else [])])
    busiest, most = max(roots.items(), key=lambda root: root[1], default=(0, least))
    if most > 1.5 * least:
        yield f"the busiest link is that of rank {busiest}: {most / max(1.0, least):.1f} times the least"


def _rows(strategy: Strategy) -> Iterator[list[str]]:
    for plan in strategy.plans:
        for part, variable in zip(plan.parts, plan.part_variables(), strict=True):
            predicted = payload_bytes(part, variable, strategy.world_size)
            cut = "" if plan.axis is None else f"axis {plan.axis}"
            shape = " x ".join(map(str, variable.shape)) or "scalar"
            chosen = part.to_dict()
            yield [
                variable.name,
                f"{shape}{', sparse' if variable.sparse else ''}",
                f"{variable.nbytes:,}",
                cut,
                f"{part.sync.type}{', hierarchical' if part.sync.hierarchical else ''}",
                _destination(part),
                f"{chosen['compressor']}, {chosen['memory']}",
                f"{'' if predicted.exact else '~'}{predicted.nbytes:,}",
            ]


def _destination(part: ShardPlan) -> str:
    if part.rounds is not None:
        return part.rounds.describe()
    options = part.sync.options
    if part.sync.type != "reduce_broadcast":
        return ", ".join([f"group {part.sync.group}", *(f"{key}={value}" for key, value in options.items())])
    under_way = f", {options['staleness']} ahead" if options["staleness"] else ""
    if not options["sync"]:
        under_way = f", {options['ahead']} ahead at most"
    return f"rank {part.sync.destination}{under_way}{', replicated' if options['local_replication'] else ''}"
