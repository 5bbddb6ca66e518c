"""What second compressions of shards left out, given back to residuals where a run has other shards, or none.

Under scatter_reduce rank j keeps e_j, what its shard of the mean lacked. A run on another number of ranks cuts other
shards, and one with another communicator none. Nothing is lost if every rank adds e = (e_0, ..., e_{W-1}) to its own
residual, because the mean over ranks then has e once more; or, where only a rank's own state is at hand, if rank j
adds W e_j in its shard.
"""

import math
from collections.abc import Sequence
from typing import Any

from grace.core.variable import equal_bounds
from grace.kernels import kernels_of


def joined(kept: Sequence[Any], shape: Sequence[int], weight: float = 1.0) -> Any:
    """One value of the whole tensor, of what the ranks kept of its shards; None if these are not of such shards.

    Args:
        kept: by rank: a tensor, or a dict of tensors and numbers; None where that is zeros, or not known.
        shape: of the whole.
        weight: of what is joined.

    >>> import numpy as np
    >>> joined([np.float32([1, 2]), None], (3,), weight=2.0)
    array([2., 4., 0.], dtype=float32)
    """
    some = next(value for value in kept if value is not None)
    if isinstance(some, dict):
        found = {}
        for key, one in some.items():
            each = [None if value is None else value.get(key) for value in kept]
            found[key] = joined(each, shape, weight) if hasattr(one, "shape") else one
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


def added(own: Any, more: Any) -> Any:
    """Two values of a memory in one, as their tensors add up; None if numbers beside them differ.

    >>> added({"residual": 1.0, "lr": 0.5}, {"residual": 2.0, "lr": 0.25}) is None
    True
    """
    if own is None:
        return more
    if not isinstance(own, dict):
        return own + more
    sums = {key: own[key] + one if hasattr(one, "shape") else one for key, one in more.items()}
    return sums if all(hasattr(one, "shape") or one == own[key] for key, one in more.items()) else None
