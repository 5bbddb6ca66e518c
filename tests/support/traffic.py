"""Counts what Triton's kernels read and write, by their loads and stores in the interpreter."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Traffic:
    """Launches, and the bytes of all loads and stores, which must be aligned: of one, each address once. Tables of
    constants, which stay in the caches, are left out.

    Attributes:
        apart: the tensors that are counted apart, in ``told``, each address once in all: what kernels are told.
    """

    apart: Callable[[], Sequence[Any]] = tuple
    launches: int = 0
    nbytes: int = 0
    told: dict[int, int] = field(default_factory=dict)

    def add(self, pointers, mask) -> None:
        from grace.kernels.torch.copies import CONSTANTS

        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        places = np.unique(np.asarray(pointers.data)[np.asarray(mask.data)])
        assert not (places % size).any(), "GPUs read and write at multiples of the size"
        constants, apart = [table for _, table in CONSTANTS.values()], self.apart()
        for tensor in [*constants, *apart]:
            start = tensor.data_ptr()
            inside = (places >= start) & (places < start + tensor.nbytes)
            if any(tensor is one for one in apart):
                self.told |= dict.fromkeys(places[inside].tolist(), size)
            places = places[~inside]
        self.nbytes += size * places.size


@contextlib.contextmanager
def counted(apart: Callable[[], Sequence[Any]] = tuple) -> Iterator[Traffic]:
    """Count the traffic of kernels that are launched in this context."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    traffic = Traffic(apart)
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    atomic, start = InterpreterBuilder.create_atomic_rmw, GridExecutor.__call__

    def loading(self, pointers, mask, *rest):
        traffic.add(pointers, mask)
        return load(self, pointers, mask, *rest)

    def storing(self, pointers, value, mask, *rest):
        traffic.add(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def changing(self, operation, pointers, value, mask, *rest):
        traffic.add(pointers, mask)
        return atomic(self, operation, pointers, value, mask, *rest)

    def starting(self, *args, **kwargs):
        traffic.launches += 1
        return start(self, *args, **kwargs)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = loading, storing
    InterpreterBuilder.create_atomic_rmw, GridExecutor.__call__ = changing, starting
    try:
        yield traffic
    finally:
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
        InterpreterBuilder.create_atomic_rmw, GridExecutor.__call__ = atomic, start
