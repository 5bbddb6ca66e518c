"""Batches: the rows that a rank computes with, the tensors that rank 0 gives to all, and outputs that all ranks get."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from grace.errors import ConfigError
from grace.pipeline.torch.mesh import Mesh, Placement
from grace.session.agreement import gather_or_raise

B = TypeVar("B")


def count_rows(flat: Sequence[object], whole: Sequence[bool] | None = None) -> int:
    """Return the number of rows of a batch: the first dimension of its first tensor that has one.

    Raises:
        ConfigError: the batch has no such tensor.

    >>> count_rows([2.5, torch.ones(6, 2)])
    6
    """
    for i, one in enumerate(flat):
        if isinstance(one, torch.Tensor) and one.ndim and not (whole and whole[i]):
            return int(one.shape[0])
    raise ConfigError(
        "the model's inputs have no tensor with rows: a pipeline cuts its batch into micro-batches by rows"
    )


def slice_rows(
    flat: Sequence[object], rows: int, low: int, high: int, whole: Sequence[bool] | None = None
) -> list[object]:
    """Return rows ``low`` to ``high`` of all tensors that have as many rows as the batch; all other values as they are.

    >>> [one.tolist() for one in slice_rows([torch.arange(4), torch.ones(2)], 4, 2, 4)]
    [[2, 3], [1.0, 1.0]]
    """
    values = list[object]()
    for i, one in enumerate(flat):
        is_whole = whole is not None and whole[i]
        if isinstance(one, torch.Tensor) and one.ndim and one.shape[0] == rows and not is_whole:
            values.append(one[low:high])
        else:
            values.append(one)
    return values


def micro_batches(
    flat: Sequence[object],
    rows: int,
    count: int,
    placement: Placement,
    is_global: bool,
    whole: Sequence[bool] | None = None,
) -> list[list[object]]:
    """Return this rank's rows of each micro-batch.

    Args:
        flat: a batch's tensors and other values.
        rows: rows of the batch.
        count: number of micro-batches.
        placement: this rank's placement; replica r of R has rows [r M/R, (r+1) M/R) of a micro-batch of M rows.
        is_global: True if the batch is that of all replicas, False if it is this replica's.
        whole: for each value of ``flat``, True if it has no rows whatever its shape is.

    Raises:
        ConfigError: the rows cannot be divided.

    >>> [one[0].tolist() for one in micro_batches([torch.arange(8)], 8, 2, Placement((0, 1), 1), True)]
    [[2, 3], [6, 7]]
    """
    replicas = len(placement.ranks) if is_global else 1
    if rows % (count * replicas) or not rows:
        raise ConfigError(
            f"a batch of {rows} rows cannot be cut into {count} micro-batches"
            + (f" for {replicas} replicas" if replicas > 1 else "")
            + f": give a multiple of {count * replicas} rows (drop_last=True leaves a smaller last batch out)"
        )
    size = rows // count
    own = size // replicas
    batches = []
    for chunk in range(count):
        low = chunk * size + (placement.replica * own if is_global else 0)
        batches.append(slice_rows(flat, rows, low, low + own, whole))
    return batches


def broadcast_batch(mesh: Mesh, device: torch.device, given: Callable[[], B]) -> B:
    """Return rank 0's tensors in place of this rank's, which may be empty. Every rank must call it.

    Args:
        mesh: the pipeline's ranks.
        device: device of the tensors on the other ranks.
        given: a function that returns this rank's arguments, or raises if they cannot work.

    Raises:
        ConfigError: this rank was given another number of tensors.
        RankError: another rank refused its arguments.
    """
    leaves = list[object]()
    spec, error = None, None
    try:
        leaves, spec = pytree.tree_flatten(given())
    except Exception as raised:
        error = raised
    tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
    kinds = [(tuple(t.shape), t.dtype) for t in tensors]
    known = gather_or_raise(mesh.backend, "a batch", kinds, error, "refused its batch")
    assert spec is not None
    if any(len(one) != len(known[0]) for one in known):
        raise ConfigError("with inputs='rank0' all ranks call with as many tensors; others' may be empty")
    filled = iter(
        mesh.broadcast(t.contiguous() if mesh.rank == 0 else torch.empty(shape, dtype=dtype, device=device), 0)
        for t, (shape, dtype) in zip(tensors, known[0], strict=True)
    )
    batch: B = pytree.tree_unflatten([next(filled) if isinstance(one, torch.Tensor) else one for one in leaves], spec)
    return batch


def gather_outputs(outputs: Sequence[Sequence[object]], mesh: Mesh, every: bool, by_replica: bool) -> list[object]:
    """Gather the flat outputs of all micro-batches as those of one batch, on every rank.

    Args:
        outputs: outputs of this rank's micro-batches, if it has the last stage.
        mesh: the pipeline's ranks.
        every: True for the outputs of all replicas, in the order of the batch, instead of this rank's replica.
        by_replica: True if each replica has a batch of its own, and the whole batch is their concatenation.
    """
    last = mesh.ranks[-1]
    every = every or len(set(mesh.replicas)) > 1
    if mesh.backend.size == 1:
        known: Sequence[Sequence[Sequence[object]]] = [outputs]
    else:
        # broadcasts are collectives: every rank takes part in those of all replicas, one after the other
        known = [_broadcast_outputs(outputs, rank, mesh) for rank in last]
    wanted = known if every else [known[mesh.replica]]
    count = len(wanted[0])
    order = (
        [one[i] for one in wanted for i in range(count)]
        if by_replica
        else [one[i] for i in range(count) for one in wanted]
    )
    return [_concatenate([chunk[i] for chunk in order]) for i in range(len(order[0]))]


def _broadcast_outputs(outputs: Sequence[Sequence[Any]], rank: int, mesh: Mesh) -> list[list[object]]:
    """Return a rank's outputs, on all ranks."""
    is_source = mesh.rank == rank
    kinds = [
        [(tuple(one.shape), one.dtype) if isinstance(one, torch.Tensor) else one for one in chunk] for chunk in outputs
    ]
    received = mesh.backend.allgather_object(kinds if is_source else None)[rank]
    all_outputs = []
    for i, chunk in enumerate(received):
        values = []
        for j, kind in enumerate(chunk):
            if not isinstance(kind, tuple) or not isinstance(kind[-1], torch.dtype):
                values.append(kind)
                continue
            tensor = outputs[i][j].contiguous() if is_source else torch.empty(kind[0], dtype=kind[1])
            values.append(mesh.broadcast(tensor, rank))
        all_outputs.append(values)
    return all_outputs


def _concatenate(parts: Sequence[object]) -> object:
    """Concatenate the rows of all micro-batches; average values that have no rows. A value that is no tensor is the
    same for all."""
    tensors = [one for one in parts if isinstance(one, torch.Tensor)]
    if not tensors:
        return parts[0]
    return torch.cat(tensors) if tensors[0].ndim else torch.stack(tensors).float().mean().to(tensors[0].dtype)
