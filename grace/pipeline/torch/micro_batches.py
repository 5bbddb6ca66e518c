"""Rows of a batch that a rank computes with."""

from collections.abc import Sequence
from typing import Any

import torch

from grace.errors import ConfigError
from grace.pipeline.torch.mesh import Placement


def count_rows(flat: Sequence[Any], whole: Sequence[bool] | None = None) -> int:
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


def slice_rows(flat: Sequence[Any], rows: int, low: int, high: int, whole: Sequence[bool] | None = None) -> list[Any]:
    """Return rows ``low`` to ``high`` of all tensors that have as many rows as the batch; all other values as they are.

    >>> [one.tolist() for one in slice_rows([torch.arange(4), torch.ones(2)], 4, 2, 4)]
    [[2, 3], [1.0, 1.0]]
    """
    values = []
    for i, one in enumerate(flat):
        has_rows = isinstance(one, torch.Tensor) and one.ndim > 0 and one.shape[0] == rows and not (whole and whole[i])
        values.append(one[low:high] if has_rows else one)
    return values


def micro_batches(
    flat: Sequence[Any],
    rows: int,
    count: int,
    placement: Placement,
    is_global: bool,
    whole: Sequence[bool] | None = None,
) -> list[list[Any]]:
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
