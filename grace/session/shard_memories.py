"""Memories of shards' second compressions, added to residuals if a run has other shards, or none.

Under scatter_reduce rank j keeps e_j, the part that was left out of its shard of the mean. A run on another number of
ranks cuts other shards, and a run with another communicator none. Nothing is lost if every rank adds
e = (e_0, ..., e_{W-1}) to its own residual, because the mean over ranks then contains e once; or, if only the rank's
own state is available, if rank j adds W e_j in its shard.
"""

import math
from collections.abc import Sequence
from typing import Any

from grace.core.variable import equal_bounds
from grace.kernels import kernels_of


def join_shards(kept: Sequence[Any], shape: Sequence[int], weight: float = 1.0) -> Any:
    """Return the value of a whole tensor from the ranks' values of its shards; None if the shards are cut otherwise.

    Args:
        kept: values by rank: a tensor, or a dict of tensors and numbers; None for zeros, or an unknown value.
        shape: the shape of the whole tensor.
        weight: factor of the values.

    >>> import numpy as np
    >>> join_shards([np.float32([1, 2]), None], (3,), weight=2.0)
    array([2., 4., 0.], dtype=float32)
    """
    some = next(value for value in kept if value is not None)
    if isinstance(some, dict):
        found = {}
        for key, one in some.items():
            each = [None if value is None else value.get(key) for value in kept]
            found[key] = join_shards(each, shape, weight) if hasattr(one, "shape") else one
        return None if any(value is None for value in found.values()) else found
    k = kernels_of(some)
    pieces = []
    for value, (a, b) in zip(kept, equal_bounds(math.prod(shape), len(kept)), strict=True):
        if value is None:
            pieces.append(k.zeros((b - a,), "float32", some))
        elif tuple(value.shape) == (b - a,):
            pieces.append(value * weight)
        else:
            return None
    return k.reshape(k.join(pieces), tuple(shape))


def add_values(own: Any, more: Any) -> Any:
    """Return the sum of two values of a memory; None if they hold numbers that differ.

    >>> add_values({"residual": 1.0, "lr": 0.5}, {"residual": 2.0, "lr": 0.25}) is None
    True
    """
    if own is None:
        return more
    if not isinstance(own, dict):
        return own + more
    sums = {key: own[key] + one if hasattr(one, "shape") else one for key, one in more.items()}
    return sums if all(hasattr(one, "shape") or one == own[key] for key, one in more.items()) else None
