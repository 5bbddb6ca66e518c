"""Variables: what the exchange and the strategies know of a trainable parameter."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Variable:
    """One trainable parameter, known by its name, in no framework's terms.

    >>> Variable("fc.weight", (10, 64)).describe()
    'float32[10, 64]'
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    device: str = "cpu"
    sparse: bool = False
    """Whether its gradients come as rows."""

    @property
    def on_device(self) -> bool:
        """Whether it lies on a device, as torch calls them."""
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
        """Type and shape, for messages."""
        return f"{'sparse ' if self.sparse else ''}{self.dtype}[{', '.join(map(str, self.shape))}]"


WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def unwrapped(names: Sequence[str]) -> list[str]:
    """Variables' names without what torch's wrappers (compile, FSDP, activation checkpoints, DDP) put into them, so
    that they are the same with a wrapper and without; as they are, if two would become equal.

    >>> unwrapped(["module._orig_mod.fc.weight", "fc._checkpoint_wrapped_module.bias"]), unwrapped(["module.w", "w"])
    (['fc.weight', 'fc.bias'], ['module.w', 'w'])
    """
    plain = [WRAPPERS.sub("", name).removeprefix("module.") for name in names]
    return plain if len(set(plain)) == len(plain) else list(names)


def equal_sizes(n: int, count: int) -> tuple[int, ...]:
    """n cut into ``count`` lengths that differ by one at most, longer ones first.

    >>> equal_sizes(7, 3)
    (3, 2, 2)
    """
    small, larger = divmod(n, count)
    return tuple(small + (i < larger) for i in range(count))


def equal_bounds(n: int, count: int) -> list[tuple[int, int]]:
    """Where each of these begins and ends.

    >>> equal_bounds(5, 3)
    [(0, 2), (2, 4), (4, 5)]
    """
    return list(pairwise(accumulate((0, *equal_sizes(n, count)))))
