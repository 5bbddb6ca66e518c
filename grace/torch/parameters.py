"""Names, variables and settings of torch parameters."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from grace.core.communicator import Communicator
from grace.core.component import Component
from grace.core.live_instances import live_instances
from grace.core.variable import Variable, equal_bounds, unwrap_names
from grace.errors import ConfigError
from grace.kernels.torch.primitives import NAMES
from grace.session.hyperparameters import Numbers, double_momentum_error, momentum_owners, numeric_settings
from grace.session.settings import check_integer
from grace.torch.wrappers import check_not_sharded

NamedParameters = torch.nn.Module | Iterable[tuple[str, torch.nn.Parameter]] | None
"""Parameters as users give them: the model, or pairs of name and parameter; None to name them by the optimizer."""


def named_trainable_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: NamedParameters
) -> dict[str, torch.nn.Parameter]:
    """Return the optimizer's parameters that need gradients, by name, in declaration order. Names do not have the parts
    that wrappers add.

    Raises:
        ConfigError: a name is given twice, or a parameter has none.
    """
    groups = optimizer.param_groups
    positions = {p: f"{g}.{i}" for g, group in enumerate(groups) for i, p in enumerate(group["params"])}
    if named_parameters is None:
        own = {name_in_optimizer(groups, position): p for p, position in positions.items() if p.requires_grad}
        return dict(zip(unwrap_names(list(own)), own.values(), strict=True))
    if isinstance(named_parameters, torch.nn.Module):
        named_parameters = named_parameters.named_parameters()
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ConfigError(
            "named_parameters must be the model, or pairs of (name, parameter), as model.named_parameters() gives"
        )
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ConfigError(f"named_parameters has the name {twice[0]!r} more than once; names must be unique")
    pairs = [(name, p) for name, (_, p) in zip(unwrap_names([name for name, _ in pairs]), pairs, strict=True)]
    known = {p for _, p in pairs}
    for p, position in positions.items():
        if p not in known and p.requires_grad:
            group, index = position.split(".")
            raise ConfigError(
                f"parameter {index} of the optimizer's group {group} (shape {tuple(p.shape)}) has no name in "
                "named_parameters; pass model.named_parameters() of the whole model"
            )
    first_names: dict[torch.nn.Parameter, str] = {}  # a shared parameter goes by the first of its names
    for name, p in pairs:
        first_names.setdefault(p, name)
    return {name: p for p, name in first_names.items() if p in positions and p.requires_grad}


def name_in_optimizer(groups: list[dict[str, Any]], position: str) -> str:
    """Return a parameter's name in the optimizer (``torch.optim.SGD(model.named_parameters())``), or else its
    position."""
    group, index = map(int, position.split("."))
    names = groups[group].get("param_names")
    return names[index] if names else f"group{group}.param{index}"


def find_sparse_parameters(model: object) -> set[torch.nn.Parameter]:
    """Return the parameters of a model whose gradients come as rows: those of embeddings made with ``sparse=True``.
    Without a module the result is empty.

    >>> len(find_sparse_parameters(torch.nn.Embedding(3, 2, sparse=True)))
    1
    """
    if not isinstance(model, torch.nn.Module):
        return set()
    layers: list[Any] = [layer for layer in model.modules() if getattr(layer, "sparse", False) is True]
    return {layer.weight for layer in layers}


def sparse_names(parameters: Mapping[str, torch.nn.Parameter]) -> list[str]:
    """Return the names of parameters that some layer made with ``sparse=True`` holds. Layers are searched among all
    objects that Python's garbage collector tracks.

    >>> layer = torch.nn.Embedding(3, 2, sparse=True)
    >>> sparse_names({"dense": torch.nn.Linear(2, 1).weight, "sparse": layer.weight})
    ['sparse']
    """
    layers = live_instances(torch.nn.Module)
    held = {p for layer in layers if vars(layer).get("sparse") is True for p in layer._parameters.values()}
    return [name for name, p in parameters.items() if p in held]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a sharded tensor that this rank has, a view; any other tensor as it is."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def make_variables(
    parameters: Mapping[str, torch.nn.Parameter],
    sparse: Collection[torch.nn.Parameter] = (),
    sharded: Collection[str] = (),
) -> list[Variable]:
    """Return the variables of named parameters.

    Args:
        parameters: the parameters, by name.
        sparse: the parameters whose gradients come as rows.
        sharded: names of the parameters of which this rank's parts are the variables.

    Raises:
        ConfigError: a parameter has a dtype that Grace does not exchange, or is another part of a tensor.
    """
    check_not_sharded({name: p for name, p in parameters.items() if name not in sharded})
    check_initialized(parameters.items())
    variables = []
    for name, p in parameters.items():
        dtype = NAMES.get(p.dtype, "")
        if not dtype.startswith(("float", "bfloat")):
            hint = ". DistributedDataParallel without a hook takes complex ones" if p.dtype.is_complex else ""
            raise ConfigError(
                f"parameter {name!r} is {p.dtype}; Grace exchanges float16, bfloat16, float32 and float64{hint}"
            )
        variables.append(Variable(name, tuple(local_part(p.data).shape), dtype, str(p.device), p in sparse))
    return variables


def check_initialized(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse parameters and buffers of lazy modules that have no shape yet.

    Raises:
        ConfigError: a tensor has no shape; the message names the first.
    """
    for name, tensor in tensors:
        if torch.nn.parameter.is_lazy(tensor):
            raise ConfigError(
                f"{name!r} has no shape yet: it is of a lazy module, which takes it from its first input. Run a "
                "forward pass first, model(batch), on every rank"
            )


def hyperparameters(optimizer: torch.optim.Optimizer) -> tuple[Numbers, ...]:
    """Return the numbers of each parameter group. Tensors on a device are left out, since reading them would wait for
    it."""

    def read(value: object) -> object:
        """Return the value of a single-element tensor on the CPU; any other value as it is."""
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
            return value.item()
        return value

    groups = optimizer.param_groups
    return tuple(numeric_settings({k: read(v) for k, v in group.items() if k != "params"}) for group in groups)


def scaler_enabled(grad_scaler: torch.amp.GradScaler | None) -> bool:
    """Return True for a ``GradScaler`` that is enabled, False for None."""
    return grad_scaler is not None and grad_scaler.is_enabled()


def check_optimizer(communicator: Communicator, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse a communicator whose parts do not go with the optimizer.

    Raises:
        ConfigError: a part needs the optimizer and there is none, or both apply momentum.
    """
    parts = momentum_owners([communicator])
    if optimizer is None and (parts or communicator.memory.needs_lr):
        part = communicator.memory if communicator.memory.needs_lr else parts[0]
        what = "follows the learning rate" if communicator.memory.needs_lr else "replaces the optimizer's momentum"
        raise ConfigError(
            f"the {part.kind} {part.spec} {what}: register_ddp_hook(model, ..., optimizer=optimizer), or under "
            "Accelerate prepare(accelerator, model, optimizer, ...)"
        )
    check_momentum(parts, optimizer)


def check_momentum(parts: Sequence[Component], optimizer: torch.optim.Optimizer | None, later: bool = False) -> None:
    """Refuse an optimizer that applies momentum if a memory or compressor applies it too.

    Args:
        parts: memories and compressors that apply momentum.
        optimizer: the optimizer whose groups are checked.
        later: True if the optimizer had no momentum when it was made distributed.
    """
    if not parts or optimizer is None:
        return
    cause = " now (a scheduler may have set it: OneCycleLR and CyclicLR take cycle_momentum=False)" if later else ""
    for index, group in enumerate(optimizer.param_groups):
        setting, momentum = "momentum", group.get("momentum")
        if momentum is None and group.get("betas") is not None:  # Adam's name of momentum; SGD's is the usual one
            setting, momentum = "betas[0]", group["betas"][0]
        if momentum:
            raise double_momentum_error(parts[0], f"the optimizer's group {index}", setting, momentum, cause)


def check_not_delayed(communicator: Communicator, who: str) -> None:
    """Refuse a communicator that applies means in later steps.

    Args:
        who: the caller that cannot do that, and the alternative, for the message.

    Raises:
        ConfigError: the communicator applies means in later steps.
    """
    if communicator.delayed:
        raise ConfigError(f"{communicator.choice} applies means in later steps, which {who}")


def named_tensors(
    parameters: torch.nn.Module | Mapping[str, object] | Iterable[object],
) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors, by name, of a module (parameters and all buffers), of a dict, or of a list of pairs or
    tensors."""
    if isinstance(parameters, torch.nn.Module):
        return [*parameters.named_parameters(), *parameters.named_buffers()]
    if isinstance(parameters, Mapping):
        pairs: Any = parameters.items()
    else:
        pairs = ((str(i), p) if isinstance(p, torch.Tensor) else p for i, p in enumerate(parameters))
    return [(name, value) for name, value in pairs if isinstance(value, torch.Tensor)]


def horovod_groups(
    parameters: Mapping[str, torch.nn.Parameter],
    groups: int | Sequence[Sequence[torch.Tensor]] | None,
    apart: Collection[str] = (),
) -> list[list[str]] | None:
    """Return the names of the parameters that may share a collective: Horovod's ``groups``.

    Args:
        parameters: the parameters, by name.
        groups: how many sets, or the sets (parameters in none of them are on their own).
        apart: names of the parameters that are on their own if ``groups`` is None.

    >>> weights = {name: torch.nn.Parameter(torch.zeros(2)) for name in "abc"}
    >>> horovod_groups(weights, 2), horovod_groups(weights, [[weights["c"], weights["a"]]])
    ([['a', 'b'], ['c']], [['c', 'a'], ['b']])
    >>> horovod_groups(weights, None), horovod_groups(weights, None, apart={"b"})
    (None, [['a', 'c'], ['b']])
    """
    if groups is None or groups == 0:
        return [[name for name in parameters if name not in apart], *([name] for name in apart)] if apart else None
    if isinstance(groups, int):
        check_integer("groups", groups)
        names = list(parameters)
        count = min(groups, len(parameters))
        return [names[a:b] for a, b in equal_bounds(len(names), count)] if count else []
    name_of: dict[torch.Tensor, str] = {p: name for name, p in parameters.items()}
    named_groups = [[name_of[p] for p in group if p in name_of] for group in _check_groups(groups)]
    counts = Counter(name for group in named_groups for name in group)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise ConfigError(f"groups has the parameter {twice[0]!r} more than once")
    return [*(group for group in named_groups if group), *([name] for name in parameters if name not in counts)]


def _check_groups(groups: Sequence[Sequence[torch.Tensor]]) -> Sequence[Sequence[torch.Tensor]]:
    """Return groups that are lists of parameters; refuse all others."""
    lists = isinstance(groups, Iterable) and all(isinstance(group, Iterable) for group in groups)
    if lists and all(isinstance(p, torch.Tensor) for group in groups for p in group):
        return groups
    raise ConfigError("groups must be a whole number, or lists of parameters")
