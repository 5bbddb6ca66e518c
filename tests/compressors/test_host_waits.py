"""Methods and exchanges that make the host wait for a GPU: on the meta device a read raises, but for the one of all
buckets at the end of a step. A torch without CUDA cannot slice, index or copy fake tensors of a device "cuda"
(FakeTensorMode), so the meta device stands for one."""

import contextlib

import pytest
import torch

from grace.communicators.choice import build_communicator
from grace.core.context import Context
from grace.core.registry import legal_communicators
from grace.core.variable import Variable
from grace.exchange.bucket import Bucket, Contribution, Traffic
from grace.exchange.fused_codec import FusedCodec
from grace.exchange.round_trip import RoundTrip
from grace.kernels.torch import fused
from grace.kernels.torch.primitives import TorchKernels
from tests.support.drawing import drawn
from tests.support.methods import make
from tests.support.pretended import Meta
from tests.support.training import SPECS

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
METHODS = [*SPECS, "topk(ratio=0.001)", "randomk(ratio=0.001)", "block(format=fp8)", "block(hadamard=32)"]
BY_DATA = {"inceptionn"}
"""Whose payload's size depends on the data, and is read."""
BY_TORCH = {f"{method}(ratio={ratio})" for method in ("topk", "randomk") for ratio in (0.1, 0.001)}
BY_TORCH |= {"topk(ratio=0.1) | qsgd(levels=7)", "threshold(value=0.001)", "dgc(ratio=0.1)", "adaptive(ratio=0.1)"}
"""Which wait without Triton only."""


def read_back(error: Exception) -> bool:
    """Return True if an error was raised because a number was read that nobody has."""
    return any(what in str(error) for what in ("nonzero", "item()", "Tensor.item", "meta tensor", "_local_scalar"))


def waits(spec: str, phase: str) -> bool:
    """Return True if encoding, or decoding the payloads of two ranks, reads something back."""
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
    """Give tensors on the meta device these kernels, in place of a GPU's."""
    from grace.kernels.triton.primitives import KERNELS

    monkeypatch.setattr(fused, "_PLAIN", KERNELS if request.param == "triton" else TorchKernels())
    return request.param


def test_methods_wait_for_the_device_only_where_the_size_of_what_they_send_is_in_the_data(kernels):
    wanted = BY_DATA | BY_TORCH if kernels == "torch" else BY_DATA
    for phase in ("encode", "decode"):
        assert {spec for spec in METHODS if waits(spec, phase)} == wanted


SHAPES = {"matrix": (512, 64), "vector": (1 << 12,), "empty": (0, 3), "scalar": ()}


def exchange_waits(spec: str, communicator: str) -> bool:
    """Return True if three steps of one bucket read something before they end."""
    from grace.kernels.triton.launching import recorded

    chosen = build_communicator(spec, None, communicator)
    context = Context(size=2, rank=1)
    chosen.bind(context, Meta(2, 1))
    bucket = Bucket(0, chosen, [Variable(name, shape, "float32") for name, shape in SHAPES.items()])
    chosen.compressor.context.step = 0
    with recorded():
        for step, present in enumerate(([True] * 4, [True, False, True, True], [True] * 4)):
            context.step = step
            gradients = [torch.empty(shape, device="meta") for shape in SHAPES.values()]
            try:
                exchange = RoundTrip(Contribution(bucket, gradients, present, True, Traffic()))
                exchange.start()
                exchange.defers_headers = True
                while exchange.advance():
                    pass
                exchange.wait()
                exchange.finish(gradients if step else [None] * len(gradients))
            except (NotImplementedError, RuntimeError) as error:
                assert read_back(error), error  # noqa: PT017 - others are mistakes
                return True
            assert exchange.header.deferred_reads
            for part in chosen.stateful_parts.values():
                part.state.commit()
    assert isinstance(bucket.program.codec, FusedCodec) or not fused._PLAIN.codecs or communicator != "scatter_reduce"
    return False


def test_exchanges_wait_for_the_device_only_where_the_docs_say_so(kernels):
    methods = BY_DATA | BY_TORCH | {"topk(ratio=0.05, chunk=64)"} if kernels == "torch" else BY_DATA
    # the last of which looks for the largest itself where a tensor is small
    most = 1 if kernels == "torch" else None
    cases = [(spec, name) for spec in METHODS for name in legal_communicators(make(spec))[:most]]
    for spec, name in drawn(cases):
        wanted = spec in methods or name == "scatter_merge"
        assert exchange_waits(spec, name) == wanted, (spec, name)
