"""Which methods make the host wait for a GPU: on the meta device, what would be read back raises."""

import contextlib

import pytest
import torch

from grace.kernels.torch import fused
from grace.kernels.torch.primitives import TorchKernels
from tests.support.methods import make
from tests.support.training import SPECS

pytest.importorskip("triton")
METHODS = [*SPECS, "topk(ratio=0.001)", "randomk(ratio=0.001)", "block(format=fp8)", "block(hadamard=32)"]
BY_DATA = {"threshold(value=0.001)", "dgc(ratio=0.1)", "adaptive(ratio=0.1)", "inceptionn"}
"""Whose payload's size depends on the data."""
BY_TORCH = {f"{method}(ratio={ratio})" for method in ("topk", "randomk") for ratio in (0.1, 0.001)}
BY_TORCH |= {"topk(ratio=0.1) | qsgd(levels=7)"}
"""Which wait without Triton only."""


def waits(spec: str, phase: str) -> bool:
    """Whether encoding, or decoding what two ranks sent, reads something back."""
    from grace.kernels.triton.launching import recorded

    compressor, x = make(spec), torch.empty(1 << 15, 8, device="meta")
    with recorded(), contextlib.suppress(StopIteration):
        try:
            if compressor.traits.rounds > 1:  # each payload is decoded where it is answered
                rounds = compressor.exchange(x, "w")
                payload = next(rounds)
                while True:
                    payload = rounds.send(payload)
            payload, ctx = compressor.compress(x, "w")
            if phase == "decode":
                compressor.aggregate([payload, payload], ctx, torch.empty_like(x), 2.0)
        except (NotImplementedError, RuntimeError) as error:
            assert "nonzero" in str(error) or "item" in str(error)  # noqa: PT017 - others are mistakes
            return True
    return False


@pytest.fixture(params=["torch", "triton"])
def kernels(request, monkeypatch):
    """Those that a tensor on the meta device gets, in place of a GPU's."""
    from grace.kernels.triton.primitives import KERNELS

    monkeypatch.setattr(fused, "_PLAIN", KERNELS if request.param == "triton" else TorchKernels())
    return request.param


def test_methods_wait_for_the_device_only_where_the_size_of_what_they_send_is_in_the_data(kernels):
    wanted = BY_DATA | BY_TORCH if kernels == "torch" else BY_DATA
    for phase in ("encode", "decode"):
        assert {spec for spec in METHODS if waits(spec, phase)} == wanted
