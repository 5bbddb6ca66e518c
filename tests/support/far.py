"""CPU tensors that exchanges take for a device's."""

import contextlib
from collections.abc import Iterator

import torch

from grace.kernels.torch.fused import FusedTorchKernels, HalfTorchKernels
from grace.kernels.torch.primitives import TorchKernels


@contextlib.contextmanager
def as_far() -> Iterator[list[str]]:
    """In this context torch's tensors are said to lie on a device, flags of what is finite are tensors, and what is
    read is written down: "list" for the numbers of one tensor, "read" for those of several at once."""
    log: list[str] = []
    kinds = (TorchKernels, HalfTorchKernels, FusedTorchKernels)
    kept = {(kind, name): vars(kind)[name] for kind in kinds for name in FAR if name in vars(kind)}

    def logged(name, method):
        def call(self, given):
            log.append(name)
            return method(self, given)

        return call

    def flag(method):
        return lambda self, x, *most: torch.tensor(float(method(self, x, *most)))

    plain = TorchKernels.to_list
    TorchKernels.far = lambda self, x: True
    TorchKernels.to_list, TorchKernels.read = logged("list", plain), logged("read", TorchKernels.read)
    FusedTorchKernels.all_finite = flag(FusedTorchKernels.all_finite)
    try:
        yield log
    finally:
        for kind in kinds:
            for name in FAR:
                if (kind, name) in kept:
                    setattr(kind, name, kept[kind, name])


FAR = ("far", "to_list", "read", "all_finite")
