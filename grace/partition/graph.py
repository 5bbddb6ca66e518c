"""The graph of a model: nodes that compute, what they read, and what each takes."""

import functools
import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from grace.core.variable import Variable
from grace.errors import ConfigError

NUMBERS = ("nbytes", "forward", "backward", "kept", "overhead", "overhead_back", "kept_fixed")


@dataclass(frozen=True)
class Node:
    """An atomic subcomponent: an operation that depends on the input, with the constant operations that feed it.

    Attributes:
        name: by which it is known.
        inputs: names of the nodes, and of the model's inputs, whose values it reads.
        nbytes: bytes of its value, for the rows of the profile.
        forward: seconds of forward, for those rows.
        backward: seconds of backward, without computing forward again.
        kept: bytes that it keeps from forward to backward, for those rows, parameters left out.
        parameters: bytes of each parameter that trains, by its name in the whole model. A name may stand in several
            nodes (a tied parameter, or a cloned constant), of equal bytes.
        kind: what it is, as "Linear".
        line: of the user's model; "" where it is not known.
        differentiable: whether a gradient comes back for its value; a cut then moves ``nbytes`` back too.
        overhead: seconds of ``forward`` that do not depend on the rows.
        overhead_back: seconds of ``backward`` that do not depend on the rows.
        kept_fixed: bytes of ``kept`` that do not depend on the rows.
        held: bytes of each tensor that is there and does not train, by name: buffers, frozen parameters, constants.
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
        """Bytes of what is there whether a batch is under way or not, by name: parameters, buffers, constants."""
        return {**self.parameters, **self.held}


@dataclass(frozen=True)
class Graph:
    """Nodes, and what they were measured with.

    Attributes:
        nodes: in topological order.
        inputs: bytes of the model's inputs, by name, for the rows of the profile. No gradient comes back for them.
        outputs: names of the values that the model returns, which may be inputs.
        rows: rows of the batch for which seconds and bytes are.
        together: sets of names of nodes that must share a stage.
        variables: shapes and dtypes of parameters, where they are known; others count as vectors of float32.

    Raises:
        ConfigError: a name is there twice, unknown, or read before it is computed; a number is below zero or not
            finite; or a parameter has two sizes.

    >>> graph = Graph((Node("a", ("x",), forward=0.2, overhead=0.1), Node("b", ("a",))), {"x": 8.0}, ("b",), rows=2)
    >>> graph.seconds(graph.nodes[0], rows=4)
    (0.30000000000000004, 0.0)
    """

    nodes: tuple[Node, ...]
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
            for what in NUMBERS:
                _check(getattr(node, what), f"node {node.name!r}: {what}")
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
        """The nodes' positions, by name."""
        return {node.name: i for i, node in enumerate(self.nodes)}

    @functools.cached_property
    def parameters(self) -> dict[str, float]:
        """Bytes of all parameters, by name, each once, in the order of the nodes."""
        return {name: nbytes for node in self.nodes for name, nbytes in node.parameters.items()}

    @functools.cached_property
    def held(self) -> dict[str, float]:
        """Bytes of all tensors that do not train, by name, each once."""
        return {name: nbytes for node in self.nodes for name, nbytes in node.held.items()}

    def kept_by_row(self, node: Node) -> float:
        """Bytes that a node needs beside its parameters, their gradients and optimizer state, if each of the profile's
        rows is a micro-batch: a row's share of it is what one row needs."""
        fixed = min(node.kept_fixed, node.kept) + sum(node.held.values())
        return node.kept + fixed * self.rows - min(node.kept_fixed, node.kept)

    def variable(self, name: str) -> Variable:
        """A parameter, as exchanges see it."""
        known = self._variables.get(name)
        return known or Variable(name, (max(1, round(self.parameters[name] / 4)),))

    @functools.cached_property
    def _variables(self) -> dict[str, Variable]:
        return {variable.name: variable for variable in self.variables}

    def seconds(self, node: Node, rows: float) -> tuple[float, float]:
        """Forward and backward seconds of a node for so many rows: overhead + linear."""
        scale = rows / self.rows
        times = ((node.forward, node.overhead), (node.backward, node.overhead_back))
        forward, backward = (min(fixed, whole) + max(0.0, whole - fixed) * scale for whole, fixed in times)
        return forward, backward

    def nbytes(self, name: str) -> float:
        """Bytes of the value of a node or an input, for the profile's rows."""
        return self.inputs[name] if name in self.inputs else self.nodes[self.index[name]].nbytes

    def differentiable(self, name: str) -> bool:
        """Whether a gradient comes back for the value of a node or an input."""
        return name not in self.inputs and self.nodes[self.index[name]].differentiable

    def passed_on(self, stages: Sequence[Collection[str]]) -> list[tuple[str, ...]]:
        """What each stage hands to the next one: what any later stage reads, and the model's outputs.

        A value that a later, non-adjacent stage reads is passed on stage by stage; the model's inputs come in at the
        first stage, and its outputs leave the last one.

        Args:
            stages: names of nodes, each node in one stage.

        Returns:
            For each stage but the last the names of the values, inputs first, in topological order.

        Raises:
            ConfigError: a node is in no stage, or in two, or reads what a later stage computes; a stage is empty; or
                nodes that must be together are not.

        >>> nodes = Node("a", ("x",)), Node("b", ("a",)), Node("c", ("a", "b"))
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
                if at.get(name, 0) > at[node.name]:
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
        """Digest of the structure: nodes, what they read, their kinds and parameters; not seconds, rows or lines."""
        structure = [
            [[n.name, n.inputs, n.kind, sorted(n.parameters.items()), n.differentiable] for n in self.nodes],
            list(self.inputs),
            self.outputs,
            sorted(sorted(group) for group in self.together),
        ]
        return hashlib.sha256(json.dumps(structure).encode()).hexdigest()


def _check(value: float, what: str) -> None:
    if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
        raise ConfigError(f"{what} must be a finite number of at least 0, not {value!r}")
