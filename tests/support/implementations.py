"""Every set of kernels, for tests that run on all of them."""

import os
from collections import Counter

import numpy as np
import pytest
import torch

from grace.kernels.fused.primitives import FusedKernels
from grace.kernels.torch.fused import FusedTorchKernels
from grace.kernels.torch.primitives import TorchKernels
from grace.kernels.triton.availability import missing
from tests.support.data import REFERENCE, SMALLEST, TINY
from tests.support.pairwise import pairwise
from tools.device import place

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this process runs Triton's kernels one by one in NumPy: then they are what is tested, and nothing else."""

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

    def suited(self, method, x):
        """float32 numbers as a kernel of this implementation sees them."""
        return x

    def floor(self, method):
        """An error of a kernel that is none, whatever the numbers are."""
        return 4 * TINY

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

    def __init__(self, kernels, exact=()):
        super().__init__(kernels)
        self.exact = exact

    def to(self, array):
        return tf.constant(np.array(array))

    @staticmethod
    def back(tensor):
        return np.array(tensor)

    def suited(self, method, x):
        """TensorFlow's own operations take what is below the smallest normal number for zeros."""
        return x if method in self.exact else np.where(np.abs(x) < SMALLEST, np.copysign(np.float32(0), x), x)

    def floor(self, method):
        return super().floor(method) if method in self.exact else 4 * SMALLEST


BITS = ("pack_signs", "topk", "above", "kth_magnitude", "round_powers")
"""What plain TensorFlow decides from the bits of numbers, the smallest ones too."""


class Traced:
    """Kernels called in graphs, of tensors whose first dimensions are not known before.

    A graph takes long to make: of a test's calls of one kernel, the first and then every 20th is one, and the others
    are eager and plain.
    """

    TOLD = ("name", "mutable", "dtype", "nbytes", "to_list", "host_buffer", "adopt")
    EVERY = 20

    def __init__(self, kernels):
        self.traced, self.calls = kernels, Counter()

    def __getattr__(self, method):
        kernel = getattr(self.traced, method)
        if method in self.TOLD:
            return kernel

        def call(*args):
            test = os.environ["PYTEST_CURRENT_TEST"], method
            self.calls[test] += 1
            if self.calls[test] % self.EVERY != 1:
                return getattr(PLAIN, method)(*args)
            leaves = tf.nest.flatten(args)
            places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, tf.Tensor)]
            specs = [tf.TensorSpec([None, *leaves[i].shape[1:]][: leaves[i].ndim], leaves[i].dtype) for i in places]

            @tf.function(input_signature=specs, autograph=False)
            def graph(*tensors):
                for i, tensor in zip(places, tensors, strict=True):
                    leaves[i] = tensor
                return kernel(*tf.nest.pack_sequence_as(args, leaves))

            return graph(*[leaves[i] for i in places])

        return call


OTHERS = [
    pytest.param(Implementation(FusedKernels()), id="fused"),
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
    from grace.kernels.tensorflow import fused
    from grace.kernels.tensorflow.primitives import TensorFlowKernels

    PLAIN = TensorFlowKernels()
    fused_kernels = fused.FusedTensorFlowKernels()
    fused.GRAPH_MINIMUM = 0  # graphs leave for Python whatever the size, so that small tests see it
    # of TensorFlow's, `make check` runs those that users get; the others start slowly, graphs above all
    OTHERS += [
        pytest.param(InTensorFlow(PLAIN, BITS), id="tensorflow", marks=pytest.mark.slow),
        pytest.param(InTensorFlow(fused_kernels, fused_kernels.FUSED), id="tensorflow-fused"),
        pytest.param(InTensorFlow(Traced(PLAIN), BITS), id="graph", marks=pytest.mark.slow),
        pytest.param(InTensorFlow(Traced(fused_kernels)), id="graph-fused", marks=pytest.mark.slow),
    ]


def crossed(implementations, names, *dimensions):
    """Parametrizes with ``it`` and more: so that all pairs of values meet."""
    chosen = pairwise(range(len(implementations)), *dimensions)
    cases = [(implementations[place], case) for place, *case in chosen]
    ids = ["-".join([it.id, *map(str, case)]) for it, case in cases]
    params = [pytest.param(*it.values, *case, marks=it.marks, id=i) for (it, case), i in zip(cases, ids, strict=True)]
    return pytest.mark.parametrize(("it", *names), params)


ALL = [pytest.param(Implementation(REFERENCE), id="numpy"), *OTHERS]
