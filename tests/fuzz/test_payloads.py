"""Damaged payloads through every compressor and set of kernels: a refusal, or a tensor of the right shape."""

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grace.core.registry import make
from grace.errors import PayloadError
from grace.kernels import arrays_by
from grace.kernels.numba.primitives import NumbaKernels
from grace.kernels.torch import fused as torch_kernels
from tests.support.examples import examples

METHODS = (
    *("threshold(value=0.1)", "dgc(ratio=0.1)", "adaptive(ratio=0.1)", "inceptionn"),
    *(
        f"threshold(value=0.1) | {v}"
        for v in ("fp16", "qsgd(levels=7)", "natural", "terngrad", "efsignsgd", "dynamic8")
    ),
    *("threshold(value=0.1) | sketch", "dgc(ratio=0.2) | inceptionn"),
)
"""Methods whose payloads are of sizes that come off the wire."""


@contextlib.contextmanager
def computing_with(kernels):
    """Numbers as tensors that these kernels compute with."""
    if kernels == "fused":
        with arrays_by(NumbaKernels()):
            yield np.asarray
    elif kernels == "numpy":
        yield np.asarray
    elif kernels == "tensorflow":
        yield pytest.importorskip("tensorflow").constant
    else:
        before, torch_kernels._USE_FUSED = torch_kernels._USE_FUSED, kernels == "torch-fused"
        yield lambda array: torch.from_numpy(np.array(array))
        torch_kernels._USE_FUSED = before


def damaged(draw, array):
    """Another length, other bytes, or the same."""
    how = draw(st.sampled_from(["same", "cut", "longer", "bytes", "fill"]))
    if how == "cut":
        return array[: draw(st.integers(0, len(array)))]
    if how == "longer":
        return np.resize(array, (draw(st.integers(0, 1000)), *array.shape[1:])) if array.size else array
    raw = bytearray(array.tobytes())
    if how == "bytes" and raw:
        for _ in range(draw(st.integers(1, 4))):
            raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    elif how == "fill":
        raw = bytearray([draw(st.sampled_from([0, 127, 128, 255]))] * len(raw))
    return np.frombuffer(bytes(raw), array.dtype).reshape(array.shape).copy()


@pytest.mark.parametrize("kernels", ["numpy", "fused", "torch", "torch-fused", "tensorflow"])
@examples(20)
@given(st.data())
def test_a_damaged_payload_is_refused_or_decodes_to_the_shape(kernels, data):
    compressor, n = (
        make("compressor", data.draw(st.sampled_from(METHODS))),
        data.draw(st.sampled_from([1, 7, 100, 300])),
    )
    with computing_with(kernels) as to, np.errstate(all="ignore"):
        tensor = np.random.default_rng(n).standard_normal(n).astype(np.float32)
        payload, ctx = compressor.compress(to(tensor), "w")
        sent = [to(damaged(data.draw, np.array(part))) for part in payload]
        with contextlib.suppress(PayloadError):
            assert tuple(compressor.decompress(sent, ctx).shape) == (n,)
