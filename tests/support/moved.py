"""How many bytes Triton's kernels load and store, counted in its interpreter from what they say."""

import contextlib
from collections.abc import Iterator
from typing import Any

from triton.runtime.interpreter import InterpreterBuilder


class Moved:
    """Bytes of elements that were read, and written; one that is changed in place is both."""

    read = written = 0

    @property
    def total(self) -> int:
        """Of both."""
        return self.read + self.written


@contextlib.contextmanager
def moved() -> Iterator[Moved]:
    """Counts what kernels move in this context; what a mask leaves out is not moved."""
    found, before = Moved(), {}

    def counted(method: str, mask_at: int, *sides: str) -> None:
        inner = before[method] = getattr(InterpreterBuilder, method)

        def call(self: Any, *args: Any) -> Any:
            pointers = next(arg for arg in args if hasattr(arg, "get_element_ty") and arg.dtype.scalar.is_ptr())
            nbytes = int(args[mask_at].data.sum()) * max(8, pointers.get_element_ty().primitive_bitwidth) // 8
            for side in sides:
                setattr(found, side, getattr(found, side) + nbytes)
            return inner(self, *args)

        setattr(InterpreterBuilder, method, call)

    counted("create_masked_load", 1, "read")
    counted("create_masked_store", 2, "written")
    counted("create_atomic_rmw", 3, "read", "written")
    try:
        yield found
    finally:
        for method, inner in before.items():
            setattr(InterpreterBuilder, method, inner)
