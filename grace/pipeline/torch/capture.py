"""Capture of an unmodified model as a graph of operations, by ``torch.export``, under the whole model's names."""

import contextlib
import operator
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import Argument
from torch.utils import _pytree as pytree

from grace.errors import ConfigError
from grace.pipeline.torch.autograd_functions import CarriedFunctions, check_hooks, is_user_code

OLDEST_TORCH = "2.13"
"""The oldest torch that pipelines were tested with; with 2.6 some had wrong gradients."""
UNDECLARED_WRITES: dict[OpOverload, tuple[int, tuple[int, ...]]] = {
    torch.ops.aten.batch_norm.default: (5, (3, 4)),
    torch.ops.aten.instance_norm.default: (5, (3, 4)),
}
"""Operations that write to arguments without declaring it in their schemas: the position of the flag that makes them
write, and the positions of these arguments."""
BlockContext = Callable[..., contextlib.AbstractContextManager[object]]
ContextOf = Callable[[fx.Node], contextlib.AbstractContextManager[object]]
BLOCKS: dict[HigherOrderOperator, tuple[BlockContext, int]] = {
    wrap_with_set_grad_enabled: (torch.set_grad_enabled, 1),
    wrap_with_autocast: (torch.autocast, 4),
}
"""Context, and number of its arguments, for each operation that ``torch.export`` makes of a block."""


@dataclass
class Captured:
    """A model's graph for inputs of certain shapes.

    Attributes:
        module: the graph. Parameters and buffers are ``get_attr`` nodes under their names in the model, inputs are
            placeholders.
        attributes: targets of the ``get_attr`` nodes, by name: the model's own tensors, and constants of the graph.
        inputs: names of the placeholders, in the order of the flat inputs.
        in_spec: the structure of ``(args, kwargs)``, of the flat inputs.
        out_spec: the structure of the model's output, of the flat outputs.
        outputs: the graph's flat outputs: nodes, or plain values.
    """

    module: fx.GraphModule
    attributes: dict[str, object]
    inputs: tuple[str, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    outputs: tuple[Argument, ...]

    @property
    def nodes(self) -> list[fx.Node]:
        """The operations, in order."""
        return [node for node in self.module.graph.nodes if node.op == "call_function"]

    def flat(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[object]:
        """Return the inputs of a call in the order of the graph's placeholders. Refuse arguments of another structure
        than those that the model was captured with."""
        spec = self.in_spec
        # a call may give keywords in another order than the example
        ordered = {name: kwargs[name] for name in spec.child(1).context if name in kwargs}
        flat, flat_spec = pytree.tree_flatten((tuple(args), ordered))
        if flat_spec != spec or len(ordered) != len(kwargs):
            raise ConfigError(
                f"the model was cut for {spec.child(0).num_children} arguments and "
                f"{sorted(spec.child(1).context) or 'no keywords'}, and is called with {len(args)} arguments and "
                f"{sorted(kwargs) or 'no keywords'}: call it as in example_inputs"
            )
        return flat


def capture(model: torch.nn.Module, args: Sequence[object], kwargs: Mapping[str, object] | None = None) -> Captured:
    """Return the graph of a model as it is (in training mode, or not), for inputs of these shapes and dtypes.

    Args:
        model: any module; it is not changed, and may be on ``meta``.
        args, kwargs: example arguments. Values that are not tensors become constants of the graph.

    Raises:
        ConfigError: torch is older than 2.13, ``torch.export`` cannot take the model, or the model has hooks that
            change gradients; the message names the line of the model, or the module.

    >>> found = capture(torch.nn.Linear(2, 3), (torch.ones(4, 2),))
    >>> sorted(found.attributes), [node.name for node in found.nodes]
    (['bias', 'weight'], ['linear'])
    """
    if torch.__version__ < OLDEST_TORCH:  # compared as versions, not as text
        raise ConfigError(
            f"a pipeline needs torch {OLDEST_TORCH} or newer, and this is {torch.__version__}: the "
            "torch.export of older releases may lose torch.no_grad(), so that stages would train with another gradient"
        )
    check_hooks(model)
    kwargs = dict(kwargs or {})
    functions = CarriedFunctions()
    try:
        with torch.enable_grad(), _fake_meta_tensors(model, args, kwargs) as (given, named), functions.capturing():
            # strict=False runs the model's own Python, in which functions.capturing() sees autograd Functions
            program = torch.export.export(model, given, named, strict=False)
    except ConfigError:  # raised in the model by functions.capturing(); it names the line already
        raise
    except Exception as error:
        raise ConfigError(_export_error(model, error)) from error
    # Guards would be a node that calls a submodule, and belongs to no stage.
    module = program.module(check_guards=False)
    functions.insert_into(module)
    _inline_blocks(module)
    graph = module.graph
    for node in graph.nodes:
        if getattr(node.target, "__module__", "") == "torch._functorch.predispatch":
            raise ConfigError(
                f"the model calls torch.vmap or torch.func at {source_line(node)}, whose operations cannot be cut "
                "apart: write that line in operations on whole batches"
            )
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    names = first_names(model)
    attributes: dict[str, object] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr":
            if not node.users:  # forward does not read this parameter
                graph.erase_node(node)
            elif node.target in names:
                node.target = names[node.target]
                attributes[node.target] = tensors[node.target]
            else:  # a constant of the graph
                attributes[node.target] = operator.attrgetter(node.target)(module)
    _move_buffer_writes(graph)
    output = next(node for node in graph.nodes if node.op == "output")
    placeholders = tuple(node.name for node in graph.nodes if node.op == "placeholder")
    flat = tuple(pytree.arg_tree_leaves(output.args[0]))
    return Captured(module, attributes, placeholders, module._in_spec, module._out_spec, flat)  # type: ignore[arg-type]


@contextlib.contextmanager
def training_mode(model: torch.nn.Module) -> Iterator[None]:
    """Return a context in which a model is in training mode, as a whole if it evaluates. In a model that trains some
    modules may evaluate, such as frozen batch norms; they stay as they are."""
    modes = [(module, module.training) for module in model.modules()]
    if not model.training:
        model.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def modes_of(model: torch.nn.Module) -> tuple[bool, ...]:
    """Return for each module of a model True if it is in training mode."""
    return tuple(module.training for module in model.modules())


class WithinBlock:
    """An operation that runs in the context of a block of the model, which ``context`` makes of ``arguments``."""

    def __init__(self, operation: Callable[..., object], context: BlockContext, arguments: tuple[object, ...]):
        self.operation = operation
        self.context = context
        self.arguments = arguments
        self.__name__ = self.__qualname__ = str(getattr(operation, "__name__", operation))
        self.__module__ = __name__

    def __call__(self, *args: object, **kwargs: object) -> object:
        with self.context(*self.arguments):
            return self.operation(*args, **kwargs)

    def __str__(self) -> str:
        return f"{self.operation} in {self.context.__name__}{self.arguments}"


def unwrap_operation(node: fx.Node) -> object:
    """Return the operation that a node calls, without the contexts of blocks."""
    operation: object = node.target
    while isinstance(operation, WithinBlock):
        operation = operation.operation
    return operation


def _inline_blocks(module: fx.GraphModule) -> None:
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
        _inline_blocks(block)  # blocks may be nested
        new: dict[fx.Node, fx.Node] = {}
        outputs: Sequence[fx.Node] = ()
        with graph.inserting_before(node):
            for one in block.graph.nodes:
                if one.op == "placeholder":
                    new[one] = next(block_inputs)
                elif one.op == "output":
                    outputs = fx.map_arg(one.args[0], new.__getitem__)
                else:
                    new[one] = graph.node_copy(one, new.__getitem__)
                    if one.op == "get_attr":  # an attribute of the block's module, which is a part of the whole one
                        new[one].target = f"{inner.target}.{one.target}"
                    elif one.target is not operator.getitem:  # which no context changes
                        new[one].target = WithinBlock(one.target, context, arguments)
        for user in list(node.users):  # each reads one of the block's outputs
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)


def first_names(model: torch.nn.Module) -> dict[str, str]:
    """Return the first name of each parameter and buffer, for each of its names. A tied tensor has several; state dicts
    and optimizers use the first."""
    first = {id(tensor): name for name, tensor in [*model.named_buffers(), *model.named_parameters()]}
    every = [*model.named_buffers(remove_duplicate=False), *model.named_parameters(remove_duplicate=False)]
    return {name: first[id(tensor)] for name, tensor in every}


def split_call(example: object) -> tuple[tuple[object, ...], Mapping[str, object]]:
    """Return (args, kwargs) of example inputs: one tensor, a tuple of arguments, or ``(args, kwargs)``.

    >>> split_call(1), split_call((1, 2)), split_call(((1,), {"mask": 2}))
    (((1,), {}), ((1, 2), {}), ((1,), {'mask': 2}))
    """
    if (
        isinstance(example, tuple)
        and len(example) == 2
        and isinstance(example[0], tuple)
        and isinstance(example[1], dict)
    ):
        return example[0], example[1]
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}


def check_plain_model(model: torch.nn.Module) -> None:
    """Raise ConfigError for objects that are not torch modules, sharded parameters, and DistributedDataParallel."""
    if not isinstance(model, torch.nn.Module):
        kind = f"{type(model).__module__.partition('.')[0]}'s {type(model).__name__}"
        raise ConfigError(
            f"a pipeline is cut out of a torch module, not out of {kind}: stages run on torch.distributed.pipelining, "
            "and TensorFlow and Keras have nothing like it; there grace.DistributedOptimizer exchanges whole models'"
        )
    for name, p in model.named_parameters():
        if type(p) not in (torch.nn.Parameter, torch.Tensor) and not type(p).__module__.startswith("torch.nn.param"):
            raise ConfigError(
                f"the parameter {name!r} is a {type(p).__name__}: sharded parameters (ZeRO, FSDP, tensor parallelism) "
                "inside stages are not supported; give the plain model, whose stages the pipeline shares out"
            )
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise ConfigError(
            "give the model itself, and not DistributedDataParallel: the pipeline has replicas of its own"
        )


@contextlib.contextmanager
def _fake_meta_tensors(
    model: torch.nn.Module, args: Sequence[object], kwargs: dict[str, object]
) -> Iterator[tuple[tuple[object, ...], dict[str, object]]]:
    """Return a context that gives the inputs. In it, a model on ``meta`` has fake tensors on the inputs' device."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if not any(tensor.is_meta for tensor in tensors.values()):
        yield tuple(args), kwargs
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given, named = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (tuple(args), kwargs))
    device = first_device(pytree.tree_leaves((args, kwargs)))
    with mode:
        fakes = {name: allocate_like(tensor, device) for name, tensor in tensors.items()}
    with torch.nn.utils.stateless._reparametrize_module(model, fakes, tie_weights=True), mode:
        yield given, named


def first_device(values: Sequence[object]) -> torch.device:
    """Return the device of the first tensor; the CPU if there is no tensor."""
    return next((one.device for one in values if isinstance(one, torch.Tensor)), torch.device("cpu"))


def allocate_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor like one on ``meta``, on a device."""
    fresh = torch.empty_like(tensor, device=device if tensor.is_meta else None)
    return torch.nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else fresh


def _move_buffer_writes(graph: fx.Graph) -> None:
    """Move each write of a buffer, which ``torch.export`` puts at the end of the graph, to the buffer's last reader.
    Remove the write if the buffer was changed in place already."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten.copy_.default and not node.users:
            buffer, source = node.args
            if buffer.op != "get_attr" or not isinstance(source, fx.Node):  # a copy_ of the model's own
                continue
            if buffer in written_nodes(source):
                graph.erase_node(node)
            else:
                readers = [user for user in buffer.users if user is not node]
                max((source, *readers), key=order.__getitem__).append(node)


def _export_error(model: torch.nn.Module, error: Exception) -> str:
    """Return the message for an error of ``torch.export``, with the line of the model."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_code(frame.filename)]
    where = ""
    if frames:
        where = f' at {frames[-1].filename}:{frames[-1].lineno} ("{frames[-1].line}")'
    else:
        own = _user_lines(str(error))
        where = f" at {own[-1][0]}:{own[-1][1]}" if own else ""
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if "constant's list" in reason:  # torch's message does not name the operations that it missed
        reason = "it reads a value behind autograd's back (tensor.data, torch.autograd.grad): tensor.detach() is taken"
    return (
        f"torch.export cannot take {type(model).__name__}{where}: {reason}. Write that line without Python that looks "
        "at tensors' values (torch.where, torch.cond), or leave the part out of the pipelined model"
    )


def source_line(node: fx.Node) -> str:
    """Return the line of the user's model that a node comes from, as "file:line"; "" if it is not known."""
    own = _user_lines(node.meta.get("stack_trace") or "")
    return f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""


def _user_lines(trace: str) -> list[tuple[str, str]]:
    """Return the files and lines of user code in a printed stack trace."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', trace)
    return [(file, line) for file, line in lines if is_user_code(file)]


def node_kind(node: fx.Node) -> str:
    """Return a node's kind: the class of the torch.nn module that it belongs to, or else the operation.

    >>> [node_kind(node) for node in capture(torch.nn.Linear(2, 3), (torch.ones(4, 2),)).nodes]
    ['Linear']
    """
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if stack and str(stack[-1][1]).startswith("torch.nn."):
        return str(stack[-1][1]).rsplit(".", 1)[-1]
    target = unwrap_operation(node)
    return str(getattr(target, "__name__", target)).removesuffix(".default")


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose values a node writes to."""
    operation = unwrap_operation(node)
    if operation in UNDECLARED_WRITES:
        flag, positions = UNDECLARED_WRITES[operation]
        return [node.args[i] for i in positions if node.args[flag] and isinstance(node.args[i], fx.Node)]  # type: ignore
    schema = getattr(operation, "_schema", None)
    if schema is None:
        return []
    nodes: list[fx.Node] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            nodes += [one for one in pytree.tree_leaves(value) if isinstance(one, fx.Node)]
    return nodes


def is_random(node: fx.Node) -> bool:
    """Return True if a node draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(unwrap_operation(node), "tags", ())


class _FakeInterpreter(fx.Interpreter):
    """Interpreter that runs a captured graph on fake tensors."""

    def __init__(
        self,
        captured: Captured,
        mode: FakeTensorMode,
        context_of: ContextOf,
        on_value: Callable[[fx.Node, object], None],
    ):
        super().__init__(captured.module)
        self.garbage_collect_values = False  # all values are the result
        self.attributes = captured.attributes
        self.mode = mode
        self.context_of = context_of
        self.on_value = on_value
        self.converted: dict[int, torch.Tensor] = {}
        """Fake tensors by the ids of real ones, so that the names of a tied tensor share a storage."""
        self.device = torch.device("cpu")

    def fetch_attr(self, target: str) -> object:
        """Return a parameter, buffer or constant as a fake tensor."""
        value = self.attributes[target]
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self.converted:
            if value.is_meta:
                self.converted[id(value)] = allocate_like(value, self.device)
            else:
                self.converted[id(value)] = self.mode.from_tensor(value, static_shapes=True)
        return self.converted[id(value)]

    def run_node(self, n: fx.Node) -> object:
        """Run a node in its context, and report its value."""
        if n.op == "output":
            return None
        with self.context_of(n) if n.op == "call_function" else contextlib.nullcontext():
            value = super().run_node(n)
        self.on_value(n, value)
        return value


def fake_values(
    captured: Captured,
    context_of: ContextOf = lambda node: contextlib.nullcontext(),
    on_value: Callable[[fx.Node, object], None] = lambda node, value: None,
) -> dict[fx.Node, object]:
    """Return a fake tensor of each node's value: shapes, dtypes, storages, and ``requires_grad``, under the active
    autocast. A node's operation runs in ``context_of(node)``, and ``on_value`` is called with the node and its value.
    """
    flat = [node.meta.get("val") for node in captured.module.graph.nodes if node.op == "placeholder"]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad(), torch.random.fork_rng([]):
        # the graph's example inputs are fake tensors of torch.export's mode, and two modes do not mix
        own = [
            torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)
            if isinstance(one, torch.Tensor)
            else one
            for one in flat
        ]
        interpreter = _FakeInterpreter(captured, mode, context_of, on_value)
        interpreter.device = first_device(own)
        interpreter.run(*own, enable_io_processing=False)  # the inputs are flat already
        return interpreter.env
