"""The graph of a model: its nodes, the values that they read, and the seconds and bytes of each."""

import functools
import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from grace.core import documents
from grace.core.schema_words import read_record
from grace.core.variable import Variable
from grace.errors import ConfigError

VERSION = 1
"""Version of a graph's document."""
NUMBERS = ("nbytes", "forward", "backward", "kept", "overhead", "overhead_back", "kept_fixed")


@dataclass(frozen=True)
class GraphNode:
    """An atomic subcomponent: an operation that depends on the input, with the constant operations that feed it.

    Attributes:
        name: the node's name.
        inputs: names of the nodes and of the model's inputs whose values it reads.
        nbytes: bytes of its value, for the rows of the profile.
        forward: seconds of forward, for those rows.
        backward: seconds of backward, without computing forward again.
        kept: bytes that it keeps from forward to backward, for those rows, without parameters.
        parameters: bytes of each trained parameter, by its name in the whole model. A tied parameter, or one that feeds
            a cloned constant, stands in several nodes, with equal bytes.
        kind: kind of the operation, as "Linear".
        line: line of the user's model; "" if it is not known.
        differentiable: True if a gradient comes back for its value; a cut then moves ``nbytes`` back too.
        overhead: seconds of ``forward`` that do not depend on the rows.
        overhead_back: seconds of ``backward`` that do not depend on the rows.
        kept_fixed: bytes of ``kept`` that do not depend on the rows.
        held: bytes of each tensor that does not train, by name: buffers, frozen parameters, constants.
    """

    name: str
    inputs: tuple[str, ...] = ()
    nbytes: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    kept: float = 0.0
    parameters: Mapping[str, float] = field(default_factory=dict)
    kind: str = ""
    line: str = ""
    differentiable: bool = True
    overhead: float = 0.0
    overhead_back: float = 0.0
    kept_fixed: float = 0.0
    held: Mapping[str, float] = field(default_factory=dict)

    @property
    def stored(self) -> dict[str, float]:
        """Bytes of the tensors that are kept between steps, by name: parameters, buffers, constants."""
        return {**self.parameters, **self.held}


@dataclass(frozen=True)
class Graph:
    """A model as nodes, and the batch that they were measured with.

    Attributes:
        nodes: the nodes, in topological order.
        inputs: bytes of the model's inputs, by name, for the rows of the profile. No gradient comes back for them.
        outputs: names of the values that the model returns; they may be inputs.
        rows: rows of the batch that seconds and bytes are given for.
        together: sets of names of nodes that must be in one stage.
        variables: shapes and dtypes of parameters, as far as known; other parameters count as vectors of float32.

    Raises:
        ConfigError: a name is used twice, unknown, or read before it is computed; a number is below zero or not finite;
            or a parameter has two sizes.

    >>> nodes = GraphNode("a", ("x",), forward=0.2, overhead=0.1), GraphNode("b", ("a",))
    >>> graph = Graph(nodes, {"x": 8.0}, ("b",), rows=2)
    >>> graph.seconds(graph.nodes[0], rows=4)
    (0.30000000000000004, 0.0)
    """

    nodes: tuple[GraphNode, ...]
    inputs: Mapping[str, float]
    outputs: tuple[str, ...]
    rows: int = 1
    together: tuple[frozenset[str], ...] = ()
    variables: tuple[Variable, ...] = ()

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ConfigError("a graph has at least one node")
        if not (isinstance(self.rows, int) and self.rows >= 1):
            raise ConfigError(f"a graph's rows must be a whole number of at least 1, not {self.rows!r}")
        known = set(self.inputs)
        sizes: dict[str, float] = {}
        for node in self.nodes:
            if node.name in known:
                raise ConfigError(f"two nodes or inputs of the graph are called {node.name!r}")
            for name in node.inputs:
                if name not in known:
                    raise ConfigError(
                        f"node {node.name!r} reads {name!r}, which is no input and no node before it: "
                        "nodes stand in topological order"
                    )
            known.add(node.name)
            for field_name in NUMBERS:
                _check(getattr(node, field_name), f"node {node.name!r}: {field_name}")
            for name, nbytes in node.stored.items():
                _check(nbytes, f"node {node.name!r}: bytes of parameter {name!r}")
                if sizes.setdefault(name, nbytes) != nbytes:
                    raise ConfigError(
                        f"parameter {name!r} has {sizes[name]:g} bytes in one node, {nbytes:g} in another"
                    )
        for name, nbytes in self.inputs.items():
            _check(nbytes, f"input {name!r}: bytes")
        for name in self.outputs:
            if name not in known:
                raise ConfigError(f"the output {name!r} is no node and no input of the graph")
        for group in self.together:
            for name in group:
                if name not in self.index:
                    raise ConfigError(f"together= names {name!r}, which is no node of the graph")

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """Position of each node, by name."""
        return {node.name: i for i, node in enumerate(self.nodes)}

    @functools.cached_property
    def parameters(self) -> dict[str, float]:
        """Bytes of each trained parameter, by name, in the order of the nodes."""
        return {name: nbytes for node in self.nodes for name, nbytes in node.parameters.items()}

    @functools.cached_property
    def held(self) -> dict[str, float]:
        """Bytes of each tensor that does not train, by name."""
        return {name: nbytes for node in self.nodes for name, nbytes in node.held.items()}

    def kept_by_row(self, node: GraphNode) -> float:
        """Return the bytes that a node needs besides its parameters, their gradients and optimizer state if each of the
        profile's rows is a micro-batch. Divided by the rows they are the bytes of a micro-batch of one row."""
        fixed = min(node.kept_fixed, node.kept) + sum(node.held.values())
        return node.kept + fixed * self.rows - min(node.kept_fixed, node.kept)

    def variable(self, name: str) -> Variable:
        """Return a parameter as a variable of an exchange."""
        known = self._variables.get(name)
        return known or Variable(name, (max(1, round(self.parameters[name] / 4)),))  # 4 bytes a float32

    @functools.cached_property
    def _variables(self) -> dict[str, Variable]:
        return {variable.name: variable for variable in self.variables}

    def seconds(self, node: GraphNode, rows: float) -> tuple[float, float]:
        """Return the seconds of a node's forward and backward for a number of rows: the overhead, and a part that is
        proportional to rows."""
        scale = rows / self.rows
        times = ((node.forward, node.overhead), (node.backward, node.overhead_back))
        forward, backward = (min(fixed, whole) + max(0.0, whole - fixed) * scale for whole, fixed in times)
        return forward, backward

    def nbytes(self, name: str) -> float:
        """Return the bytes of the value of a node or an input, for the profile's rows."""
        return self.inputs[name] if name in self.inputs else self.nodes[self.index[name]].nbytes

    def differentiable(self, name: str) -> bool:
        """Return True if a gradient comes back for the value of a node or an input."""
        return name not in self.inputs and self.nodes[self.index[name]].differentiable

    def passed_on(self, stages: Sequence[Collection[str]]) -> list[tuple[str, ...]]:
        """Return the values that each stage sends to the next one: those that any later stage reads, and the model's
        outputs.

        A value that a non-adjacent stage reads is passed on stage by stage. The model's inputs enter at the first
        stage, and its outputs leave the last one.

        Args:
            stages: names of the nodes of each stage.

        Returns:
            names of the values, for each stage but the last, inputs first, in topological order.

        Raises:
            ConfigError: a node is in no stage, or in two, or reads a value that a later stage computes; a stage is
                empty; or nodes that must be together are not.

        >>> nodes = GraphNode("a", ("x",)), GraphNode("b", ("a",)), GraphNode("c", ("a", "b"))
        >>> Graph(nodes, {"x": 8.0}, ("c",)).passed_on([["a"], ["b"], ["c"]])
        [('a',), ('a', 'b')]
        """
        at: dict[str, int] = {}
        for i, names in enumerate(stages):
            if not names:
                raise ConfigError(f"stage {i} has no nodes")
            for name in names:
                if name not in self.index:
                    raise ConfigError(f"stage {i} has {name!r}, which is no node of the graph")
                if name in at:
                    raise ConfigError(f"node {name!r} is in stages {at[name]} and {i}")
                at[name] = i
        last: dict[str, int] = dict.fromkeys(self.outputs, len(stages) - 1)
        for node in self.nodes:
            if node.name not in at:
                raise ConfigError(f"node {node.name!r} is in no stage")
            for name in node.inputs:
                if at.get(name, 0) > at[node.name]:  # the model's inputs are at the first stage
                    raise ConfigError(
                        f"node {node.name!r} of stage {at[node.name]} reads {name!r}, which stage {at[name]} computes"
                    )
                last[name] = max(last.get(name, 0), at[node.name])
        for group in self.together:
            if len({at[name] for name in group}) > 1:
                raise ConfigError(f"nodes that must be in one stage are in several: {', '.join(sorted(group))}")
        values = [*self.inputs, *(node.name for node in self.nodes)]
        return [
            tuple(name for name in values if at.get(name, 0) <= i < last.get(name, -1)) for i in range(len(stages) - 1)
        ]

    @functools.cached_property
    def key(self) -> str:
        """Digest of the structure: nodes, their inputs, kinds and parameters; without seconds, rows and lines."""
        structure = [
            [[n.name, n.inputs, n.kind, sorted(n.parameters.items()), n.differentiable] for n in self.nodes],
            list(self.inputs),
            self.outputs,
            sorted(sorted(group) for group in self.together),
        ]
        return hashlib.sha256(json.dumps(structure).encode()).hexdigest()

    def to_dict(self) -> dict[str, object]:
        """Return the graph as a JSON document. Nodes leave out fields that have their defaults.

        >>> graph = Graph((GraphNode("a", ("x",), 4.0),), {"x": 8.0}, ("a",))
        >>> graph.to_dict()["nodes"], Graph.from_dict(graph.to_dict()) == graph
        ([{'name': 'a', 'inputs': ['x'], 'nbytes': 4.0}], True)
        """
        plain = asdict(GraphNode(""))
        nodes = [
            {key: value for key, value in asdict(node).items() if key == "name" or value != plain[key]}
            for node in self.nodes
        ]
        document = {
            "graph": VERSION,
            "rows": self.rows,
            "inputs": dict(self.inputs),
            "outputs": self.outputs,
            "together": [sorted(group) for group in self.together],
            "variables": [asdict(variable) for variable in self.variables],
            "nodes": nodes,
        }
        return json.loads(json.dumps(document))  # type: ignore[no-any-return]  # tuples as lists

    @classmethod
    def from_dict(cls, document: object, source: str = "the document") -> "Graph":
        """Return the graph of a JSON document. A ConfigError names the field that is wrong, as another version."""
        if not isinstance(document, dict) or "graph" not in document:
            raise ConfigError(f"{source} is no graph: it needs the field graph (its version)")
        if document["graph"] != VERSION:
            raise ConfigError(f"{source} is a graph of version {document['graph']!r}, and this reads version {VERSION}")
        if "rows" not in document:  # without which seconds would be taken for those of one row
            raise ConfigError(f"{source}, rows: is missing")
        return read_record(cls, {key: value for key, value in document.items() if key != "graph"}, source)

    def save(self, path: str | Path) -> None:
        """Write the graph to a file, as JSON."""
        documents.write(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> "Graph":
        """Return the graph in a file; raise ConfigError if it has none."""
        return cls.from_dict(documents.parse(documents.read(Path(path)), str(path), only_json=True), str(path))


def _check(value: float, what: str) -> None:
    """Raise ConfigError unless a value is a finite number of at least 0."""
    if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
        raise ConfigError(f"{what} must be a finite number of at least 0, not {value!r}")
