"""Which rows of a batch a rank computes with."""

from collections.abc import Sequence
from typing import Any

import torch

from grace.errors import ConfigError
from grace.torch.pipeline.point_to_point import Place


def rows_of(flat: Sequence[Any], whole: Sequence[bool] | None = None) -> int:
    """Rows of a batch: the first dimension of its first tensor that has one.

    Raises:
        ConfigError: it has no such tensor.

    >>> rows_of([2.5, torch.ones(6, 2)])
    6
    """
    for i, one in enumerate(flat):
        if isinstance(one, torch.Tensor) and one.ndim and not (whole and whole[i]):
            return int(one.shape[0])
    raise ConfigError(
        "the model's inputs have no tensor with rows: a pipeline cuts its batch into micro-batches by rows"
    )


def cut_rows(flat: Sequence[Any], rows: int, low: int, high: int, whole: Sequence[bool] | None = None) -> list[Any]:
    """Rows ``low`` to ``high`` of all tensors that have as many rows as the batch; others as they are.

    >>> [one.tolist() for one in cut_rows([torch.arange(4), torch.ones(2)], 4, 2, 4)]
    [[2, 3], [1.0, 1.0]]
    """
    found = []
    for i, one in enumerate(flat):
        has = isinstance(one, torch.Tensor) and one.ndim > 0 and one.shape[0] == rows and not (whole and whole[i])
        found.append(one[low:high] if has else one)
    return found


def micro_batches(
    flat: Sequence[Any], rows: int, count: int, place: Place, is_global: bool, whole: Sequence[bool] | None = None
) -> list[list[Any]]:
    """This rank's rows of each micro-batch.

    Args:
        flat: a batch's tensors and other values.
        rows: of the batch.
        count: of micro-batches.
        place: where this rank stands; of each micro-batch of M rows it has [r M/R, (r+1) M/R).
        is_global: whether the batch is that of all replicas, and not this one's already.
        whole: of each of ``flat``, whether it has no rows whatever its shape is.

    Raises:
        ConfigError: the rows cannot be divided.

    >>> [one[0].tolist() for one in micro_batches([torch.arange(8)], 8, 2, Place((0, 1), 1), True)]
    [[2, 3], [6, 7]]
    """
    replicas = len(place.ranks) if is_global else 1
    if rows % (count * replicas) or not rows:
        raise ConfigError(
            f"a batch of {rows} rows cannot be cut into {count} micro-batches"
            + (f" for {replicas} replicas" if replicas > 1 else "")
            + f": give a multiple of {count * replicas} rows (drop_last=True leaves a smaller last batch out)"
        )
    size, found = rows // count, []
    own = size // replicas
    for chunk in range(count):
        low = chunk * size + (place.replica * own if is_global else 0)
        found.append(cut_rows(flat, rows, low, low + own, whole))
    return found
