"""The atomic subcomponents of a captured model: operations that depend on its inputs, with the constant ones that feed
them."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.partition.graph import Graph, Node
from grace.torch.pipeline.capture import Captured, is_random, kind_of, line_of, values, written


class Atoms:
    """Which nodes of a captured model stand for themselves, and what the others feed.

    Args:
        captured: the model's graph.

    Attributes:
        dynamic: nodes that depend on the inputs, draw random numbers, or touch what is written to; each runs once.
        values: fake values of all nodes.
        together: sets of names of nodes that must be in one stage.

    Raises:
        ConfigError: nothing in the model depends on its inputs.
    """

    def __init__(self, captured: Captured):
        self.captured = captured
        self.values = values(captured)
        self.order = {node: i for i, node in enumerate(captured.module.graph.nodes)}
        self.storages = {node: storages_of(value) for node, value in self.values.items()}
        writes: dict[int, list[fx.Node]] = {}
        for node in captured.nodes:
            for target in written(node):
                for storage in self.storages[target]:
                    writes.setdefault(storage, []).append(node)
        self.dynamic = self._dynamic(writes)
        if not self.dynamic:
            raise ConfigError("nothing in the model depends on its inputs: there is nothing to cut")
        self.together = self._together(writes)

    def _dynamic(self, writes: Mapping[int, Any]) -> dict[fx.Node, None]:
        found: dict[fx.Node, None] = {}
        for node in self.captured.nodes:
            read = node.all_input_nodes
            touched = self.storages[node].union(*(self.storages[one] for one in read))
            depends = any(one.op == "placeholder" or one in found for one in read)
            if depends or is_random(node) or not touched.isdisjoint(writes) or written(node):
                found[node] = None
        return found

    def _together(self, writes: Mapping[int, list[fx.Node]]) -> list[frozenset[str]]:
        sets: list[set[fx.Node]] = []
        for storage, writers in writes.items():
            last = max(self.order[node] for node in writers)
            holders = [node for node, own in self.storages.items() if storage in own]
            if any(node.op == "get_attr" for node in holders):  # a buffer, which stays where it is
                sets.append({user for node in holders for user in (node, *node.users)})
                continue
            old = [node for node in holders if self.order[node] < last]
            sets.append({*writers, *old, *(user for node in old for user in node.users)})
        for node in self.dynamic:
            value = self.values[node]
            if not isinstance(value, torch.Tensor):  # parts of it are passed on, and not itself
                sets.append({node, *node.users})
            if not node.users and node.all_input_nodes and all(one.op == "get_attr" for one in node.all_input_nodes):
                following = next((one for one in self.dynamic if self.order[one] > self.order[node]), None)
                sets.append({node, following or node})  # a counter beside what it counts
        return [frozenset(node.name for node in merged) for merged in _merged(sets, self.dynamic) if len(merged) > 1]

    def constants(self, node: fx.Node) -> list[fx.Node]:
        """The constant nodes that feed a node, get_attr among them, in order."""
        found: dict[fx.Node, None] = {}
        left = list(node.all_input_nodes)
        while left:
            one = left.pop()
            if one.op != "placeholder" and one not in self.dynamic and one not in found:
                found[one] = None
                left += one.all_input_nodes
        return sorted(found, key=self.order.__getitem__)

    def reads(self, node: fx.Node) -> list[fx.Node]:
        """The dynamic nodes and model inputs that a node reads."""
        own = dict.fromkeys(one for one in node.all_input_nodes if one.op == "placeholder" or one in self.dynamic)
        return list(own)

    def parameters(self, node: fx.Node) -> dict[str, float]:
        """Bytes of the parameters that train and feed a node, by name."""
        return {name: float(t.nbytes) for name, t in self._stored(node).items() if _trains(t)}

    def held(self, node: fx.Node) -> dict[str, float]:
        """Bytes of the other tensors that feed a node, by name: frozen parameters, buffers, constants."""
        return {name: float(t.nbytes) for name, t in self._stored(node).items() if not _trains(t)}

    def _stored(self, node: fx.Node) -> dict[str, torch.Tensor]:
        names = dict.fromkeys(str(one.target) for one in self.constants(node) if one.op == "get_attr")
        tensors = {name: self.captured.attributes[name] for name in names}
        return {name: t for name, t in tensors.items() if isinstance(t, torch.Tensor)}

    def outputs(self) -> list[fx.Node]:
        """The nodes and inputs whose values the model returns, each once; constants are left out."""
        nodes = dict.fromkeys(one for one in self.captured.outputs if isinstance(one, fx.Node))
        return [one for one in nodes if one.op == "placeholder" or one in self.dynamic]

    def graph(self, rows: int, measured: Mapping[str, Mapping[str, float]] | None = None) -> Graph:
        """The graph that is planned with.

        Args:
            rows: of the batch that the model was captured with.
            measured: "forward", "backward", "kept" and further fields of nodes, by name.
        """
        nodes = []
        for node in self.dynamic:
            value = self.values[node]
            nodes.append(
                Node(
                    name=node.name,
                    inputs=tuple(one.name for one in self.reads(node)),
                    nbytes=_nbytes(value),
                    parameters=self.parameters(node),
                    held=self.held(node),
                    kind=kind_of(node),
                    line=line_of(node),
                    differentiable=any(t.requires_grad for t in tensors_of(value)),
                    **(measured or {}).get(node.name, {}),  # type: ignore[arg-type]
                )
            )
        inputs = {one.name: _nbytes(self.values[one]) for one in self.order if one.op == "placeholder"}
        outputs = tuple(one.name for one in self.outputs())
        return Graph(tuple(nodes), inputs, outputs or (nodes[-1].name,), rows, tuple(self.together), self._variables())

    def _variables(self) -> tuple[Variable, ...]:
        """Parameters that train, as exchanges see them."""
        names = dict.fromkeys(name for node in self.dynamic for name in self.parameters(node))
        found = ((name, self.captured.attributes[name]) for name in names)
        return tuple(Variable(n, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for n, p in found)


def _trains(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a value."""
    return [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]


def storages_of(value: Any) -> set[int]:
    """Numbers of the storages of the tensors in a value, while they are alive."""
    return {one.untyped_storage()._cdata for one in tensors_of(value)}


def _nbytes(value: Any) -> float:
    return float(sum(one.nbytes for one in tensors_of(value)))


def _merged(sets: Iterable[set[fx.Node]], dynamic: Mapping[fx.Node, None]) -> list[set[fx.Node]]:
    """Sets that share a node become one; what is not dynamic is left out."""
    merged: list[set[fx.Node]] = []
    for new in sets:
        own = {node for node in new if node in dynamic}
        apart = []
        for other in merged:
            if other.isdisjoint(own):
                apart.append(other)
            else:
                own |= other
        merged = [*apart, own]
    return merged
