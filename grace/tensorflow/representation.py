"""Representation of eager tensors in an exchange: the tensors themselves, or NumPy arrays of their memory.

NumPy's arrays can change in place and be cut without a copy, and their operations start in a microsecond where
TensorFlow's take tens. So methods of ours, on CPUs, run on arrays; a user's own get tensors.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from grace.core.component import Component
from grace.core.variable import Variable
from grace.exchange.bucket import Bucket
from grace.exchange.sparse_rows import SparseRows
from grace.kernels import arrays_by
from grace.kernels.numba.availability import missing
from grace.kernels.tensorflow.host import host_kernels
from grace.kernels.tensorflow.interop import aligned_empty, as_array, as_tensor
from grace.session.step_runner import StepRunner


class Tensors:
    """Representation of an exchange that computes with tensors."""

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Return the context that the exchange runs in."""
        return contextlib.nullcontext()

    def from_tensor(self, value: "tf.Tensor | np.ndarray") -> "tf.Tensor | np.ndarray":
        """Convert a tensor, or a saved array, to the tensor that the exchange computes with."""
        return tf.constant(value) if isinstance(value, np.ndarray) else value

    def to_tensor(self, value: "tf.Tensor | np.ndarray") -> tf.Tensor:
        """Return the tensor of a result of the exchange."""
        return value

    def outs(self, bucket: Bucket) -> list[np.ndarray | None]:
        """Return the arrays that a bucket's aggregates are written to; None where the exchange allocates the result."""
        return [None] * len(bucket.variables)


class Arrays(Tensors):
    """Representation of an exchange that computes with NumPy arrays, by the compiled kernels.

    Memory that aggregates were written to is used again once their tensors are gone: to touch new memory costs more
    than to compute.
    """

    def __init__(self) -> None:
        self.memory: dict[str, tuple[np.ndarray, weakref.ref]] = {}

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        with arrays_by(host_kernels()), np.errstate(all="ignore"):
            yield

    def from_tensor(self, value: "tf.Tensor | np.ndarray") -> np.ndarray:
        if isinstance(value, np.ndarray):  # tested first: tf.is_tensor takes long to deny an array
            return value
        return as_array(value) if tf.is_tensor(value) else value

    def to_tensor(self, value: "tf.Tensor | np.ndarray") -> tf.Tensor:
        return as_tensor(value)

    def outs(self, bucket: Bucket) -> list[np.ndarray | None]:
        exact = bucket.communicator.compressor.traits.exact
        return [None if v.sparse else self._out(v, v.dtype if exact else "float32") for v in bucket.variables]

    def _out(self, variable: Variable, dtype: str) -> np.ndarray:
        array, loan_ref = self.memory.get(variable.name, (None, None))
        # a tensor of an earlier step still uses the memory, or there is none yet
        if array is None or loan_ref is None or loan_ref() is not None:
            array = aligned_empty(variable.numel, dtype)
        loan = _Loan(array)
        self.memory[variable.name] = array, weakref.ref(loan)
        return np.asarray(loan).view(array.dtype).reshape(variable.shape)


class _Loan:
    """Owner of an array's memory for as long as any view or tensor of it lives."""

    def __init__(self, array: np.ndarray):
        self.array, self.__array_interface__ = array, array.__array_interface__


def from_tensors(representation: Tensors, value: Any) -> Any:
    """Convert a gradient, or the tensors in nested dicts and lists of a saved state, to those that an exchange computes
    with."""
    if isinstance(value, dict):
        return {key: from_tensors(representation, item) for key, item in value.items()}
    if isinstance(value, SparseRows):
        return SparseRows(*map(representation.from_tensor, value))
    return (
        [from_tensors(representation, item) for item in value]
        if isinstance(value, list)
        else representation.from_tensor(value)
    )


def representation_of(runner: StepRunner) -> Tensors:
    """Return the representation that a runner computes with."""
    return representation_for([*runner.communicators, *(part for _, part in runner.components)])


def representation_for(components: Iterable[Component]) -> Tensors:
    """Return the representation for components: arrays where all are Grace's own, on CPUs, with Numba; else tensors."""
    ours = all(_is_ours(component) for component in components)
    return Arrays() if ours and not missing() and not tf.config.list_logical_devices("GPU") else Tensors()


def _is_ours(component: Component) -> bool:
    parts = [part for part in vars(component).values() if isinstance(part, Component)]
    return type(component).__module__.startswith("grace.") and all(map(_is_ours, parts))
