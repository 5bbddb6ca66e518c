"""Atomic subcomponents of a captured model: operations that depend on its inputs, with the constant operations that
feed them."""

import functools
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.pipeline.planning.graph import Graph, GraphNode
from grace.pipeline.torch.batches import count_rows, has_rows
from grace.pipeline.torch.capture import (
    Captured,
    capture,
    fake_values,
    is_random,
    node_kind,
    source_line,
    written_nodes,
)


class Atoms:
    """The nodes of a captured model that are atomic subcomponents, and the constant nodes that feed them.

    Attributes:
        dynamic: nodes that depend on the inputs, draw random numbers, or touch memory that is written to. Each of them
            runs once.
        values: fake values of all nodes, under the autocast that is active now.
        inseparable: sets of names of nodes that must be in one stage.
    """

    def __init__(self, captured: Captured):
        self.captured = captured
        self.values = fake_values(captured)
        self.order = {node: i for i, node in enumerate(captured.module.graph.nodes)}
        # values of views and of in-place operations share a storage with what they are made of
        self.storages = {node: storage_ids(value) for node, value in self.values.items()}
        writes: dict[int, list[fx.Node]] = {}
        for node in captured.nodes:
            for target in written_nodes(node):
                for storage in self.storages[target]:
                    writes.setdefault(storage, []).append(node)
        self.dynamic = self._find_dynamic(writes)
        if not self.dynamic:
            raise ConfigError("nothing in the model depends on its inputs: there is nothing to cut")
        self.inseparable = self._find_inseparable(writes)

    def _find_dynamic(self, writes: Mapping[int, list[fx.Node]]) -> dict[fx.Node, None]:
        """Return the nodes that depend on the inputs, draw random numbers, or touch memory that is written to."""
        dynamic: dict[fx.Node, None] = {}
        for node in self.captured.nodes:
            read = node.all_input_nodes
            touched = self.storages[node].union(*(self.storages[one] for one in read))
            depends = any(one.op == "placeholder" or one in dynamic for one in read)
            if depends or is_random(node) or not touched.isdisjoint(writes) or written_nodes(node):
                dynamic[node] = None
        return dynamic

    def _find_inseparable(self, writes: Mapping[int, list[fx.Node]]) -> list[frozenset[str]]:
        """Return sets of names of nodes that must be in one stage."""
        sets: list[set[fx.Node]] = []
        for storage, writers in writes.items():
            last = max(self.order[node] for node in writers)
            holders = [node for node, own in self.storages.items() if storage in own]
            if any(node.op == "get_attr" for node in holders):  # a buffer, which has one stage
                sets.append({user for node in holders for user in (node, *node.users)})
                continue
            # stages get copies of values: those who read this memory must be where it is written
            old = [node for node in holders if self.order[node] < last]
            sets.append({*writers, *old, *(user for node in old for user in node.users)})
        for node in self.dynamic:
            value = self.values[node]
            if not isinstance(value, torch.Tensor):  # only its parts can be sent, so its readers stay with it
                sets.append({node, *node.users})
            if not node.users and node.all_input_nodes and all(one.op == "get_attr" for one in node.all_input_nodes):
                following = next((one for one in self.dynamic if self.order[one] > self.order[node]), None)
                sets.append({node, following or node})  # a counter stays with the operation that it counts
        named = [frozenset(node.name for node in one if node in self.dynamic) for one in sets]
        return [names for names in dict.fromkeys(named) if len(names) > 1]

    @property
    def values_by_name(self) -> dict[str, object]:
        """Fake values of all nodes, by the nodes' names."""
        return {node.name: value for node, value in self.values.items()}

    def constants(self, node: fx.Node) -> list[fx.Node]:
        """Return the constant nodes that feed a node, get_attr among them, in order."""
        found: dict[fx.Node, None] = {}
        left = list(node.all_input_nodes)
        while left:
            one = left.pop()
            if one.op != "placeholder" and one not in self.dynamic and one not in found:
                found[one] = None
                left += one.all_input_nodes
        return sorted(found, key=self.order.__getitem__)

    def reads(self, node: fx.Node) -> list[fx.Node]:
        """Return the dynamic nodes and model inputs that a node reads."""
        own = dict.fromkeys(one for one in node.all_input_nodes if one.op == "placeholder" or one in self.dynamic)
        return list(own)

    def stored(self, node: fx.Node) -> dict[str, torch.Tensor]:
        """Return the parameters, buffers and constants that feed a node, by name."""
        names = dict.fromkeys(str(one.target) for one in self.constants(node) if one.op == "get_attr")
        tensors = {name: self.captured.attributes[name] for name in names}
        return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}

    def outputs(self) -> list[fx.Node]:
        """Return the nodes and inputs whose values the model returns, each once, without constants."""
        nodes = dict.fromkeys(one for one in self.captured.outputs if isinstance(one, fx.Node))
        return [one for one in nodes if one.op == "placeholder" or one in self.dynamic]

    def graph(self, rows: int, measured: Mapping[str, Mapping[str, float]] | None = None) -> Graph:
        """Return the graph for planning, of a batch of so many rows. ``measured`` has the fields "forward", "backward",
        "kept" and others of each node, by its name."""
        nodes = []
        trained: dict[str, torch.Tensor] = {}
        for node in self.dynamic:
            value, stored = self.values[node], self.stored(node)
            parameters = {
                name: p for name, p in stored.items() if isinstance(p, torch.nn.Parameter) and p.requires_grad
            }
            trained |= parameters
            nodes.append(
                GraphNode(
                    name=node.name,
                    inputs=tuple(one.name for one in self.reads(node)),
                    nbytes=_nbytes(value),
                    parameters={name: float(tensor.nbytes) for name, tensor in parameters.items()},
                    held={name: float(t.nbytes) for name, t in stored.items() if name not in parameters},
                    kind=node_kind(node),
                    line=source_line(node),
                    differentiable=any(t.requires_grad for t in tensor_leaves(value)),
                    **(measured or {}).get(node.name, {}),  # type: ignore[arg-type]
                )
            )
        inputs = {one.name: _nbytes(self.values[one]) for one in self.order if one.op == "placeholder"}
        outputs = tuple(one.name for one in self.outputs())
        variables = tuple(
            Variable(name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in trained.items()
        )
        together = tuple(self.inseparable)
        return Graph(tuple(nodes), inputs, outputs or (nodes[-1].name,), rows, together, variables)


class CapturedBatch:
    """A model captured for a batch.

    Args:
        model: the model, in training mode or not.
        args, kwargs: arguments of a call with the batch.
        whole: names of inputs that have no rows, whatever their shapes are.

    Attributes:
        captured: the model's graph.
        atoms: its atomic subcomponents.
        flat: the flat inputs.
        whole: for each flat input, True if it has no rows.
        rows: rows of the batch.

    Raises:
        ConfigError: the model cannot be captured, ``whole`` names no input, or the batch has no rows.
    """

    def __init__(
        self, model: torch.nn.Module, args: Sequence[object], kwargs: Mapping[str, object], whole: Collection[str] = ()
    ):
        self.model = model
        self.captured = capture(model, args, kwargs)
        self.atoms = Atoms(self.captured)
        unknown = [name for name in whole if name not in self.captured.inputs]
        if unknown:
            raise ConfigError(
                f"whole= names {unknown[0]!r}, which is no input of the model: {', '.join(self.captured.inputs)}"
            )
        self.whole_names = whole
        self.whole = [name in whole for name in self.captured.inputs]
        self.flat = self.captured.flat(args, kwargs)
        self.rows = count_rows(self.flat, self.whole)

    def with_inputs(self, flat: Sequence[object]) -> "CapturedBatch":
        """Return the model captured for other flat inputs."""
        args, kwargs = pytree.tree_unflatten(list(flat), self.captured.in_spec)
        return CapturedBatch(self.model, args, kwargs, self.whole_names)

    @functools.cached_property
    def doubled_values(self) -> dict[str, object]:
        """Fake values of all nodes by name, for a batch of twice as many rows. Raise ConfigError if the model takes
        batches of this size only."""
        flat = zip(self.flat, self.whole, strict=True)
        doubled = [torch.cat([one, one]) if has_rows(one, self.rows) and not whole else one for one, whole in flat]
        return self.with_inputs(doubled).atoms.values_by_name


def tensor_leaves(value: object) -> list[torch.Tensor]:
    """Return the tensors in a value."""
    return [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]


def storage_ids(value: object) -> set[int]:
    """Return the ids of the storages of the tensors in a value. They are valid while the tensors are alive."""
    return {one.untyped_storage()._cdata for one in tensor_leaves(value)}


def _nbytes(value: object) -> float:
    """Return the bytes of the tensors in a value."""
    return float(sum(one.nbytes for one in tensor_leaves(value)))
