"""Blocks of a model under ``torch.no_grad()`` or ``torch.autocast(...)``, whose operations become nodes of the
graph."""

import operator
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled

BLOCKS: dict[Any, tuple[Any, int]] = {
    wrap_with_set_grad_enabled: (torch.set_grad_enabled, 1),
    wrap_with_autocast: (torch.autocast, 4),
}
"""Context, and number of its arguments, for each operation that ``torch.export`` makes of a block."""


class WithinBlock:
    """An operation that runs in the context of a block of the model.

    Args:
        operation: the operation to call.
        context: a function that makes the context.
        arguments: the arguments of ``context``.
    """

    def __init__(self, operation: Any, context: Any, arguments: tuple[Any, ...]):
        self.operation = operation
        self.context = context
        self.arguments = arguments
        self.__name__ = self.__qualname__ = str(getattr(operation, "__name__", operation))
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.context(*self.arguments):
            return self.operation(*args, **kwargs)

    def __str__(self) -> str:
        return f"{self.operation} in {self.context.__name__}{self.arguments}"


def unwrap_operation(node: fx.Node) -> Any:
    """Return the operation that a node calls, without the contexts of blocks."""
    operation: Any = node.target
    while isinstance(operation, WithinBlock):
        operation = operation.operation
    return operation


def inline_blocks(module: fx.GraphModule) -> None:
    """Replace each node of a block by the operations of its graph. ``torch.export`` makes one node with a graph of its
    own of a block."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target not in BLOCKS:
            continue
        context, count = BLOCKS[node.target]
        arguments = node.args[:count]
        inner = node.args[count]
        block_inputs = iter(node.args[count + 1 :])
        block = operator.attrgetter(inner.target)(module)
        inline_blocks(block)
        new: dict[fx.Node, Any] = {}
        outputs: Any = ()
        with graph.inserting_before(node):
            for one in block.graph.nodes:
                if one.op == "placeholder":
                    new[one] = next(block_inputs)
                elif one.op == "output":
                    outputs = fx.map_arg(one.args[0], new.__getitem__)
                else:
                    new[one] = graph.node_copy(one, new.__getitem__)
                    if one.op == "get_attr":
                        new[one].target = f"{inner.target}.{one.target}"
                    elif one.target is not operator.getitem:
                        new[one].target = WithinBlock(one.target, context, arguments)
        for user in list(node.users):  # each reads one of the block's outputs
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
