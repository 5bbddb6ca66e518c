"""An unmodified model as a graph of operations, by ``torch.export``, under the whole model's names."""

import contextlib
import operator
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from grace.errors import ConfigError
from grace.torch.pipeline.contexts import inline_blocks, operation_of
from grace.torch.pipeline.own_backward import CarriedFunctions, check_hooks, is_users

WRITES_UNSAID: dict[Any, tuple[int, tuple[int, ...]]] = {
    torch.ops.aten.batch_norm.default: (5, (3, 4)),
    torch.ops.aten.instance_norm.default: (5, (3, 4)),
}
"""Operations that write to arguments and whose schemas do not say so: where the flag stands under which they do, and
which arguments these are."""


@dataclass
class Captured:
    """A model's graph for inputs of certain shapes.

    Attributes:
        module: parameters and buffers are ``get_attr`` nodes under their names in the model, inputs placeholders.
        attributes: what ``get_attr`` nodes refer to, by name: the model's own tensors, and constants of the graph.
        inputs: names of the placeholders, in the order of the flat inputs.
        in_spec: how ``(args, kwargs)`` are made of the flat inputs.
        out_spec: how what the model returns is made of the flat outputs.
        outputs: the graph's flat outputs: nodes, or plain values.
    """

    module: fx.GraphModule
    attributes: dict[str, Any]
    inputs: tuple[str, ...]
    in_spec: Any
    out_spec: Any
    outputs: tuple[Any, ...]

    @property
    def nodes(self) -> list[fx.Node]:
        """The operations, in order."""
        return [node for node in self.module.graph.nodes if node.op == "call_function"]

    def flat(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The inputs of a call as the graph takes them.

        Raises:
            ConfigError: they are not those that the model was captured with.
        """
        spec = self.in_spec
        names = spec.child(1).context if hasattr(spec, "child") else spec.children_specs[1].context
        given = {name: kwargs[name] for name in names if name in kwargs}
        flat, found = pytree.tree_flatten((tuple(args), given))
        if found != spec or len(given) != len(kwargs):
            raise ConfigError(
                f"the model was cut for {_words(spec)}, and is called with {len(args)} arguments and "
                f"{sorted(kwargs) or 'no keywords'}: call it as in example_inputs"
            )
        return flat


def _words(spec: Any) -> str:
    args, kwargs = (spec.child(0), spec.child(1)) if hasattr(spec, "child") else spec.children_specs
    return f"{args.num_children} arguments and {sorted(kwargs.context) or 'no keywords'}"


def capture(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Captured:
    """The graph of a model as it is (in training mode, or not), for inputs of these shapes and dtypes.

    Args:
        model: any module; it is not changed, and may be on ``meta``.
        args, kwargs: what it is called with. What is no tensor is a constant of the graph.

    Raises:
        ConfigError: ``torch.export`` cannot take it, or it has hooks that change gradients; the message names the line
            of the model, or the module.

    >>> found = capture(torch.nn.Linear(2, 3), (torch.ones(4, 2),))
    >>> sorted(found.attributes), [node.name for node in found.nodes]
    (['bias', 'weight'], ['linear'])
    """
    check_hooks(model)
    kwargs, functions = dict(kwargs or {}), CarriedFunctions()
    try:
        with torch.enable_grad(), _with_values(model, args, kwargs) as (given, named), functions.capturing():
            program = torch.export.export(model, given, named, strict=False)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(_cannot(model, error)) from error
    module: Any = program.module(check_guards=False)
    functions.put_into(module)
    inline_blocks(module)
    graph = module.graph
    for node in graph.nodes:
        if getattr(node.target, "__module__", "") == "torch._functorch.predispatch":
            raise ConfigError(
                f"the model calls torch.vmap or torch.func at {line_of(node)}, whose operations cannot be cut apart: "
                "write that line in operations on whole batches"
            )
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    every = {
        **dict(model.named_buffers(remove_duplicate=False)),
        **dict(model.named_parameters(remove_duplicate=False)),
    }
    attributes: dict[str, Any] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr":
            if not node.users:
                graph.erase_node(node)
                continue
            found = every.get(node.target)
            name = node.target if found is None else first[id(found)]
            attributes[name] = operator.attrgetter(node.target)(module) if found is None else found
            node.target = name
    _settle_copies(graph)
    output = next(node for node in graph.nodes if node.op == "output")
    placeholders = tuple(node.name for node in graph.nodes if node.op == "placeholder")
    flat = tuple(pytree.arg_tree_leaves(output.args[0]))
    return Captured(module, attributes, placeholders, module._in_spec, module._out_spec, flat)


def call_of(example: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """(args, kwargs) of example inputs: one tensor, a tuple of arguments, or ``(args, kwargs)``.

    >>> call_of(1), call_of((1, 2)), call_of(((1,), {"mask": 2}))
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


def check_plain(model: torch.nn.Module) -> None:
    """Refuse what is no torch module, sharded parameters, and DistributedDataParallel.

    Raises:
        ConfigError: it is or has such.
    """
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
def _with_values(model: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The inputs; and a model on ``meta`` has fake tensors meanwhile, which are on the inputs' device."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if not any(tensor.is_meta for tensor in tensors.values()):
        yield tuple(args), kwargs
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given, named = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (tuple(args), kwargs))
    device = device_of(pytree.tree_leaves((args, kwargs)))
    with mode:
        fakes = {name: _unfilled(tensor, device) for name, tensor in tensors.items()}
    with torch.nn.utils.stateless._reparametrize_module(model, fakes, tie_weights=True), mode:
        yield given, named


def device_of(values: Sequence[Any]) -> torch.device:
    """Of the first tensor; the processor's if there is none."""
    return next((one.device for one in values if isinstance(one, torch.Tensor)), torch.device("cpu"))


def _unfilled(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor like one on ``meta``, on a device."""
    fresh = torch.empty_like(tensor, device=device if tensor.is_meta else None)
    return torch.nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else fresh


def _settle_copies(graph: fx.Graph) -> None:
    """``torch.export`` writes buffers at the end of the graph: do so where their last reader is, and not again where
    they were changed in place."""
    places = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten.copy_.default and not node.users:
            buffer, source = node.args
            if buffer.op != "get_attr" or not isinstance(source, fx.Node):
                continue
            if buffer in written(source):
                graph.erase_node(node)
            else:
                max((source, *(user for user in buffer.users if user is not node)), key=places.__getitem__).append(node)


def _cannot(model: torch.nn.Module, error: Exception) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    where = ""
    if frames:
        where = f' at {frames[-1].filename}:{frames[-1].lineno} ("{frames[-1].line}")'
    elif found := re.findall(r'File "([^"]+)", line (\d+)', str(error)):
        own = [place for place in found if is_users(place[0])]
        where = f" at {own[-1][0]}:{own[-1][1]}" if own else ""
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if "constant's list" in reason:  # torch's words do not say which operations it did not see
        reason = "it reads a value behind autograd's back (tensor.data, torch.autograd.grad): tensor.detach() is taken"
    return (
        f"torch.export cannot take {type(model).__name__}{where}: {reason}. Write that line without Python that looks "
        "at tensors' values (torch.where, torch.cond), or leave the part out of the pipelined model"
    )


def line_of(node: fx.Node) -> str:
    """Where in the user's model a node comes from, as "file:line"; "" if that is not known."""
    places = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [f"{Path(file).name}:{line}" for file, line in places if is_users(file)]
    return own[-1] if own else ""


def kind_of(node: fx.Node) -> str:
    """What it is: the class of the torch.nn module that it belongs to, or else the operation.

    >>> [kind_of(node) for node in capture(torch.nn.Linear(2, 3), (torch.ones(4, 2),)).nodes]
    ['Linear']
    """
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if stack and str(stack[-1][1]).startswith("torch.nn."):
        return str(stack[-1][1]).rsplit(".", 1)[-1]
    target = operation_of(node)
    return str(getattr(target, "__name__", target)).removesuffix(".default")


def written(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values a node writes to."""
    operation = operation_of(node)
    if operation in WRITES_UNSAID:
        flag, places = WRITES_UNSAID[operation]
        return [node.args[i] for i in places if node.args[flag] and isinstance(node.args[i], fx.Node)]  # type: ignore
    schema = getattr(operation, "_schema", None)
    if schema is None:
        return []
    found: list[fx.Node] = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            found += [one for one in pytree.tree_leaves(given) if isinstance(one, fx.Node)]
    return found


def is_random(node: fx.Node) -> bool:
    """Whether it draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(operation_of(node), "tags", ())


class _Values(fx.Interpreter):
    def __init__(self, captured: Captured, mode: FakeTensorMode, around: Any, given: Any):
        super().__init__(captured.module)
        self.garbage_collect_values = False
        self.attributes, self.mode, self.around, self.given = captured.attributes, mode, around, given
        self.converted: dict[int, Any] = {}
        self.device = torch.device("cpu")

    def fetch_attr(self, target: str) -> Any:
        value = self.attributes[target]
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self.converted:
            if value.is_meta:
                self.converted[id(value)] = _unfilled(value, self.device)
            else:
                self.converted[id(value)] = self.mode.from_tensor(value, static_shapes=True)
        return self.converted[id(value)]

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            return None
        if n.op != "call_function":
            value = self.fetch_attr(str(n.target)) if n.op == "get_attr" else super().run_node(n)
            self.given(n, value)
            return value
        with self.around(n):
            value = super().run_node(n)
        self.given(n, value)
        return value


def values(
    captured: Captured,
    flat: Sequence[Any] | None = None,
    around: Callable[[fx.Node], Any] = lambda node: contextlib.nullcontext(),
    given: Callable[[fx.Node, Any], None] = lambda node, value: None,
) -> dict[fx.Node, Any]:
    """Fake tensors of each node's value: shapes, dtypes, storages, and whether gradients come back; under
    the autocast that is on.

    Args:
        captured: the graph.
        flat: the inputs, which may be on ``meta``; those that the model was captured with if left out.
        around: gives a context in which an operation is run.
        given: is told each node and its fake value, when that is there.
    """
    if flat is None:
        flat = [node.meta.get("val") for node in captured.module.graph.nodes if node.op == "placeholder"]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad(), _same_random_numbers():
        fresh = lambda one: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)  # noqa: E731
        own = [fresh(one) if isinstance(one, torch.Tensor) else one for one in flat]
        interpreter = _Values(captured, mode, around, given)
        interpreter.device = device_of(own)
        interpreter.run(*own, enable_io_processing=False)
        return interpreter.env


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """What is run here draws from no generator of the user's."""
    with torch.random.fork_rng(devices=[]):
        yield
