"""Profiles of PipeDream (Narayanan et al., SOSP 2019) as graphs of pipelines.

A profile has a row for each node, with milliseconds of forward and backward and bytes of its value and of its
parameters, for one batch on a V100; and edges.
"""

import dataclasses
import graphlib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grace.core import documents
from grace.errors import ConfigError
from grace.pipeline.planning.graph import Graph, GraphNode

ROWS = {
    "alexnet": 256,
    "densenet121": 64,
    "gnmt": 32,
    "gnmt_large": 128,
    "inception_v3": 128,
    "resnet18": 256,
    "resnet50": 128,
    "squeezenet1_0": 256,
    "vgg16": 128,
}
"""Rows of PipeDream's batches: bytes of the input over those of an image of 3 x 224 x 224 (299 x 299 of inception_v3)
floats, or of a hidden state over 1,024 floats."""
COLUMNS = ["id", "kind", "forward_ms", "backward_ms", "activation_bytes", "parameter_bytes"]
VIEWS = ("View", "Size", "__getitem__")
"""Kinds of nodes whose values are views, and keep no memory of their own."""


def read_graph(path: str | Path, rows: int | None = None) -> Graph:
    """Return the graph in a file, which is Grace's own or a profile of PipeDream's.

    Args:
        path: the file.
        rows: rows of the batch of a profile; looked up in :data:`ROWS` by the model's name if left out.

    Raises:
        ConfigError: the file is of neither kind, of another version, or damaged.
    """
    document = documents.parse(documents.read(Path(path)), str(path), only_json=True)
    if isinstance(document, dict) and document.get("columns") == COLUMNS:
        return graph_of(document, rows, str(path))
    return Graph.from_dict(document, str(path))


def graph_of(document: Mapping[str, Any], rows: int | None = None, source: str = "the profile") -> Graph:
    """Return the graph of a profile. Its input nodes become the model's inputs, and take no time.

    Raises:
        ConfigError: an edge has no node, edges form a cycle, or the number of rows is not known.
    """
    if rows is None:
        named = re.search(r"profiles/(\w+)/graph\.txt", str(document.get("source", "")))
        rows = ROWS.get(named[1]) if named else None
        if rows is None:
            raise ConfigError(f"{source} does not tell how many rows its batch has: give rows=")
    try:
        table = {node.name: node for node in map(_parse_row, document["nodes"])}
        reads: dict[str, list[str]] = {name: [] for name in table}
        for start, end in document["edges"]:
            reads[end].append(table[start].name)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"{source} is no profile of PipeDream's: {type(error).__name__}: {error}") from None
    order = list(table)  # kept if it is topological
    position = {name: i for i, name in enumerate(order)}
    if any(position[start] > position[end] for end, starts in reads.items() for start in starts):
        try:
            order = list(graphlib.TopologicalSorter(reads).static_order())
        except graphlib.CycleError as error:
            raise ConfigError(f"{source}: its edges go in a circle: {' -> '.join(error.args[1])}") from None
    inputs = {name: node.nbytes for name, node in table.items() if node.kind.startswith("Input")}
    nodes = [dataclasses.replace(table[name], inputs=tuple(reads[name])) for name in order if name not in inputs]
    read_by = {start for start, _ in document["edges"]}
    # profiles have parts of a value that nobody reads, which the model does not return
    outputs = tuple(node.name for node in nodes if node.name not in read_by and node.kind != "__getitem__")
    return Graph(tuple(nodes), inputs, outputs, rows)


def _parse_row(row: Sequence[object]) -> GraphNode:
    """Return the node of a row of a PipeDream document, without its inputs."""
    name, kind, *numbers = row
    if not (isinstance(name, str) and isinstance(kind, str)):
        raise ValueError(f"a row begins with a name and a kind, not {documents.shown(row)}")
    values = list[float]()
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number <= sys.float_info.max:
            raise ValueError(f"node {name!r} has {documents.shown(number)} where a number of at least 0 must be")
        values.append(float(number))
    forward, backward, nbytes, weights = values
    return GraphNode(
        name,
        nbytes=nbytes,
        forward=forward / 1e3,  # profiles have milliseconds
        backward=backward / 1e3,
        kept=0.0 if kind in VIEWS else nbytes,
        parameters={f"{name}.parameters": weights} if weights else {},
        kind=kind,
    )
