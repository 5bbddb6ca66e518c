"""Variables: the facts of a trainable parameter that the exchange and the strategies need."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Variable:
    """One trainable parameter, identified by its name, independent of the framework.

    >>> Variable("fc.weight", (10, 64)).describe()
    'float32[10, 64]'
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    device: str = "cpu"
    sparse: bool = False
    """True if its gradients are sparse rows."""

    @property
    def on_device(self) -> bool:
        """True if the variable lies on a device other than the CPU."""
        return self.device.partition(":")[0] not in ("", "cpu")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bits(self) -> int:
        """Bits per element."""
        return {"float16": 16, "bfloat16": 16, "float64": 64}.get(self.dtype, 32)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.bits // 8

    def describe(self) -> str:
        """Return type and shape, for messages."""
        return f"{'sparse ' if self.sparse else ''}{self.dtype}[{', '.join(map(str, self.shape))}]"


# Whole parts of a name only: at its start, or behind a dot.
WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def unwrap_names(names: Sequence[str]) -> list[str]:
    """Return variables' names without the parts that torch's wrappers (compile, FSDP, activation checkpoints, DDP) add,
    so that they are the same with a wrapper and without. If two names would become equal, all stay as they are.

    >>> unwrap_names(["module._orig_mod.fc.weight", "fc._checkpoint_wrapped_module.bias"])
    ['fc.weight', 'fc.bias']
    >>> unwrap_names(["module.w", "w"])
    ['module.w', 'w']
    """
    plain = [WRAPPERS.sub("", name).removeprefix("module.") for name in names]
    return plain if len(set(plain)) == len(plain) else list(names)


def equal_sizes(n: int, count: int) -> tuple[int, ...]:
    """Return ``count`` lengths with the sum n that differ by one at most, longer ones first.

    >>> equal_sizes(7, 3)
    (3, 2, 2)
    """
    small, larger = divmod(n, count)
    return tuple(small + (i < larger) for i in range(count))


def equal_bounds(n: int, count: int) -> list[tuple[int, int]]:
    """Return the begin and end of each part of n elements that are cut by :func:`equal_sizes`.

    >>> equal_bounds(5, 3)
    [(0, 2), (2, 4), (4, 5)]
    """
    return list(pairwise(accumulate((0, *equal_sizes(n, count)))))
