"""What an exchange of eager tensors computes with: the tensors, or NumPy arrays of their memory.

NumPy's arrays can change in place and be cut without a copy, and their operations start in a microsecond where
TensorFlow's take tens. So methods of ours, on CPUs, run on arrays; a user's own get tensors.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from grace.component import Component
from grace.exchange import Group
from grace.kernels import arrays_by
from grace.tensorflow.fused import fused_available
from grace.tensorflow.memory import aligned_empty, as_array, as_tensor
from grace.variable import Variable

NARROW = {"float16", "bfloat16"}


class Tensors:
    """The exchange computes with tensors."""

    def computing(self) -> Any:
        """The context that the exchange runs in."""
        return contextlib.nullcontext()

    def inside(self, value: Any) -> Any:
        """A tensor as the exchange takes it; likewise what was saved."""
        return tf.constant(value) if isinstance(value, np.ndarray) else value

    def outside(self, value: Any) -> tf.Tensor:
        """The tensor of what the exchange gives."""
        return value

    def outs(self, group: Group) -> list[Any]:
        """Where a group's aggregates are written; None where the exchange is to make something new."""
        return [None] * len(group.variables)


class Arrays(Tensors):
    """The exchange computes with NumPy arrays, by the compiled kernels.

    Memory that aggregates were written to is used again once their tensors are gone: to touch new memory costs more
    than to compute.
    """

    def __init__(self) -> None:
        self.memory: dict[str, tuple[np.ndarray, weakref.ref]] = {}

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        with arrays_by(_host_kernels()), np.errstate(all="ignore"):
            yield

    def inside(self, value: Any) -> Any:
        return as_array(value) if tf.is_tensor(value) else value

    def outside(self, value: Any) -> tf.Tensor:
        return as_tensor(value)

    def outs(self, group: Group) -> list[Any]:
        exact = group.communicator.compressor.traits.exact
        return [None if v.sparse else self._out(v, v.dtype if exact else "float32") for v in group.variables]

    def _out(self, variable: Variable, dtype: str) -> np.ndarray:
        kept, lent = self.memory.get(variable.name, (None, None))
        if kept is None or lent is None or lent() is not None:
            kept = aligned_empty(variable.numel, dtype)
        loan = _Loan(kept)
        self.memory[variable.name] = kept, weakref.ref(loan)
        return np.asarray(loan).view(kept.dtype).reshape(variable.shape)


class _Loan:
    """Owns an array's memory for as long as any view or tensor of it lives."""

    def __init__(self, array: np.ndarray):
        self.array, self.__array_interface__ = array, array.__array_interface__


def medium_for(components: Iterable[Component]) -> Tensors:
    """Arrays where all components are Grace's own, on CPUs, with Numba; else tensors."""
    ours = all(_is_ours(component) for component in components)
    return Arrays() if ours and fused_available() and not tf.config.list_logical_devices("GPU") else Tensors()


def _is_ours(component: Any) -> bool:
    parts = [part for part in vars(component).values() if isinstance(part, Component)]
    return type(component).__module__.startswith("grace.") and all(map(_is_ours, parts))


@functools.cache
def _host_kernels() -> Any:
    from grace.kernels.fused import FusedKernels

    class HostKernels(FusedKernels):
        """The compiled kernels, with results that TensorFlow takes without a copy, and bfloat16."""

        empty = staticmethod(aligned_empty)

        def cast(self, x, dtype):
            if x.dtype.name == dtype or not {x.dtype.name, dtype} & NARROW:
                return super().cast(x, dtype)
            return as_array(tf.cast(as_tensor(x), dtype))  # which NumPy does one by one

        def add(self, out, x, weight=1.0):
            narrow = x.dtype.name in NARROW and out.dtype == np.float32
            return super().add(out, self.cast(x, "float32") if narrow else x, weight)

        def divide(self, out, x, by):
            if x.dtype.name not in NARROW:
                return super().divide(out, x, by)
            wide = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
            super().divide(wide, self.cast(x, "float32"), by)
            if out is not wide:
                out[...] = self.cast(wide, out.dtype.name)
            return out

        def join(self, tensors, out=None):
            if out is None:
                out = aligned_empty(sum(tensor.size for tensor in tensors), tensors[0].dtype)
            return np.concatenate(tensors, out=out)

        def host_buffer(self, n):
            return aligned_empty(n, np.uint8)

    return HostKernels()
