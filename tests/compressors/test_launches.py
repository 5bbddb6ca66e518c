"""Numbers of kernels that a variable's encoding and decoding start on a GPU, counted on the meta device."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grace.communicators.choice import build_communicator
from grace.core.context import Context
from grace.core.variable import Variable
from grace.exchange.bucket import Bucket, Contribution, Traffic
from grace.exchange.round_trip import RoundTrip
from grace.kernels.torch import fused
from grace.kernels.torch.primitives import TorchKernels
from tests.exchange.test_fused_pieces import Positions
from tests.support.methods import make
from tests.support.pretended import Meta

pytest.importorskip("triton")
BUDGETS = {
    "fp16": (1, 3),
    "qsgd": (22, 7),
    "block": (18, 7),
    "signsgd": (9, 11),
    "topk(ratio=0.01)": (7, 1),
    "topk(ratio=0.1)": (17, 3),
    "topk(ratio=0.01, chunk=1024)": (16, 8),
    "randomk": (2, 1),
    "powersgd(rank=4)": (14, 1),
    "threshold": (22, 1),
    "dgc(ratio=0.01)": (22, 1),
    "adaptive(ratio=0.01)": (102, 18),
    "sketch": (30, 11),
    "topk(ratio=0.01) | qsgd": (29, 12),
}
"""The most launches to encode a variable, and to add what one rank sent, where buckets have no codec."""
NO_LAUNCH = {"view", "_unsafe_view", "select", "slice", "expand", "detach", "alias", "unsqueeze", "t", "transpose"}
NO_LAUNCH |= {"lift_fresh", "empty", "empty_like", "unbind", "as_strided", "permute", "squeeze", "split"}


class Operations(TorchDispatchMode):
    """Counts torch's operations that start something on a device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ not in NO_LAUNCH
        return func(*args, **(kwargs or {}))


def launches(method: str) -> tuple[int, int]:
    from grace.kernels.triton.launching import recorded

    compressor, x = make(method), torch.empty(1 << 15, 8, device="meta")
    with recorded() as encoding, Operations() as encoded:
        payload, ctx = compressor.compress(x, "w")
    with recorded() as decoding, Operations() as decoded:
        compressor.accumulate(payload, ctx, x, 0.5)
    return len(encoding) + encoded.count, len(decoding) + decoded.count


@pytest.mark.parametrize("method", BUDGETS)
def test_a_variable_takes_few_launches(method, monkeypatch):
    from grace.kernels.triton.primitives import KERNELS

    monkeypatch.setattr(fused, "_PLAIN", KERNELS)
    encoding, decoding = launches(method)
    assert 0 < encoding <= BUDGETS[method][0]
    assert 0 < decoding <= BUDGETS[method][1]


def test_random_numbers_alone_are_a_hundred_of_torchs_operations(monkeypatch):
    monkeypatch.setattr(fused, "_PLAIN", TorchKernels())
    assert launches("qsgd")[0] >= 100


@pytest.mark.parametrize("most", [math.inf, 4.0])
def test_a_look_for_overflows_reads_memory_once(most):
    class Reads(TorchDispatchMode):
        """Writes down torch's operations on whole tensors."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            whole = [x for x in args if isinstance(x, torch.Tensor) and x.numel() == 4096]
            found.extend([func.overloadpacket.__name__] * len(whole))
            return func(*args, **(kwargs or {}))

    found: list[str] = []
    x = torch.ones(4096, device="meta")
    with Reads():
        TorchKernels().all_finite(x, most)
    assert len(found) == 1, found


DECODING = ("decode", "count_marks", "zero_bucket")
"""Beginnings of the names of kernels that decode a bucket; the others encode one."""


def test_a_bucket_takes_few_launches_however_many_variables_it_has():
    from tools import triton_assembly

    for name in triton_assembly.BUCKETS:
        made = [launch.kernel.__name__ for launch in triton_assembly.bucket_launches(name)]
        decoding = [kernel for kernel in made if kernel.startswith(DECODING)]
        assert 0 < len(decoding) <= 3, name
        most = 9 if name.startswith("powersgd") else 7 if name in ("topk", "topk with bitmaps", "threshold") else 3
        assert 0 < len(made) - len(decoding) <= most, name


def scattered(spec: str, ranks: int, variables: int, apart: bool = False) -> list[tuple[int, int, int]]:
    """Count, for each part of ScatterReduce's third step, launches that encode, launches that decode, and torch's
    operations."""
    from grace.kernels.triton.launching import recorded

    compressor = Positions(ratio=0.01) if spec == "topk" else spec
    chosen, context = build_communicator(compressor, "residual", "scatter_reduce"), Context(size=ranks, rank=1)
    chosen.bind(context, Meta(ranks, 1))
    found = [Variable(f"v{i}", (1 << 14, i + 1), "float32") for i in range(variables)]
    bucket = Bucket(0, chosen, found, fuses=not apart)
    gradients, counts = [torch.empty(v.shape, device="meta") for v in found], list[tuple[int, int, int]]()

    def counted(part: Callable[..., Any], *args: Any) -> Any:
        with recorded() as made, Operations() as operations:
            answer = part(*args)
        decoding = sum(launch.kernel.__name__.startswith(DECODING) for launch in made)
        counts.append((len(made) - decoding, decoding, operations.count))
        return answer

    for context.step in range(3):
        exchange = RoundTrip(Contribution(bucket, gradients, [True] * variables, True, Traffic()))
        counted(exchange.start)
        exchange.defers_headers = True
        counted(exchange.advance)
        counted(exchange.finish, gradients)
        for keeper in chosen.stateful_parts.values():
            keeper.state.commit()
    return counts[-3:]


@pytest.mark.filterwarnings("ignore:.*not a contraction")
@pytest.mark.parametrize("spec", ["fp16", "signsgd", "efsignsgd", "natural", "qsgd", "terngrad", "dynamic8", "topk"])
def test_pieces_take_few_launches_however_many_ranks_and_variables_there_are(spec, monkeypatch):
    from grace.kernels.triton.primitives import KERNELS

    monkeypatch.setattr(fused, "_PLAIN", KERNELS)
    monkeypatch.setattr(KERNELS, "addresses", lambda tensors, dtype="float32": [16] * len(tensors), raising=False)
    start, middle, end = found = scattered(spec, 2, 1)
    most = 8 if spec == "topk" else 3
    assert 0 < start[0] <= most
    assert 0 < middle[0] <= most
    assert start[1] == end[0] == 0
    assert middle[1] == end[1] == 1
    assert max(operations for _, _, operations in found) <= 4  # tables and places are copied
    assert scattered(spec, 5, 3) == found


@pytest.mark.filterwarnings("ignore:.*not a contraction")
def test_pieces_that_go_one_by_one_take_more(monkeypatch):
    from grace.kernels.triton.primitives import KERNELS

    monkeypatch.setattr(fused, "_PLAIN", KERNELS)
    few, many = (sum(map(sum, scattered("qsgd", *sizes, apart=True))) for sizes in ((2, 1), (5, 3)))
    assert many > 2 * few > 20


def round_trip(spec: str, at_once: bool, count: int) -> int:
    """Launches of the sixth round trip of a bucket of so many matrices and a vector, from gradients to means, statuses
    and residuals included; of kernels and of torch's operations, copies of tables to the device among them."""
    from grace.kernels.triton.launching import recorded

    chosen, context = build_communicator(spec, None, "allreduce"), Context(size=2, rank=1)
    chosen.bind(context, Meta(2, 1))
    shapes = {"vector": (33,), **{f"v{i}": (16 + i, 40) for i in range(count)}}
    bucket = Bucket(0, chosen, [Variable(name, shape, "float32") for name, shape in shapes.items()])
    bucket.fuses = at_once
    for context.step in range(6):
        gradients = [torch.empty(shape, device="meta") for shape in shapes.values()]
        with recorded() as made, Operations() as operations:
            exchange = RoundTrip(Contribution(bucket, gradients, [True] * len(shapes), True, Traffic()))
            exchange.start()
            exchange.defers_headers = True
            while exchange.advance():
                pass
            exchange.finish(gradients)
        chosen.memory.state.commit()
        chosen.compressor.state.commit()
    return len(made) + operations.count


def test_methods_of_two_rounds_take_few_launches_however_many_variables_they_have(monkeypatch):
    from grace.kernels.triton.primitives import KERNELS

    monkeypatch.setattr(fused, "_PLAIN", KERNELS)
    monkeypatch.setattr(type(KERNELS), "addresses", lambda self, tensors, dtype="float32": [16] * len(tensors))
    assert 10 < round_trip("powersgd(rank=4)", True, 3) == round_trip("powersgd(rank=4)", True, 30) <= 12
    assert round_trip("powersgd(rank=4)", False, 3) > 30
    assert round_trip("powersgd(rank=9)", True, 3) > 30  # too wide for the kernels


def test_addresses_that_stay_are_copied_to_the_device_once():
    from grace.kernels.bucket_codec import Placed
    from grace.kernels.triton import codec_base
    from grace.kernels.triton.bucket_codecs import CODECS

    codec = CODECS["powers"]([8], [[Placed(0, (8,), "uint8")]], device=torch.device("cpu"))
    one, other = (np.full((1, 3), start, np.uint64) for start in (160, 176))
    first, second = codec.table(one, [16]), codec.table(other, [16])
    assert codec.table(one, [16]) is first
    assert codec.table(other, [16]) is second
    written = second.tolist()
    assert first.tolist() != written
    made = {first.data_ptr(), second.data_ptr()}
    for start in range(0, 1600, 16):  # what comes once does not stay
        table = codec.table(one + np.uint64(start), [16])
        assert table[0] == 160 + start
        made.add(table.data_ptr())
    # Their memory is used again: new tensors would move all others that the framework allocates.
    assert len(codec.copies) == len(made) == 2 * codec_base.KEPT_TABLES
    assert codec.table(other, [16]).tolist() == written
