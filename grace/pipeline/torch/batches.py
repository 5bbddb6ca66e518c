"""Batches: the rows that a rank computes with, the tensors that rank 0 gives to all, and outputs that all ranks get."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeGuard, TypeVar

import torch
from torch.utils import _pytree as pytree

from grace.errors import ConfigError
from grace.pipeline.torch.mesh import Mesh
from grace.session.agreement import gather_or_raise

B = TypeVar("B")


def count_rows(flat: Sequence[object], whole: Sequence[bool] | None = None) -> int:
    """Return the number of rows of a batch: the first dimension of its first tensor that has one. Refuse a batch
    without such a tensor.

    >>> count_rows([2.5, torch.ones(6, 2)])
    6
    """
    for i, one in enumerate(flat):
        if isinstance(one, torch.Tensor) and one.ndim and not (whole and whole[i]):
            return int(one.shape[0])
    raise ConfigError(
        "the model's inputs have no tensor with rows: a pipeline cuts its batch into micro-batches by rows"
    )


def has_rows(value: object, rows: int) -> TypeGuard[torch.Tensor]:
    """Return True for a tensor whose first dimension has as many elements as the batch has rows."""
    return isinstance(value, torch.Tensor) and value.shape[:1] == (rows,)


def slice_rows(
    flat: Sequence[object], rows: int, low: int, high: int, whole: Sequence[bool] | None = None
) -> list[object]:
    """Return rows ``low`` to ``high`` of all tensors that have as many rows as the batch; all other values as they are.

    >>> [one.tolist() for one in slice_rows([torch.arange(4), torch.ones(2)], 4, 2, 4)]
    [[2, 3], [1.0, 1.0]]
    """
    values = list(flat)
    for i, one in enumerate(flat):
        if has_rows(one, rows) and not (whole and whole[i]):
            values[i] = one[low:high]
    return values


def micro_batches(
    rows: int, count: int, replica: int, replicas: int, flat: Sequence[object], whole: Sequence[bool] | None = None
) -> list[list[object]]:
    """Return this rank's rows of each micro-batch.

    Args:
        rows: rows of the batch.
        count: number of micro-batches.
        replica, replicas: number of this replica, and how many share the batch: replica r of R has rows
            [r M/R, (r+1) M/R) of a micro-batch of M rows.
        flat: the batch's tensors and other values.
        whole: for each value of ``flat``, True if it has no rows whatever its shape is.

    >>> [one[0].tolist() for one in micro_batches(8, 2, 1, 2, [torch.arange(8)])]
    [[2, 3], [6, 7]]
    """
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
        low = chunk * size + replica * own
        batches.append(slice_rows(flat, rows, low, low + own, whole))
    return batches


def broadcast_batch(mesh: Mesh, given: Callable[[], B]) -> B:
    """Return rank 0's tensors in place of this rank's, which may be empty. Every rank must call it. ``given`` returns
    this rank's arguments, or raises if they cannot work.

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
    kinds = [_TensorKind(t.shape, t.dtype) for t in tensors]
    known = gather_or_raise(mesh.backend, "a batch", kinds, error, "refused its batch")
    assert spec is not None  # an error of this rank was raised by gather_or_raise
    if any(len(one) != len(known[0]) for one in known):
        raise ConfigError("with inputs='rank0' all ranks call with as many tensors; others' may be empty")
    filled = _broadcast_tensors(tensors, known[0], 0, mesh)
    batch: B = pytree.tree_unflatten([next(filled) if isinstance(one, torch.Tensor) else one for one in leaves], spec)
    return batch


class _TensorKind(NamedTuple):
    """Shape and dtype of a tensor that a rank is about to broadcast."""

    shape: torch.Size
    dtype: torch.dtype


def _broadcast_tensors(
    own: Sequence[torch.Tensor], kinds: Iterable[_TensorKind], rank: int, mesh: Mesh
) -> Iterator[torch.Tensor]:
    """Yield a rank's tensors, of known kinds, on all ranks. Only that rank's ``own`` are read."""
    for i, (shape, dtype) in enumerate(kinds):
        fresh = own[i].contiguous() if mesh.rank == rank else torch.empty(shape, dtype=dtype, device=mesh.device)
        yield mesh.broadcast(fresh, rank)


def gather_outputs(
    outputs: Sequence[Sequence[object]],
    axes: Sequence[int | None],
    summed: Sequence[bool],
    mesh: Mesh,
    every: bool,
    by_replica: bool,
) -> list[object]:
    """Gather the flat outputs of all micro-batches as those of one batch, on every rank.

    Args:
        outputs: outputs of this rank's micro-batches, if it has the last stage.
        axes: the dimension of rows of each output; None if it has no rows.
        summed: True for each output that is a sum over rows.
        mesh: the pipeline's ranks.
        every: True for the outputs of all replicas, in the order of the batch, instead of this rank's replica.
        by_replica: True if each replica has a batch of its own, and the whole batch is their concatenation.
    """
    known: list[Sequence[Sequence[object]]] = [outputs]
    if mesh.backend.size > 1:  # broadcasts are collectives: every rank takes part in those of all replicas
        known = [_broadcast_outputs(outputs, rank, mesh) for rank in mesh.ranks[-1]]
    wanted = known if every or not mesh.equal_replicas else [known[mesh.replica]]
    # a batch of all replicas was cut into micro-batches first, and each of them by replicas
    in_order = wanted if by_replica else zip(*wanted, strict=True)
    chunks = [chunk for one in in_order for chunk in one]
    outputs_of_chunks = zip(zip(*chunks, strict=True), axes, summed, strict=True)
    return [_concatenate(parts, axis, is_sum) for parts, axis, is_sum in outputs_of_chunks]


def _broadcast_outputs(outputs: Sequence[Sequence[object]], rank: int, mesh: Mesh) -> list[list[object]]:
    """Return a rank's outputs, on all ranks."""
    own = [one for chunk in outputs for one in chunk if isinstance(one, torch.Tensor)]
    kinds = [
        [_TensorKind(one.shape, one.dtype) if isinstance(one, torch.Tensor) else one for one in chunk]
        for chunk in outputs
    ]
    received = mesh.backend.allgather_object(kinds if mesh.rank == rank else None)[rank]
    sent = (kind for chunk in received for kind in chunk if isinstance(kind, _TensorKind))
    tensors = _broadcast_tensors(own, sent, rank, mesh)
    return [[next(tensors) if isinstance(kind, _TensorKind) else kind for kind in chunk] for chunk in received]


def _concatenate(parts: Sequence[object], axis: int | None, is_sum: bool) -> object:
    """Concatenate the rows of all micro-batches; add up sums over rows; average other values that have no rows and
    differ. A value that is no tensor is the same for all."""
    tensors = [one for one in parts if isinstance(one, torch.Tensor)]
    if not tensors:
        return parts[0]
    if axis is not None:
        return torch.cat(tensors, axis)
    if not is_sum and all(torch.equal(one, tensors[0]) for one in tensors):  # a weight, or a count of layers
        return tensors[0]
    dtype = tensors[0].dtype
    every = torch.stack(tensors)
    if is_sum and not (dtype.is_floating_point or dtype.is_complex):
        return every.sum(0).to(dtype)
    wide = every.to(torch.promote_types(dtype, torch.float64))
    return (wide.sum(0) if is_sum else wide.mean(0)).to(dtype)
