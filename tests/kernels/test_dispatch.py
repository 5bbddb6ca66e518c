"""Choice of kernels, and their treatment of layouts."""

import numpy as np
import pytest
import torch

from grace.kernels import Kernels, Stream, kernels_of
from grace.kernels.torch.fused import FusedTorchKernels
from tests.support.data import REFERENCE, data, same
from tests.support.implementations import ALL, memory, tf
from tests.support.kernel_cases import every

SHARED = {
    "given", "eagerly", "addresses", "memory", "on_device", "read", "blank", "random_matrix", "renew_columns",
    "to_host", "to_device_of", "wait_for", "host_buffer",
}  # fmt: skip
"""Methods that are made of others, say that a framework lacks something, or compute nothing. Frameworks override all
others."""


def test_fused_kernels_take_strided_tensors_and_change_strided_out_in_place():
    k, stream = FusedTorchKernels(), Stream(1)
    base = torch.from_numpy(data("heavy", 2001))
    x, dense = base[::2], base[::2].numpy().copy()
    same(k.topk(x, 50).numpy(), REFERENCE.topk(dense, 50))
    same(k.pack_signs(x).numpy(), REFERENCE.pack_signs(dense))
    codes, scales = k.quantize(x, 127, 64, "max", stream)
    wanted = REFERENCE.quantize(dense, 127, 64, "max", stream)
    same(codes.numpy(), wanted[0])
    same(scales.numpy(), wanted[1])
    out = torch.zeros(20)
    k.scatter_add(out[::2], torch.tensor([1, 3], dtype=torch.int32), torch.tensor([5.0, 6.0]), 1.0)
    assert out.nonzero().view(-1).tolist() == [2, 6]


@every
def test_methods_with_out_change_it_in_place_where_tensors_can_change(it):
    k = it.kernels
    out = first = it.to(np.zeros(4, np.float32))
    indices, values = it.to(np.int32([0, 3])), it.to(np.float32([1, 2]))
    out = k.scatter_add(out, indices, values, 1.0)
    out = k.add_signs(out, it.to(np.uint8([0b0101])), None, 1.0)
    out = k.dequantize(out, it.to(np.uint8([2, 1, 1, 0])), it.to(np.float32([10])), 1, 4, 1.0)
    out = k.add(out, it.to(np.float32([0, 100, 0, 0])))
    assert it.back(out).tolist() == [12, 99, 1, -9]
    assert it.back(first).tolist() == ([12, 99, 1, -9] if k.mutable else [0, 0, 0, 0])


def test_kernels_are_found_by_the_tensors_type():
    assert kernels_of(np.zeros(1)).name == "numpy"
    assert kernels_of(torch.zeros(1)).name == "torch-fused"
    assert kernels_of(torch.nn.Parameter(torch.zeros(1))).name == "torch-fused"
    with pytest.raises(TypeError, match=r"no kernels for builtins\.list"):
        kernels_of([1.0])


@pytest.mark.skipif(tf is None, reason="TensorFlow is not installed")
def test_kernels_are_found_for_tensorflow_eagerly_and_in_graphs():
    names = []
    x = tf.constant([1.0])
    tf.function(lambda tensor: names.append(kernels_of(tensor).name))(x)
    assert [kernels_of(x).name, kernels_of(tf.Variable(x)).name, *names] == ["tensorflow-fused"] * 3


@pytest.mark.skipif(tf is None, reason="TensorFlow is not installed")
def test_memory_that_tensorflow_would_refuse_is_copied():
    for start in range(0, 72, 4):
        array = np.zeros(200, np.uint8)[start : start + 80].view(np.float32)
        assert (memory.as_tensor(array) + 1).numpy().tolist() == [1.0] * 20


def test_frameworks_inherit_no_kernel_that_computes_with_numpy():
    """They would be compared with themselves."""
    kernels = {name for name, member in vars(Kernels).items() if callable(member) and not name.startswith("_")}
    for param in ALL:
        if param.id not in ("numpy", "fused") and param.values[0] is not None:
            kind = type(param.values[0].kernels)
            assert {name for name in kernels if getattr(kind, name) is getattr(Kernels, name)} <= SHARED, kind
