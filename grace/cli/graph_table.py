"""A model's graph on a terminal."""

from collections import Counter

from rich.console import Console
from rich.markup import escape

from grace.bench.common.text import digits, of_bytes
from grace.cli.consoles import plain_table
from grace.pipeline.planning.graph import Graph


def print_graph(graph: Graph, longest: int) -> None:
    """Print the nodes that take longest, in the graph's order, and sums of all."""
    console = Console(highlight=False)
    top = sorted(graph.nodes, key=lambda node: node.forward + node.backward, reverse=True)[:longest]
    shown = {node.name for node in top}
    words = ("node", "kind", "line")
    table = plain_table([*words, "ms", "weights", "value", "keeps"], words)
    for node in graph.nodes:
        if node.name in shown:
            times = f"{digits(1e3 * node.forward)} + {digits(1e3 * node.backward)}"
            sizes = (of_bytes(sum(node.stored.values())), of_bytes(node.nbytes), of_bytes(node.kept))
            table.add_row(*map(escape, [node.name, node.kind, node.line, times, *sizes]))
    console.print(table)
    console.print(
        f"ms: forward + backward; value: what it hands on; keeps: for backward; all for {graph.rows} rows", style="dim"
    )
    kinds = Counter(node.kind for node in graph.nodes).most_common(5)
    forward, backward = (sum(getattr(node, what) for node in graph.nodes) for what in ("forward", "backward"))
    said = (
        f"{len(graph.nodes)} nodes ({', '.join(f'{count} {kind}' for kind, count in kinds)}"
        f"{' ...' if len({node.kind for node in graph.nodes}) > 5 else ''}), {len(graph.parameters)} parameters of "
        f"{of_bytes(sum(graph.parameters.values()))}, {digits(1e3 * forward)} + {digits(1e3 * backward)} ms"
    )
    console.print(f"\n{escape(said)}", soft_wrap=True)
