"""CPU tensors that exchanges take for a device's."""

import contextlib
from collections.abc import Iterator

import torch

from grace.kernels.torch import fused
from grace.kernels.torch.fused import FusedTorchKernels
from grace.kernels.torch.primitives import TorchKernels


@contextlib.contextmanager
def as_far(plain: bool = False) -> Iterator[list[str]]:
    """Treat torch's tensors as if they were on a device, in this context: flags of finite values are tensors, and reads
    are logged, "list" for the numbers of one tensor, "read" for those of several at once. ``plain`` is for torch's own
    operations, which leave out positions that are not there as a device's kernels do."""
    log: list[str] = []
    kinds = (TorchKernels, FusedTorchKernels)
    kept = {(kind, name): vars(kind)[name] for kind in kinds for name in FAR if name in vars(kind)}

    def logged(name, method):
        def call(self, given):
            log.append(name)
            return method(self, given)

        return call

    def flag(method):
        return lambda self, x, *most: torch.tensor(float(method(self, x, *most)), device=x.device)

    one, fast = TorchKernels.to_list, fused._USE_FUSED
    TorchKernels.on_device = lambda self, x: True
    TorchKernels.to_list, TorchKernels.read = logged("list", one), logged("read", TorchKernels.read)
    TorchKernels.all_finite = flag(TorchKernels.all_finite)
    FusedTorchKernels.all_finite = flag(FusedTorchKernels.all_finite)
    fused._USE_FUSED = fast and not plain
    try:
        yield log
    finally:
        fused._USE_FUSED = fast
        for kind in kinds:
            for name in FAR:
                if (kind, name) in kept:
                    setattr(kind, name, kept[kind, name])


FAR = ("on_device", "to_list", "read", "all_finite")
