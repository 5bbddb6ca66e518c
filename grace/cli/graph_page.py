"""A model's graph drawn: a row for each node, its times, and arcs to what it reads, as one HTML file."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grace.bench.common.text import of_bytes, short
from grace.bench.report import page
from grace.bench.report.figures.style import (
    GRID,
    INK,
    MUTED,
    PALETTE,
    Figure,
    Panel,
    escaped,
    label_axes,
    panel,
    set_margins,
    svg,
    write,
)
from grace.pipeline.planning.graph import Graph

ROW, MOST = 18, 300
"""CSS pixels of a row, and rows: of a longer graph, neighbours share one."""
ARCS, NAMES, SIZES = 150, 310, 200
"""CSS pixels of the arcs, the names, and what is said at the right."""


@dataclass
class Row:
    """Nodes that are drawn as one, in order."""

    name: str
    kind: str
    forward: float
    backward: float
    parameters: float
    nbytes: float
    reads: set[int]


def rows_of(graph: Graph, most: int = MOST) -> list[Row]:
    """The rows: a node each, or several neighbours.

    >>> from grace.pipeline.planning.graph import Node
    >>> graph = Graph((Node("a", ("x",)), Node("b", ("a",)), Node("c", ("a", "b"))), {"x": 8.0}, ("c",))
    >>> [(row.name, sorted(row.reads)) for row in rows_of(graph)]
    [('a', []), ('b', [0]), ('c', [0, 1])]
    >>> [(row.name, sorted(row.reads)) for row in rows_of(graph, 2)]
    [('a .. b', []), ('c', [0])]
    """
    size = math.ceil(len(graph.nodes) / most)
    at = {node.name: i // size for i, node in enumerate(graph.nodes)}
    rows = []
    for start in range(0, len(graph.nodes), size):
        nodes, i = graph.nodes[start : start + size], start // size
        name = nodes[0].name if len(nodes) == 1 else f"{nodes[0].name} .. {nodes[-1].name}"
        reads = {at[read] for node in nodes for read in node.inputs if at.get(read, i) != i}
        own = {name: nbytes for node in nodes for name, nbytes in node.stored.items()}
        times = (sum(node.forward for node in nodes), sum(node.backward for node in nodes))
        kind = nodes[0].kind if len(nodes) == 1 else f"{len(nodes)} nodes"
        rows.append(Row(name, kind, *times, sum(own.values()), nodes[-1].nbytes, reads))
    return rows


def write_page(graph: Graph, path: Path) -> None:
    """Write the file: the figure is in it, and nothing is loaded.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    rows = rows_of(graph)
    title = f"A graph of {len(graph.nodes)} nodes"
    about = (
        f"{len(graph.parameters)} parameters of {of_bytes(sum(graph.parameters.values()))}; times and sizes are for "
        f"{graph.rows} rows."
    )
    figure = page.figure_html(_figure(rows), wide=True)
    section = f'<section id="s0"><h2>{escaped(title)}</h2><p class="about">{escaped(about)}</p>\n{figure}\n</section>'
    page.write(path, page.document("Grace pipeline graph", [section]))


def _figure(rows: list[Row]) -> Figure:
    drawing, axes = panel(ROW * len(rows) + 60, 1000)
    skips = any(i - read > 1 for i, row in enumerate(rows) for read in row.reads)
    set_margins(drawing, axes, (ARCS if skips else 0) + NAMES, SIZES, 8, 44)
    longest = max((row.forward + row.backward for row in rows), default=0.0) or 1e-9
    axes.set_xlim(0, 1e3 * longest)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(False, axis="y")
    axes.set_yticks([])
    for i, row in enumerate(rows):
        axes.barh(i, 1e3 * row.forward, height=0.66, color=PALETTE[0], linewidth=0)
        axes.barh(i, 1e3 * row.backward, left=1e3 * row.forward, height=0.66, color=PALETTE[1], linewidth=0)
        said = f"{short(row.name, 36)}  {short(row.kind, 16)}"
        write(axes, said, (0, i), (-8, 0), size=10, ha="right", va="center", textcoords="offset points")
        weights = f"{of_bytes(row.parameters)} weights, " if row.parameters else ""
        sizes = f"{weights}hands on {of_bytes(row.nbytes)}"
        across = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}  # down in rows
        write(axes, sizes, (1, i), (6, 0), 9, MUTED, ha="left", va="center", **across)
    if skips:
        _arcs(drawing, rows)
    label_axes(axes, "ms")
    top = sorted(rows, key=lambda row: row.forward + row.backward, reverse=True)[:5]
    heavy = ", ".join(f"{row.name} {1e3 * (row.forward + row.backward):.3g} ms" for row in top)
    about = f"{len(rows)} rows from the first to the last; the longest: {heavy}"
    caption = "Operations from the first to the last. Blue: forward; orange: backward."
    if skips:
        caption += (
            " An arc at the left leads to each that reads what another, not its neighbour, handed on: cutting between "
            "them moves that too."
        )
    return Figure("Operations", caption, [Panel("", svg(drawing, "graph", about), about)])


def _arcs(drawing: Any, rows: list[Row]) -> None:
    """From each row to the earlier ones that it reads, but its neighbour; wider where they lead further."""
    from matplotlib.patches import Arc

    axes = drawing.add_axes(drawing.axes[0].get_position())
    width, _ = 72 * drawing.get_size_inches()
    left = drawing.axes[0].get_position()
    axes.set_position((0.002, left.y0, (ARCS - 4) / width, left.height))
    axes.axis("off")
    axes.set_xlim(-1.02, 0.02)
    axes.set_ylim(*drawing.axes[0].get_ylim())
    spans = [i - read for i, row in enumerate(rows) for read in row.reads if i - read > 1]
    most = math.log2(max(spans, default=2))
    for i, row in enumerate(rows):
        for read in row.reads:
            if i - read > 1:
                wide = 2 * math.log2(i - read) / most
                shape = Arc((0, (i + read) / 2), wide, i - read, theta1=90, theta2=270, edgecolor=INK, linewidth=0.7)
                shape.set_alpha(0.6)
                axes.add_patch(shape)
        axes.plot([0], [i], marker=".", markersize=3, color=GRID)
