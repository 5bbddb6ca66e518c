"""Bytes of tensors that are alive, counted operation by operation."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages of tensors that operations read or make in this context, from when they are seen until they
    are freed.

    Args:
        there: tensors that are alive from the beginning.
        others: tensors that do not count.

    Attributes:
        now: bytes that are alive.
        peak: most bytes that were alive at once.
    """

    def __init__(self, there=(), others=()):
        super().__init__()
        self.alive, self.now, self.peak = {}, 0, 0
        for tensor in others:
            self.alive[tensor.untyped_storage()._cdata] = None
        for tensor in there:
            self._see(tensor)

    def _see(self, tensor):
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self.alive:
            return

        def freed(_):
            del self.alive[key]
            self.now -= nbytes

        self.alive[key] = weakref.ref(storage, freed)
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self._see(tensor)
        return result
