"""Every set of kernels, for tests that run on all of them."""

import os

import numpy as np
import pytest
import torch

from grace.kernels.numba.primitives import NumbaKernels
from grace.kernels.torch.fused import FusedTorchKernels
from grace.kernels.torch.primitives import TorchKernels
from grace.kernels.triton.availability import missing
from tests.support.data import REFERENCE
from tests.support.grouping import in_groups
from tests.support.pairwise import pairwise
from tools.device import place

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""True if this process runs Triton's kernels one by one in NumPy: then nothing else is tested."""

try:
    if INTERPRETED:  # and TensorFlow is not loaded
        raise ImportError
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    from grace.kernels.tensorflow import interop as memory
except ImportError:
    tf = memory = None


class Implementation:
    """One set of kernels, with the way from NumPy arrays to its tensors and back."""

    def __init__(self, kernels, device=None):
        self.kernels, self.device = kernels, device

    def to(self, array):
        """A copy of a NumPy array as this implementation's tensor."""
        copy = np.array(array)
        return copy if self.device is None else torch.from_numpy(copy).to(self.device)

    @staticmethod
    def back(tensor):
        """Any result as a NumPy array."""
        return tensor.cpu().numpy() if isinstance(tensor, torch.Tensor) else np.asarray(tensor)

    def run(self, method, *args):
        """Call a kernel with NumPy arguments; NumPy results."""
        args = [self.to(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
        result = getattr(self.kernels, method)(*args)
        return tuple(map(self.back, result)) if isinstance(result, tuple) else self.back(result)


class InTensorFlow(Implementation):
    """Kernels for TensorFlow tensors."""

    def to(self, array):
        return tf.constant(np.array(array))

    @staticmethod
    def back(tensor):
        return np.array(tensor)


OTHERS = [
    pytest.param(Implementation(NumbaKernels()), id="fused"),
    pytest.param(Implementation(TorchKernels(), "cpu"), id="torch"),
    pytest.param(Implementation(FusedTorchKernels(), "cpu"), id="torch-fused"),
]
"""Every implementation that must equal the reference."""
if torch.cuda.is_available():
    OTHERS.append(pytest.param(Implementation(TorchKernels(), "cuda"), id="cuda"))
    if not missing():
        from grace.kernels.triton.primitives import TritonKernels

        OTHERS.append(pytest.param(Implementation(TritonKernels(), "cuda"), id="triton"))

if INTERPRETED:
    from grace.kernels.triton.primitives import TritonKernels

    place.hasten_interpreter()
    OTHERS = [pytest.param(Implementation(TritonKernels(), "cpu"), id="triton")]
elif tf is None:
    OTHERS.append(pytest.param(None, id="tensorflow", marks=pytest.mark.skip(reason="TensorFlow is not installed")))
else:
    from grace.kernels.tensorflow.primitives import TensorFlowKernels

    # `make check` runs what users get
    OTHERS += [
        pytest.param(InTensorFlow(TensorFlowKernels(compiled=False)), id="tensorflow", marks=pytest.mark.slow),
        pytest.param(InTensorFlow(TensorFlowKernels(compiled=True)), id="tensorflow-fused"),
    ]


def crossed(implementations, names, *dimensions):
    """Run a test with ``it`` and more, so that all pairs of values meet, all cases of an implementation at once."""
    chosen = pairwise(range(len(implementations)), *dimensions)
    cases = [pytest.param(*implementations[i].values, *case, marks=implementations[i].marks) for i, *case in chosen]
    ids = {it.values[0]: it.id for it in implementations}
    return in_groups(("it", *names), cases, lambda it, *_: ids[it])


ALL = [pytest.param(Implementation(REFERENCE), id="numpy"), *OTHERS]
