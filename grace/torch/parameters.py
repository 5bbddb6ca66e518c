"""Names, variables and start values of torch parameters."""

import gc
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from grace.backends.runtime import current
from grace.backends.together import chosen_root, compared
from grace.core.backend import Backend
from grace.core.communicator import Communicator
from grace.core.variable import Variable, equal_bounds, unwrap_names
from grace.errors import ConfigError
from grace.kernels.torch.primitives import NAMES
from grace.session.hyperparameters import Numbers, numeric_settings
from grace.session.momentum import double_momentum_error, momentum_owners
from grace.session.settings import check_integer
from grace.torch.wrappers import check_whole

NO_NUMBERS, SIMPLE = {"params", "param_names"}, {int, float, bool, str, type(None)}


def named(optimizer: torch.optim.Optimizer, named_parameters: Any) -> dict[str, torch.nn.Parameter]:
    """The optimizer's parameters that need gradients, by name (without what wrappers put into it), in declaration
    order.

    Raises:
        ConfigError: a name is given twice, or a parameter has none.
    """
    groups = optimizer.param_groups
    wanted = {p: f"{g}.{i}" for g, group in enumerate(groups) for i, p in enumerate(group["params"])}
    if named_parameters is None:
        own = {own_name(groups, position): p for p, position in wanted.items() if p.requires_grad}
        return dict(zip(unwrap_names(list(own)), own.values(), strict=True))
    module = isinstance(named_parameters, torch.nn.Module)
    pairs = list(named_parameters.named_parameters() if module else named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ConfigError(
            "named_parameters must be the model, or pairs of (name, parameter), as model.named_parameters() gives"
        )
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ConfigError(f"named_parameters has the name {twice[0]!r} more than once; names must be unique")
    pairs = [(name, p) for name, (_, p) in zip(unwrap_names([name for name, _ in pairs]), pairs, strict=True)]
    known = {p for _, p in pairs}
    for p, position in wanted.items():
        if p not in known and p.requires_grad:
            group, index = position.split(".")
            raise ConfigError(
                f"parameter {index} of the optimizer's group {group} (shape {tuple(p.shape)}) has no name in "
                "named_parameters; pass model.named_parameters() of the whole model"
            )
    first_names: dict[torch.nn.Parameter, str] = {}  # a shared parameter goes by the first of its names
    for name, p in pairs:
        first_names.setdefault(p, name)
    return {name: p for p, name in first_names.items() if p in wanted and p.requires_grad}


def own_name(groups: list[dict[str, Any]], position: str) -> str:
    """The name the optimizer itself knows (``torch.optim.SGD(model.named_parameters())``), or the position."""
    group, index = map(int, position.split("."))
    names = groups[group].get("param_names")
    return names[index] if names else f"group{group}.param{index}"


def sparse_of(model: Any) -> set[torch.nn.Parameter]:
    """The parameters of a model whose gradients come as rows: those of embeddings made with ``sparse=True``; none if
    it is no module.

    >>> len(sparse_of(torch.nn.Embedding(3, 2, sparse=True)))
    1
    """
    if not isinstance(model, torch.nn.Module):
        return set()
    layers: list[Any] = [layer for layer in model.modules() if getattr(layer, "sparse", False) is True]
    return {layer.weight for layer in layers}


def sparse_layers_of(parameters: Mapping[str, torch.nn.Parameter]) -> list[str]:
    """The names of parameters that a layer made with ``sparse=True`` holds, of whatever model: layers are looked for
    among all objects that Python's collector knows.

    >>> layer = torch.nn.Embedding(3, 2, sparse=True)
    >>> sparse_layers_of({"dense": torch.nn.Linear(2, 1).weight, "sparse": layer.weight})
    ['sparse']
    """
    layers: list[Any] = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)]
    held = {p for layer in layers if vars(layer).get("sparse") is True for p in layer._parameters.values()}
    return [name for name, p in parameters.items() if p in held]


def variables(
    parameters: Mapping[str, torch.nn.Parameter], sparse: Collection[torch.nn.Parameter] = ()
) -> list[Variable]:
    """The variables of named parameters.

    Args:
        parameters: by name.
        sparse: those whose gradients come as rows.

    Raises:
        ConfigError: a dtype that Grace does not exchange, or a part of a tensor.
    """
    check_whole(parameters)
    check_initialized(parameters.items())
    found = []
    for name, p in parameters.items():
        dtype = NAMES.get(p.dtype, "")
        if not dtype.startswith(("float", "bfloat")):
            hint = ". DistributedDataParallel without a hook takes complex ones" if p.dtype.is_complex else ""
            raise ConfigError(
                f"parameter {name!r} is {p.dtype}; Grace exchanges float16, bfloat16, float32 and float64{hint}"
            )
        found.append(Variable(name, tuple(p.shape), dtype, str(p.device), p in sparse))
    return found


def check_initialized(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse parameters and buffers of lazy modules that have no shape yet.

    Raises:
        ConfigError: the message names the first.
    """
    for name, tensor in tensors:
        if torch.nn.parameter.is_lazy(tensor):
            raise ConfigError(
                f"{name!r} has no shape yet: it is of a lazy module, which takes it from its first input. Run a "
                "forward pass first, model(batch), on every rank"
            )


def hyperparameters(optimizer: torch.optim.Optimizer) -> tuple[Numbers, ...]:
    """The numbers of each of its groups; tensors that lie on a device are left out, since reading them would wait."""

    def read(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
            return value.item()
        return value

    groups = optimizer.param_groups
    return tuple(numeric_settings({k: read(v) for k, v in group.items() if k != "params"}) for group in groups)


def simple_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]] | None:
    """What the hyperparameters are read from, if it is the same objects as long as they are; None if something in it
    may change in place."""
    groups = [{k: v for k, v in group.items() if k not in NO_NUMBERS} for group in optimizer.param_groups]
    for group in groups:
        for value in group.values():
            if type(value) not in SIMPLE and (type(value) is not tuple or any(type(v) not in SIMPLE for v in value)):
                return None
    return groups


def check_optimizer(communicator: Communicator, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse a communicator whose parts do not go with the optimizer.

    Raises:
        ConfigError: a part needs the optimizer and there is none, or both apply momentum.
    """
    parts = momentum_owners([communicator])
    if optimizer is None and (parts or communicator.memory.needs_lr):
        part = communicator.memory if communicator.memory.needs_lr else parts[0]
        what = "follows the learning rate" if communicator.memory.needs_lr else "replaces the optimizer's momentum"
        raise ConfigError(f"the {part.kind} {part.spec} {what}: register_ddp_hook(model, ..., optimizer=optimizer)")
    check_momentum(parts, optimizer)


def check_momentum(parts: Sequence[Any], optimizer: torch.optim.Optimizer | None, later: bool = False) -> None:
    """Refuse an optimizer that applies momentum as well.

    Args:
        parts: memories and compressors that do.
        optimizer: whose groups are looked at.
        later: it had none when it was made distributed.
    """
    if not parts or optimizer is None:
        return
    for index, group in enumerate(optimizer.param_groups):
        momentum = group.get("momentum", group.get("betas", (0,))[0])
        if momentum:
            raise double_momentum_error(parts[0], f"the optimizer's group {index}", momentum, later)


def check_prompt(communicator: Communicator, who: str) -> None:
    """Refuse a communicator that applies means in later steps.

    Args:
        who: who cannot do that, and what can.

    Raises:
        ConfigError: it does.
    """
    if communicator.delayed:
        raise ConfigError(f"{communicator.choice} applies means in later steps, which {who}")


def values(parameters: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a module (parameters and buffers, those that are not saved too), of a dict, or of a list of pairs
    or tensors."""
    if isinstance(parameters, torch.nn.Module):
        return [*parameters.named_parameters(), *parameters.named_buffers()]
    if isinstance(parameters, Mapping):
        pairs: Any = parameters.items()
    else:
        pairs = ((str(i), p) if isinstance(p, torch.Tensor) else p for i, p in enumerate(parameters))
    return [(name, value) for name, value in pairs if isinstance(value, torch.Tensor)]


def broadcast_parameters(
    parameters: torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str, Any]],
    root: int = 0,
    backend: Backend | None = None,
    *,
    root_rank: int | None = None,
) -> None:
    """Give every rank the root's values, in place. Every rank must call it.

    Args:
        parameters: a module (its parameters and all buffers), a state dict, (name, tensor) pairs, or tensors. What
            is not a tensor is passed over.
        root: the rank whose values count.
        backend: the engine; that of ``grace.init()`` if left out.
        root_rank: Horovod's name of ``root``.

    Raises:
        ConfigError: ``root`` is no rank; nothing was broadcast.
        RankError: other ranks call something else, or with tensors of other sizes; nothing was broadcast.

    >>> import grace
    >>> backend = grace.init("local")
    >>> broadcast_parameters(torch.nn.Linear(2, 1))
    >>> grace.shutdown()
    """
    backend = current() if backend is None else backend
    named_tensors = values(parameters)
    check_initialized(named_tensors)
    tensors = [_once(value.detach()) for _, value in named_tensors if value.numel()]
    with torch.no_grad():
        dense = [tensor.contiguous() for tensor in tensors]
        raw = [tensor.view(-1).view(torch.uint8) for tensor in dense]  # engines do not know every dtype
        sizes = zlib.crc32(repr([buffer.numel() for buffer in raw]).encode())
        describe = lambda: f"from rank {chosen_root(root, root_rank, backend.size)}"  # noqa: E731
        with compared(backend, f"broadcast of {sizes:08x}", describe):
            root = chosen_root(root, root_rank, backend.size)
            for handle in [backend.broadcast(buffer, root) for buffer in raw]:
                handle.wait()
        for tensor, sent in zip(tensors, dense, strict=True):
            if sent is not tensor:
                tensor.copy_(sent)


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """A view in which no element comes twice, as those of an expanded tensor do."""
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root: int = 0,
    backend: Backend | None = None,
    *,
    root_rank: int | None = None,
) -> None:
    """Give every rank's optimizer the root's momenta, counters and settings; memories stay each rank's own. Every rank
    must call it.

    Args:
        optimizer: distributed or not; the same parameters on every rank.
        root: the rank whose state counts.
        backend: the engine; that of ``grace.init()`` if left out.
        root_rank: Horovod's name of ``root``.

    Raises:
        ConfigError: ``root`` is no rank; nothing was broadcast.
        RankError: other ranks call something else; nothing was broadcast.

    >>> import grace
    >>> backend = grace.init("local")
    >>> broadcast_optimizer_state(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1))
    >>> grace.shutdown()
    """
    backend = current() if backend is None else backend
    mine, tensors = _without_tensors(torch.optim.Optimizer.state_dict(optimizer))
    facts = [(tuple(t.shape), t.dtype, str(t.device)) for t in tensors]
    describe = lambda: f"from rank {chosen_root(root, root_rank, backend.size)}"  # noqa: E731
    with compared(backend, "broadcast_optimizer_state", describe):
        root = chosen_root(root, root_rank, backend.size)
        skeleton, facts = backend.allgather_object((mine, facts) if backend.rank == root else None)[root]
    if backend.rank != root:
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in facts]
    tensors = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
    broadcast_parameters([(str(i), tensor) for i, tensor in enumerate(tensors)], root, backend)
    torch.optim.Optimizer.load_state_dict(optimizer, _with_tensors(skeleton, tensors))


class _Place(int):
    """Where in the list of tensors one was."""


def _without_tensors(value: Any) -> tuple[Any, list[torch.Tensor]]:
    tensors: list[torch.Tensor] = []

    def strip(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            tensors.append(item)
            return _Place(len(tensors) - 1)
        if isinstance(item, dict):
            return {key: strip(part) for key, part in item.items()}
        return type(item)(strip(part) for part in item) if isinstance(item, (list, tuple)) else item

    return strip(value), tensors


def _with_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value]
    if isinstance(value, dict):
        return {key: _with_tensors(part, tensors) for key, part in value.items()}
    return type(value)(_with_tensors(part, tensors) for part in value) if isinstance(value, (list, tuple)) else value


def horovod_groups(
    parameters: Mapping[str, torch.nn.Parameter],
    groups: int | Sequence[Sequence[torch.Tensor]] | None,
    apart: Collection[str] = (),
) -> list[list[str]] | None:
    """Names of the parameters that may share a collective, Horovod's ``groups``.

    Args:
        parameters: by name.
        groups: how many sets, or the sets (parameters in none of them are on their own).
        apart: those on their own if ``groups`` is None.

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
        names, count = list(parameters), min(groups, len(parameters))
        return [names[a:b] for a, b in equal_bounds(len(names), count)] if count else []
    name_of = {p: name for name, p in parameters.items()}
    given = [[name_of[p] for p in group if p in name_of] for group in _tensors(groups)]
    taken = Counter(name for group in given for name in group)
    twice = [name for name, count in taken.items() if count > 1]
    if twice:
        raise ConfigError(f"groups has the parameter {twice[0]!r} more than once")
    return [*(group for group in given if group), *([name] for name in parameters if name not in taken)]


def _tensors(groups: Any) -> Any:
    if all(isinstance(p, torch.Tensor) for group in groups for p in group):
        return groups
    raise ConfigError("groups must be a whole number, or lists of parameters")
