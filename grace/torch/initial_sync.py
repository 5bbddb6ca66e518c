"""The broadcasts that make ranks start equal: of parameters and buffers, which ranks compare before, and of an
optimizer's state."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from grace.backends.object_collectives import chosen_root, compared
from grace.backends.runtime import backend_or_current
from grace.core.backend import Backend
from grace.core.variable import Variable, unwrap_names
from grace.errors import ConfigError
from grace.torch.parameters import NamedParameters, check_initialized, name_in_optimizer, named_tensors


def initial_tensors(optimizer: torch.optim.Optimizer, named_parameters: NamedParameters) -> dict[str, torch.Tensor]:
    """Return the tensors that must start equal on all ranks, by name: parameters, frozen ones too, and a module's
    buffers. Each tensor is listed once.

    >>> norm = torch.nn.BatchNorm1d(2)
    >>> list(initial_tensors(torch.optim.SGD(norm.parameters()), norm))
    ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """
    pairs = named_tensors(named_parameters) if named_parameters is not None else []
    groups = optimizer.param_groups
    own = [
        (name_in_optimizer(groups, f"{g}.{i}"), p)
        for g, group in enumerate(groups)
        for i, p in enumerate(group["params"])
    ]
    names: dict[torch.Tensor, str] = {}
    plain = zip(unwrap_names([name for name, _ in pairs]), (tensor for _, tensor in pairs), strict=True)
    for name, tensor in [*plain, *own]:
        names.setdefault(tensor, name)
    return {name: tensor for tensor, name in names.items()}


def initial_facts(start: Mapping[str, torch.Tensor], variables: Sequence[Variable]) -> list[tuple[str, str]]:
    """Return names and shapes of the tensors that must start equal, as facts for the ranks to compare.

    Args:
        start: the tensors, by name.
        variables: the variables of the trained tensors.

    Raises:
        ConfigError: a tensor cannot be broadcast.
    """
    trained = {variable.name: variable.describe() for variable in variables}
    facts = []
    check_initialized(start.items())
    for name, tensor in start.items():
        if tensor.layout is not torch.strided or tensor.is_meta:
            kind = "has no values yet (device meta)" if tensor.is_meta else f"is sparse ({tensor.layout})"
            raise ConfigError(
                f"{name!r} {kind} and cannot start from rank 0's. Pass model.named_parameters() instead of the model "
                "if it is a buffer, or broadcast=False, and see to it that the ranks start equal"
            )
        text = f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.shape))}]"
        kind = "frozen parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
        kind, text = ("variable", trained[name]) if name in trained else (kind, text)
        facts.append((f"{kind} {name!r}", text))
    return facts


def broadcast_parameters(
    parameters: torch.nn.Module | Mapping[str, object] | Iterable[object],
    root: int = 0,
    backend: Backend | None = None,
    *,
    root_rank: int | None = None,
) -> None:
    """Give every rank the root's values, in place. Every rank must call it.

    Args:
        parameters: a module (its parameters and all buffers), a state dict, (name, tensor) pairs, or tensors. Values
            that are not tensors are skipped.
        root: the rank whose values count.
        backend: the engine; that of ``grace.init()`` if left out.
        root_rank: Horovod's name of ``root``.

    Raises:
        ConfigError: ``root`` is no rank, or a tensor is a DTensor; nothing was broadcast.
        RankError: other ranks call something else, or with tensors of other sizes; nothing was broadcast.

    >>> import grace
    >>> backend = grace.init("local")
    >>> broadcast_parameters(torch.nn.Linear(2, 1))
    >>> grace.shutdown()
    """
    backend = backend_or_current(backend)
    pairs = named_tensors(parameters)
    check_initialized(pairs)
    _check_whole(backend, "broadcast", [(repr(name), tensor) for name, tensor in pairs])
    tensors = [_without_repeats(value.detach()) for _, value in pairs if value.numel()]
    with torch.no_grad():
        dense = [tensor.contiguous() for tensor in tensors]
        raw = [as_bytes(tensor) for tensor in dense]
        # all ranks must broadcast tensors of the same sizes: the checksum stands for the list of sizes
        sizes = zlib.crc32(repr([buffer.numel() for buffer in raw]).encode())
        with compared(backend, f"broadcast of {sizes:08x}", partial(_describe_root, root, root_rank, backend.size)):
            root = chosen_root(root, root_rank, backend.size)
            # a list: all broadcasts start before the first is awaited
            for handle in [backend.broadcast(buffer, root) for buffer in raw]:
                handle.wait()
        for tensor, sent in zip(tensors, dense, strict=True):
            if sent is not tensor:  # contiguous() made a copy, into which the root's values came
                tensor.copy_(sent)


def _check_whole(backend: Backend, call: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse sharded tensors, of which each rank has another part; the other ranks hear of it.

    Raises:
        ConfigError: a tensor is a DTensor; the message names the first.
    """

    def refuse() -> str:
        raise ConfigError(
            f"{parts[0]} is a DTensor, of which each rank has another part: a broadcast would replace all parts by "
            "the root's. Give all ranks the same seed, or load torch.distributed.checkpoint's files"
        )

    parts = [name for name, tensor in tensors if hasattr(tensor, "device_mesh")]
    if parts:
        with compared(backend, call, refuse):
            pass


def _describe_root(root: int, root_rank: int | None, size: int) -> str:
    """Return the root of a broadcast in words; raise ConfigError if it is no rank."""
    return f"from rank {chosen_root(root, root_rank, size)}"


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as bytes, since engines do not support every dtype.

    >>> as_bytes(torch.ones(1, 2)[:, 0]).tolist()
    [0, 0, 128, 63]
    """
    # view(-1) may keep another stride than 1 of a tensor of one element
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view that has each element in memory once. An expanded tensor has elements several times."""
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root: int = 0,
    backend: Backend | None = None,
    *,
    root_rank: int | None = None,
) -> None:
    """Give every rank's optimizer the root's momenta, counters and settings. Memories stay each rank's own. Every rank
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
    backend = backend_or_current(backend)
    skeleton, tensors = _extract_tensors(torch.optim.Optimizer.state_dict(optimizer))
    _check_whole(backend, "broadcast_optimizer_state", [("the optimizer's state", tensor) for tensor in tensors])
    facts = tensor_facts(tensors)
    with compared(backend, "broadcast_optimizer_state", partial(_describe_root, root, root_rank, backend.size)):
        root = chosen_root(root, root_rank, backend.size)
        skeleton, facts = backend.allgather_object((skeleton, facts) if backend.rank == root else None)[root]
    if backend.rank != root:
        tensors = empty_tensors(facts, optimizer)
    tensors = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
    broadcast_parameters([(str(i), tensor) for i, tensor in enumerate(tensors)], root, backend)
    torch.optim.Optimizer.load_state_dict(optimizer, _insert_tensors(skeleton, tensors))


def tensor_facts(tensors: Iterable[torch.Tensor]) -> list[tuple[tuple[int, ...], torch.dtype, str]]:
    """Return the shape, the dtype and the kind of device of each tensor."""
    return [(tuple(t.shape), t.dtype, t.device.type) for t in tensors]


def empty_tensors(
    facts: Iterable[tuple[tuple[int, ...], torch.dtype, str]], optimizer: torch.optim.Optimizer
) -> list[torch.Tensor]:
    """Return uninitialized tensors like those that :func:`tensor_facts` describes, on the devices of this rank's
    parameters: the root has another GPU of the node."""
    own = {p.device.type: p.device for group in optimizer.param_groups for p in group["params"]}
    return [torch.empty(shape, dtype=dtype, device=own.get(kind, kind)) for shape, dtype, kind in facts]


class _TensorIndex(int):
    """Index of a tensor that was taken out of a state, in the list of all such tensors."""


def _extract_tensors(value: object) -> tuple[object, list[torch.Tensor]]:
    """Return a state with an index in place of each tensor, and the list of the tensors."""
    tensors: list[torch.Tensor] = []

    def strip(item: object) -> object:
        """Replace the tensors of an item by their indices, recursively."""
        if isinstance(item, torch.Tensor):
            tensors.append(item)
            return _TensorIndex(len(tensors) - 1)
        if isinstance(item, dict):
            return {key: strip(part) for key, part in item.items()}
        return type(item)(strip(part) for part in item) if isinstance(item, (list, tuple)) else item

    return strip(value), tensors


def _insert_tensors(value: object, tensors: list[torch.Tensor]) -> Any:
    """Return a state with the tensors in place of their indices. Inverse of :func:`_extract_tensors`."""
    if isinstance(value, _TensorIndex):
        return tensors[value]
    if isinstance(value, dict):
        return {key: _insert_tensors(part, tensors) for key, part in value.items()}
    return type(value)(_insert_tensors(part, tensors) for part in value) if isinstance(value, (list, tuple)) else value
