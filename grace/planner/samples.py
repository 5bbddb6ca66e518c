"""Parts of gradients, of any framework, and how large they are."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from grace.errors import ConfigError
from grace.exchange.sparse_rows import SparseRows
from grace.kernels import kernels_of


def dense_values(name: str, gradient: Any) -> Any:
    """The values of a gradient, whether it is sparse or not.

    Raises:
        ConfigError: they are of a dtype that is not exchanged.
    """
    x = gradient.values if isinstance(gradient, SparseRows) else gradient
    try:
        return kernels_of(x).given(x)
    except ConfigError as error:
        raise ConfigError(f"the gradient of {name!r}: {error}") from None


def numel(x: Any) -> int:
    """How many elements."""
    return math.prod(map(int, x.shape))


def shortened(x: Any, most: int) -> Any:
    """The first rows of it, of no more than so many elements, if a row has no more."""
    if numel(x) <= most or not len(x.shape):
        return x
    return x[: max(1, most // max(1, numel(x) // int(x.shape[0])))]


def copied(x: Any) -> Any:
    """The same in memory of its own."""
    k = kernels_of(x)
    return k.reshape(k.join([k.flat(x)]), tuple(x.shape))


def _array(x: Any) -> np.ndarray:
    x = kernels_of(x).cast(x, "float64")
    return np.asarray(x.cpu() if hasattr(x, "cpu") else x)


def square(name: str, x: Any) -> float:
    """|x|^2.

    Raises:
        ConfigError: it is not finite.
    """
    total = float(np.square(_array(x)).sum())
    if not math.isfinite(total):
        raise ConfigError(f"the gradient of {name!r} holds a NaN or an infinite value; measure another step's")
    return total


def distance(x: Any, other: Any) -> float:
    """|x - other|^2."""
    return float(np.square(_array(x) - _array(other)).sum())


def scale_of(name: str, x: Any, part: Any) -> float:
    """How much more |x|^2 is than a part's; by their numbers of elements, if the part is zero."""
    if x is part:
        return 1.0
    some = square(name, part)
    return square(name, x) / some if some > 0 else numel(x) / numel(part)


def share_of(tensors: Mapping[str, Any], elements: int) -> dict[str, Any]:
    """The first rows of each, in proportion, so that they have about so many elements; all, if they have no more."""
    share = elements / sum(map(numel, tensors.values()))
    if share >= 1:
        return dict(tensors)
    return {name: shortened(x, max(1, int(share * numel(x)))) for name, x in tensors.items()}
