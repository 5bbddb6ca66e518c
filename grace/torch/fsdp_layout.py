"""What lies where in the buffers that FSDP2 reduces, and the moments of a step that it does not tell."""

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from grace.backends.torch_distributed import TorchBackend
from grace.core.variable import Variable, unwrap_names
from grace.errors import ConfigError, ExchangeError
from grace.kernels.torch.primitives import NAMES
from grace.torch.step_hooks import within_step
from grace.torch.wrappers import bare


class Piece(NamedTuple):
    """A parameter in the flat buffer of its module, as one rank of a shard group has it."""

    name: str
    start: int
    shape: tuple[int, ...]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Its part of the buffer: a view."""
        return flat[self.start : self.start + math.prod(self.shape)].view(self.shape)


class ModuleLayout:
    """The parameters of one module that ``fully_shard`` was called on, in the order of its buffers."""

    def __init__(self, name: str, module: Any, names: Mapping[Any, str]):
        self.name, self.module = name, module
        groups = groups_of(module)
        self.params = [param for group in groups for param in group.fsdp_params]
        self.names = [names[param.sharded_param] for param in self.params]
        self.mesh: Any = groups[0].mesh_info.mesh if groups else None
        policy = [group.mp_policy for group in groups]
        self.dtype = policy[0].reduce_dtype or policy[0].param_dtype if policy else None

    def pieces(self, flat: torch.Tensor) -> list[Piece]:
        """Where its trained parameters lie in a buffer that was reduced.

        Raises:
            ExchangeError: the buffer has another size.
        """
        found, start = [], 0
        for name, param in zip(self.names, self.params, strict=True):
            if param.sharded_param.requires_grad:
                found.append(Piece(name, start, tuple(param.sharded_size)))
                start += param.padded_sharded_param_size.numel()
        if start != flat.numel():
            raise ExchangeError(
                f"module {self.name!r}: {flat.numel()} elements were reduced, and its trained parameters have {start}. "
                "Parameters must be frozen (requires_grad) before Grace's hook is registered, and "
                "set_reduce_scatter_unused_params(True) must stay"
            )
        return found

    def variables(self) -> list[Variable]:
        """Of the parts of its trained parameters that this rank has."""
        found = []
        for name, param in zip(self.names, self.params, strict=True):
            p = param.sharded_param
            if p.requires_grad:
                dtype = NAMES[self.dtype or p.dtype]
                found.append(Variable(name, tuple(param.sharded_size), dtype, str(p.device)))
        return found


def groups_of(module: Any) -> list[Any]:
    """What FSDP2 keeps of a module's own parameters: a group if there are any, several if they have several meshes."""
    return list(module._get_fsdp_state()._fsdp_param_groups)


def below(layouts: Sequence[ModuleLayout]) -> list[Any]:
    """The states of compressed reduce-scatters of these modules."""
    return _states([group._reduce_scatter_comm for layout in layouts for group in groups_of(layout.module)])


def above(layouts: Sequence[ModuleLayout]) -> list[Any]:
    """The states of Grace's exchanges between replicas of these modules."""
    return _states([group._all_reduce_hook for layout in layouts for group in groups_of(layout.module)])


def _states(callees: Sequence[Any]) -> list[Any]:
    """Of those that are Grace's, each once."""
    found = [getattr(callee, "grace_state", None) for callee in callees]
    return list({id(state): state for state in found if state is not None}.values())


def layouts_of(model: Any, what: str, other_axes: bool = True) -> list[ModuleLayout]:
    """Of all modules of a model that ``fully_shard`` was called on and that have parameters of their own.

    Args:
        model: the model; compiled or not.
        what: the function that asks, for messages.
        other_axes: whether parameters may be sharded over tensor parallelism's axis too.

    Raises:
        ConfigError: there is none, or one that cannot be served.
    """
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ConfigError(f"{what} needs torch 2.13 or newer, and this is {torch.__version__}")
    model = bare(model)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{what} needs a model, not {type(model).__name__}")
    pairs = list(model.named_parameters())
    named = unwrap_names([name for name, _ in pairs])
    names = {p: name for name, (_, p) in zip(named, pairs, strict=True)}
    modules = [
        (name or "the model", module) for name, module in model.named_modules() if isinstance(module, FSDPModule)
    ]
    if not modules:
        raise ConfigError(
            f"{what} needs a model that fully_shard was called on, and {type(model).__name__} has no such module:"
            " call fully_shard(model, mesh=mesh['shard']) first; whole models are for "
            "grace.DistributedOptimizer and grace.torch.register_ddp_hook"
        )
    for name, module in modules:
        groups = groups_of(module)
        if len(groups) > 1:
            raise ConfigError(
                f"module {name!r} has parameters with {len(groups)} meshes, which {what} cannot tell apart"
            )
        for param in (param for group in groups for param in group.fsdp_params):
            _check(names[param.sharded_param], param.sharded_param, type(groups[0].mesh_info).__name__, other_axes)
    layouts = [layout for name, module in modules if (layout := ModuleLayout(name, module, names)).params]
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


def whole_mesh(layouts: Sequence[ModuleLayout]) -> Any:
    """Of the ranks that hold one copy of the model together: ``fully_shard``'s axis, and tensor parallelism's."""
    meshes = [param.sharded_param.device_mesh for layout in layouts for param in layout.params]
    return max(meshes, key=lambda mesh: mesh.ndim)


def know_each_other(ranks: int) -> None:
    """Let ranks hear how others end and where they wait, with whom they exchange nothing themselves; where all ranks of
    the run are here."""
    everyone = TorchBackend()
    if ranks == everyone.size:
        with everyone.checked_operation("the ranks of a sharded model"):
            pass


def _check(name: str, p: Any, mesh_info: str, other_axes: bool) -> None:
    """Refuse a parameter that was not sharded by one axis of ``fully_shard``'s."""
    if p.is_meta:
        raise ConfigError(f"parameter {name!r} has no values yet (device meta): call model.to_empty(...) first")
    mesh = p.device_mesh
    if mesh_info != "FSDPMeshInfo":
        axes = mesh.mesh_dim_names or ("replicate", "shard")
        raise ConfigError(
            f"parameter {name!r}: fully_shard was given a mesh with a replicate axis ({', '.join(axes)}), over which "
            "torch averages by itself, uncompressed. Give it the other axis alone, fully_shard(module, "
            f"mesh=mesh[{axes[-1]!r}]), and the replicate axis to Grace: register_fsdp_hook(model, mesh[{axes[0]!r}])"
        )
    if mesh.ndim > 1 and not other_axes:
        raise ConfigError(
            f"parameter {name!r} is sharded over {mesh.ndim} axes ({', '.join(map(str, p.placements))}), as tensor "
            "parallelism beside fully_shard makes them, whose reduce-scatters Grace does not compress; "
            "register_fsdp_hook compresses what replicas of such models exchange"
        )


_KEEPERS: dict[int, tuple[weakref.ref[Any], set[int]]] = {}
"""Who is told of steps, by a number of their own, and the ids of their parameters."""
_NUMBERS = itertools.count()


def before_steps(keeper: Any, parameters: Any) -> Callable[[], Any]:
    """Call ``keeper.before_step(optimizer)`` before each step of an optimizer that holds one of the parameters, and
    ``keeper.after_step(optimizer)`` behind it, as long as the keeper lives.

    Returns:
        what ends it.
    """
    number = next(_NUMBERS)
    if number == 0:  # one hook for all, which stays: torch's own dict must not change while it calls what is in it
        register_optimizer_step_pre_hook(torch.compiler.disable(_before_step))
        register_optimizer_step_post_hook(torch.compiler.disable(_after_step))
    _KEEPERS[number] = weakref.ref(keeper), {id(p) for p in parameters}
    return functools.partial(_KEEPERS.pop, number, None)


def _before_step(optimizer: torch.optim.Optimizer, *ignored: Any) -> None:
    for keeper in _keepers_of(optimizer):
        keeper.before_step(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, *ignored: Any) -> None:
    for keeper in _keepers_of(optimizer):
        keeper.after_step(optimizer)


def _keepers_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return who keeps something of one of an optimizer's parameters; nobody at an inner level of its ``step()``."""
    if within_step({id(optimizer)}):
        return []
    found = []
    for number, (keeper, held) in list(_KEEPERS.items()):
        alive = keeper()
        if alive is None:
            _KEEPERS.pop(number, None)
        elif any(id(p) in held for group in optimizer.param_groups for p in group["params"]):
            found.append(alive)
    return found
