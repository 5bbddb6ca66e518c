"""Layout of the buffers that FSDP2 reduces, and hooks for the moments of a step that FSDP2 does not report."""

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from grace.backends.torch_distributed import TorchBackend
from grace.core.variable import Variable, unwrap_names
from grace.errors import ConfigError, ExchangeError
from grace.kernels.torch.primitives import NAMES
from grace.torch.step_hooks import initializing, within_step
from grace.torch.wrappers import unwrap_compiled

TRAINED_BEFORE = "Parameters must be frozen, and thawed (requires_grad), before Grace compresses their exchange"


class Piece(NamedTuple):
    """A parameter in the flat buffer of its module: the part that one rank of a shard group has."""

    name: str
    start: int
    shape: tuple[int, ...]

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view of this piece in the buffer, in the piece's shape."""
        return flat[self.start : self.start + math.prod(self.shape)].view(self.shape)


class ModuleLayout:
    """The parameters of one module that ``fully_shard`` was called on, or of several that it made one group of, in the
    order of its buffers. Such a group has the name of its first module."""

    def __init__(self, name: str, module: Any, names: Mapping[torch.nn.Parameter, str]):
        self.name = name
        self.module = module
        groups = fsdp_param_groups(module)
        self.params = [param for group in groups for param in group.fsdp_params]
        self.sharded_params = [param.sharded_param for param in self.params]
        self.names = [names[p] for p in self.sharded_params]
        self.mesh: Any = groups[0].mesh_info.mesh if groups else None
        policy = [group.mp_policy for group in groups]
        self.reduce_dtype = policy[0].reduce_dtype or policy[0].param_dtype if policy else None
        """Dtype of reduced gradients, and so of uncompressed wires; None for that of the parameters."""

    def check_not_replaced(self) -> None:
        """Refuse trained parameters that are other objects than those that Grace looks for in optimizers.

        Raises:
            ExchangeError: a parameter was replaced; the message names it.
        """
        for name, param, known in zip(self.names, self.params, self.sharded_params, strict=True):
            if known.requires_grad and param.sharded_param is not known:
                raise ExchangeError(
                    f"parameter {name!r} was replaced after Grace compressed its exchange, as by load_state_dict(..., "
                    "assign=True): load first and call Grace's function then, or load without assign=True"
                )

    def check_real(self, what: str) -> None:
        """Refuse trained parameters that are not floating-point numbers.

        Raises:
            ConfigError: there is one; the message names it.
        """
        for name, p in zip(self.names, self.sharded_params, strict=True):
            if p.requires_grad and not p.is_floating_point():
                raise ConfigError(
                    f"parameter {name!r} is {p.dtype}; {what} exchanges float16, bfloat16, float32 and float64. "
                    "fully_shard without it takes complex ones"
                )

    def pieces(self, flat: torch.Tensor) -> list[Piece]:
        """Return the pieces of the module's trained parameters in a reduced buffer.

        Raises:
            ExchangeError: the buffer has another size.
        """
        pieces = []
        start = 0
        for name, param in zip(self.names, self.params, strict=True):
            if param.sharded_param.requires_grad:
                pieces.append(Piece(name, start, tuple(param.sharded_size)))
                start += param.padded_sharded_param_size.numel()  # ranks' shares are padded to the same size
        if start != flat.numel():
            raise ExchangeError(
                f"module {self.name!r}: {flat.numel()} elements were reduced, and its trained parameters have {start}. "
                f"{TRAINED_BEFORE}, and set_reduce_scatter_unused_params(True) must stay"
            )
        return pieces

    def variables(self) -> list[Variable]:
        """Return the variables of the parts of the module's trained parameters that this rank has."""
        variables = []
        for name, param in zip(self.names, self.params, strict=True):
            p = param.sharded_param
            if p.requires_grad:
                dtype = NAMES[self.reduce_dtype or p.dtype]
                variables.append(Variable(name, tuple(param.sharded_size), dtype, str(p.device)))
        return variables


class ModulePasses:
    """The modules whose gradients came in a step, and the backward pass in which the last one came."""

    def __init__(self) -> None:
        self.seen: dict[str, None] = {}
        """Names of the modules, in the order in which they came."""
        self.backward = -1
        """torch's number of the backward pass; -1 if it is not known."""

    def comes_again(self, name: str) -> bool:
        """Return True if the gradients of a module that comes now belong to another step: it came in this one, in
        another backward pass."""
        now = torch._C._current_graph_task_id()
        return name in self.seen and (now == -1 or now != self.backward)

    def record(self, name: str) -> None:
        """Record that the gradients of a module come."""
        self.seen[name] = None
        self.backward = torch._C._current_graph_task_id()

    def clear(self) -> None:
        """Forget the modules: the step is over."""
        self.seen.clear()


def in_backward() -> bool:
    """Return True if a backward pass is running."""
    return torch._C._current_graph_task_id() != -1


def fsdp_param_groups(module: Any) -> list[Any]:
    """Return FSDP2's groups of a module's own parameters: none, one, or one for each mesh."""
    return list(module._get_fsdp_state()._fsdp_param_groups)


def reduce_scatter_states(layouts: Sequence[ModuleLayout]) -> list[Any]:
    """Return the states of the compressed reduce-scatters of these modules."""
    return _unique_states(
        [group._reduce_scatter_comm for layout in layouts for group in fsdp_param_groups(layout.module)]
    )


def replica_states(layouts: Sequence[ModuleLayout]) -> list[Any]:
    """Return the states of Grace's exchanges of these modules between replicas."""
    return _unique_states([group._all_reduce_hook for layout in layouts for group in fsdp_param_groups(layout.module)])


def all_gather_states(layouts: Sequence[ModuleLayout]) -> list[Any]:
    """Return the states of the compressed all-gathers of these modules."""
    return _unique_states([group._all_gather_comm for layout in layouts for group in fsdp_param_groups(layout.module)])


def check_not_compressed(
    layouts: Sequence[ModuleLayout], states_of: Callable[[Sequence[ModuleLayout]], list[Any]], what: str
) -> None:
    """Raise ConfigError if Grace compresses this exchange of one of the modules already.

    Args:
        layouts: the modules.
        states_of: returns the states of this exchange of some modules.
        what: the exchange, for messages.
    """
    for layout in layouts:
        if states_of([layout]):
            raise ConfigError(f"{what} of module {layout.name!r} are compressed already: close() their state first")


def _unique_states(callees: Sequence[object]) -> list[Any]:
    """Return the states of those callables that belong to Grace, each state once."""
    states = [getattr(callee, "grace_state", None) for callee in callees]
    return list({id(state): state for state in states if state is not None}.values())


def find_layouts(model: Any, what: str, other_axes: bool = True) -> list[ModuleLayout]:
    """Return the layouts of all modules of a model that ``fully_shard`` was called on and that have parameters of their
    own.

    Args:
        model: the model; compiled or not.
        what: the calling function, for messages.
        other_axes: True if parameters may be sharded over tensor parallelism's axis too.

    Raises:
        ConfigError: there is no such module, or Grace cannot serve one of them.
    """
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ConfigError(f"{what} needs torch 2.13 or newer, and this is {torch.__version__}")
    model = unwrap_compiled(model)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{what} needs the model itself, not {type(model).__name__}")
    modules = [
        (name or "the model", module) for name, module in model.named_modules() if isinstance(module, FSDPModule)
    ]
    for _, module in modules:
        module.reshard()  # an evaluation leaves the root's gathered parameters in place
    pairs = list(model.named_parameters())
    named = unwrap_names([name for name, _ in pairs])
    names = {p: name for name, (_, p) in zip(named, pairs, strict=True)}
    if not modules:
        raise ConfigError(
            f"{what} needs a model that fully_shard was called on, and {type(model).__name__} has no such module:"
            " call fully_shard(model, mesh=mesh['shard']) first; whole models are for "
            "grace.DistributedOptimizer and grace.torch.register_ddp_hook"
        )
    for name, module in modules:
        groups = fsdp_param_groups(module)
        if len(groups) > 1:
            raise ConfigError(
                f"module {name!r} has parameters with {len(groups)} meshes, which {what} cannot tell apart"
            )
        for param in (param for group in groups for param in group.fsdp_params):
            _check_sharding(
                names[param.sharded_param], param.sharded_param, type(groups[0].mesh_info).__name__, what, other_axes
            )
    firsts: dict[int, tuple[str, Any]] = {}
    for name, module in modules:  # fully_shard([a, b]) makes one group of several modules, which all have its state
        firsts.setdefault(id(module._get_fsdp_state()), (name, module))
    layouts = [ModuleLayout(name, module, names) for name, module in firsts.values()]
    layouts = [layout for layout in layouts if layout.params]
    if not layouts:
        raise ConfigError(f"{what}: {type(model).__name__} has no parameters")
    first = layouts[0]
    for layout in layouts[1:]:
        if layout.mesh.mesh.tolist() != first.mesh.mesh.tolist():
            raise ConfigError(
                f"modules {first.name!r} and {layout.name!r} are sharded over different ranks, "
                f"{first.mesh.mesh.tolist()} and {layout.mesh.mesh.tolist()}: {what} needs one mesh for all"
            )
    return layouts


class ShardGroup:
    """The ranks that hold one copy of a model: those of ``fully_shard``'s axis, and of tensor parallelism's.

    Attributes:
        layouts: the layouts of the model's modules.
        modules: the module that shards each parameter, by the parameter's name.
        ranks: the numbers of these ranks in the run.
        label: label, in saved states, of the parts of parameters that this rank has.
        backends: backends over these ranks, one for each axis; none before :meth:`connect`.
    """

    def __init__(self, layouts: Sequence[ModuleLayout]):
        meshes = [param.sharded_param.device_mesh for layout in layouts for param in layout.params]
        self.layouts = layouts
        self.modules = {name: layout.module for layout in layouts for name in layout.names}
        self.mesh = max(meshes, key=lambda mesh: mesh.ndim)
        self.ranks: list[int] = self.mesh.mesh.flatten().tolist()
        self.label = f"shard_{self.ranks.index(torch.distributed.get_rank())}_of_{len(self.ranks)}"
        self.backends: list[TorchBackend] = []

    def meet_replicas(self, ranks: Sequence[int], given: str) -> None:
        """Check the ranks that hold the same parts of other copies. Connect the watches of all ranks, so that each
        rank learns how all others end and where they wait, even ranks that it exchanges nothing with.

        Args:
            ranks: their numbers, and this rank's.
            given: the argument that gave them, for messages.

        Raises:
            ConfigError: some of them share a copy.
        """
        both = sorted(set(self.ranks) & set(ranks))
        if len(both) != 1:
            raise ConfigError(
                f"the ranks {both} share a copy of the model, and are replicas of each other by {given}: it must be "
                "the replicate axis, across which ranks hold the same part of the model, and not the one given to "
                "fully_shard"
            )
        all_ranks = TorchBackend()
        if len(ranks) * len(self.ranks) == all_ranks.size:
            # the watches connect when ranks first meet, so a meeting without work is enough
            with all_ranks.checked_operation("the ranks of a sharded model"):
                pass

    def connect(self) -> None:
        """Make the backends. Every rank must call it."""
        self.backends = [TorchBackend(group).duplicate() for group in self.mesh.get_all_groups()]

    def sum(self, tensor: torch.Tensor, place: str) -> torch.Tensor:
        """Return the sum of a tensor over these ranks; the tensor is overwritten. Every rank must call it.

        Args:
            tensor: the tensor.
            place: description of the sum, for ranks that wait.
        """
        for backend in self.backends:
            with backend.waiting_for_ranks(lambda: place):
                tensor = backend.allreduce(tensor).wait()
        return tensor

    def any(self, flag: bool, place: str) -> bool:
        """Return True if the flag of one of these ranks is True. Every rank must call it."""
        return bool(self.sum(torch.full((1,), float(flag), device=self.mesh.device_type), place))


def _check_sharding(name: str, p: Any, mesh_info: str, what: str, other_axes: bool) -> None:
    """Refuse a parameter that is not sharded by exactly one axis of ``fully_shard``."""
    if p.is_meta:
        raise ConfigError(f"parameter {name!r} has no values yet (device meta): call model.to_empty(...) first")
    mesh = p.device_mesh
    if mesh_info != "FSDPMeshInfo":
        axes = mesh.mesh_dim_names or ("replicate", "shard")
        raise ConfigError(
            f"parameter {name!r}: fully_shard was given a mesh with a replicate axis ({', '.join(axes)}), over which "
            "torch averages by itself, uncompressed. Give it the other axis alone, fully_shard(module, "
            f"mesh=mesh[{axes[-1]!r}]), and the replicate axis to Grace: register_fsdp_hook(model, mesh[{axes[0]!r}]), "
            f"or with outer= process_group=mesh.get_group({axes[0]!r})"
        )
    if mesh.ndim > 1 and not other_axes:
        raise ConfigError(
            f"parameter {name!r} is sharded over {mesh.ndim} axes ({', '.join(map(str, p.placements))}), as tensor "
            f"parallelism beside fully_shard makes them, which {what} cannot; register_fsdp_hook compresses what "
            "replicas of such models exchange"
        )


_SUBSCRIBERS: dict[int, tuple[weakref.ref[Any], set[int]]] = {}
"""Subscribers to steps and the ids of their parameters, by number."""
_NUMBERS = itertools.count()


def subscribe_to_steps(subscriber: Any, parameters: Iterable[torch.nn.Parameter]) -> Callable[[], object]:
    """Call ``subscriber.before_step(optimizer)`` before each step of an optimizer that holds one of the parameters, and
    ``subscriber.after_step(optimizer)`` after it, as long as the subscriber lives.

    Returns:
        a function that ends the subscription.
    """
    number = next(_NUMBERS)
    if number == 0:  # one global hook, never removed: torch's dict of hooks must not change while it is iterated
        register_optimizer_step_pre_hook(torch.compiler.disable(_call_before_step))
        register_optimizer_step_post_hook(torch.compiler.disable(_call_after_step))
    _SUBSCRIBERS[number] = weakref.ref(subscriber), {id(p) for p in parameters}
    return functools.partial(_SUBSCRIBERS.pop, number, None)


def _call_before_step(optimizer: torch.optim.Optimizer, *ignored: object) -> None:
    """Call ``before_step`` of an optimizer's subscribers."""
    for subscriber in _subscribers_of(optimizer):
        subscriber.before_step(optimizer)


def _call_after_step(optimizer: torch.optim.Optimizer, *ignored: object) -> None:
    """Call ``after_step`` of an optimizer's subscribers."""
    for subscriber in _subscribers_of(optimizer):
        subscriber.after_step(optimizer)


def _subscribers_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the subscribers to parameters of an optimizer; none at an inner level of its ``step()``, and none if that
    only makes the optimizer's state."""
    if within_step({id(optimizer)}) or initializing():
        return []
    subscribers = []
    for number, (subscriber, held) in list(_SUBSCRIBERS.items()):
        alive = subscriber()
        if alive is None:
            _SUBSCRIBERS.pop(number, None)
        elif any(id(p) in held for group in optimizer.param_groups for p in group["params"]):
            subscribers.append(alive)
    return subscribers
