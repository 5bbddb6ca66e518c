"""What travels is packed and counted: per variable, at the engine, and by the kernel's sockets."""

import contextlib
import math
import os
import socket
import struct
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

import grace
from tests.support.pairwise import pairwise
from tests.support.training import METHODS, ONE_STAGE, Given, distributed, made_up, net, train

pytestmark = pytest.mark.ranks

MORE = (
    *("natural", "terngrad", "onebit", "signum", "dynamic8", "sketch(quantiles=16)"),
    *("block(bits=4, hadamard=32)", "block(format=fp8, rounding=stochastic)"),
    *("topk(ratio=0.1) | qsgd(levels=7)", "topk(ratio=0.1) | efsignsgd", "randomk(ratio=0.1) | fp16"),
)
GATHERED = [
    *ONE_STAGE,
    *((method, name) for method in MORE for name in ("allgather", "broadcast")),
    ("randomk(ratio=0.1) | fp16", "allreduce"),
]
SHAPES = {"big": (50, 41), "odd": (1003,), "kernel": (8, 3, 3, 3), "one": (1,), "scalar": (), "none": (0,)}
STEPS = 3


def counted(compressor, communicator, group_bytes):
    """Traffic of three steps, the bytes that the engine was handed, and the groups."""
    backend = Recorder(grace.init())
    model = Given(SHAPES)
    choices = {"communicator": communicator, "group_bytes": group_bytes, "backend": backend, "broadcast": False}
    optimizer = distributed(model, compressor, optimizer=partial(torch.optim.SGD, lr=0.05), **choices)
    for step in range(STEPS):
        optimizer.zero_grad()
        model.backward(made_up(SHAPES, step, grace.rank()))
        optimizer.step()
    groups = [[v.name for v in group.variables] for group in optimizer._grace.runner.buckets]
    dense = [
        v.name
        for group in optimizer._grace.runner.buckets
        for v in group.variables
        if group.communicator.describe() != optimizer._grace.runner.name
    ]
    return optimizer.traffic, backend.handed, groups, dense


class Recorder(grace.Backend):
    """The real engine, noting the size of this rank's buffer in each collective."""

    def __init__(self, engine):
        self.engine, self.handed = engine, []
        self.rank, self.size = engine.rank, engine.size

    def allreduce(self, tensor):
        self.handed.append(tensor.nbytes)
        return self.engine.allreduce(tensor)

    def allgather(self, tensor):
        self.handed.append(tensor.nbytes)
        return self.engine.allgather(tensor)

    def alltoall(self, tensor):
        self.handed.append(tensor.nbytes)
        return self.engine.alltoall(tensor)

    def broadcast(self, tensor, root):
        if root == self.rank:
            self.handed.append(tensor.nbytes)
        return self.engine.broadcast(tensor, root)

    def allgather_object(self, value):
        return self.engine.allgather_object(value)


@pytest.mark.parametrize(
    ("compressor", "communicator", "group_bytes"),
    pairwise(
        *(dict(GATHERED), sorted({name for _, name in GATHERED}), [25 << 20, 1000]),
        allowed=lambda method, name, group_bytes: (method, name) in GATHERED,
    ),
)
def test_bytes_at_the_engine_are_wire_bits_and_the_stated_header(two_ranks, compressor, communicator, group_bytes):
    method = grace.make("compressor", compressor)
    for traffic, handed, groups, dense in two_ranks.run(counted, compressor, communicator, group_bytes):
        assert traffic.steps == STEPS
        bits = {name: 32 if name in dense else method.wire_bits(shape) for name, shape in SHAPES.items()}
        payload = {name: round(bits[name] * math.prod(shape) / 8) for name, shape in SHAPES.items()}
        assert traffic.payload_bytes == {name: STEPS * payload[name] for name in SHAPES}
        header = 0
        for index, names in enumerate(groups):
            if names[0] in dense or communicator == "allreduce":
                item = 2 if compressor.endswith(("fp16", "bf16")) and names[0] not in dense else 4
                numbers = len(names) + (0 if index else 2 * PLACE)
                header += numbers * item * (1 if names[0] in dense else method.traits.rounds)
            else:
                numbers = len(names) + (0 if index else PLACE)
                header += numbers + -(sum(payload[name] for name in names) + numbers) % 8
        assert traffic.header_bytes == STEPS * header
        assert sum(handed) == STEPS * (header + sum(payload.values()))
        assert traffic.elements == STEPS * sum(math.prod(shape) for shape in SHAPES.values())


PLACE = 5
"""Numbers that tell where a rank is, in the first group's wires: its own, or in sums each rank's."""


def eighths(nbytes: int) -> int:
    """Padded to a multiple of 8 bytes."""
    return nbytes + -nbytes % 8


@pytest.mark.parametrize(
    "compressor", ["none", "fp16", "qsgd", "natural", "terngrad", "onebit", "efsignsgd", "dynamic8"]
)
def test_both_halves_of_scatter_reduce_are_the_wire_bits_of_shards(two_ranks, compressor):
    method = grace.make("compressor", compressor)
    answers = two_ranks.run(counted, compressor, "scatter_reduce", 25 << 20)
    for rank, (traffic, handed, groups, dense) in enumerate(answers):
        payload, total = {}, 0
        for index, names in enumerate(groups):
            if names[0] in dense:
                payload |= {name: 4 * math.prod(SHAPES[name]) for name in names}
                total += sum(payload[name] + 4 for name in names) + (0 if index else 4 * 2 * PLACE)
                continue
            shards = {
                name: [round(method.wire_bits((n,)) * n / 8) for n in halves(math.prod(SHAPES[name]))] for name in names
            }
            payload |= {name: sum(nbytes) + nbytes[rank] for name, nbytes in shards.items()}
            place = 0 if index else PLACE
            longest = max(eighths(sum(shards[name][j] + 1 for name in names) + place) for j in range(2))
            total += 3 * longest  # a shard for each rank, and this rank's mean
        assert traffic.payload_bytes == {name: STEPS * payload[name] for name in SHAPES}
        assert sum(handed) == STEPS * total
        assert traffic.header_bytes == STEPS * (total - sum(payload.values()))


def halves(n: int) -> tuple[int, int]:
    return (n + 1) // 2, n // 2


SPIKES = [0.1, -0.9, 3.0, -2.0]


def spiky(rank: int) -> dict[str, np.ndarray]:
    """3 or 7 entries of the large variables, all of the small ones; the rest is zero."""
    gradients = {}
    for name, shape in SHAPES.items():
        flat = np.zeros(math.prod(shape), np.float32)
        count = entries(flat.size, rank)
        flat[:: max(1, flat.size // max(1, count))][:count] = np.resize(SPIKES, count)
        gradients[name] = flat.reshape(shape)
    return gradients


def entries(n: int, rank: int) -> int:
    return min(n, 3 + 4 * rank)


def counted_spikes(compressor, memory, communicator):
    """Traffic of three steps, and the bytes that the engine was handed."""
    backend = Recorder(grace.init())
    model = Given(SHAPES)
    optimizer = grace.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compressor, memory, communicator,
        backend=backend, broadcast=False,
    )  # fmt: skip
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.backward(spiky(grace.rank()))
        optimizer.step()
    return optimizer.traffic, backend.handed


def of_sides(n: int, m: int) -> int:
    """Half of the positive and half of the negative entries, by 16-bit index, and two means."""
    return 8 + 2 * sum(max(1, round(side / 2)) for side in ((m + 1) // 2, m // 2) if side)


def of_formats(n: int, m: int) -> int:
    """2-bit tags of all, and 1, 2, 4 and 4 bytes for the spikes."""
    return math.ceil(n / 4) + sum([1, 2, 4, 4][i % 4] for i in range(m))


@pytest.mark.parametrize("communicator", ["allgather", "broadcast"])
@pytest.mark.parametrize(
    ("compressor", "memory", "tensors", "nbytes"),
    [
        ("threshold(value=0.05)", None, 2, lambda n, m: (4 + 2) * m),
        ("dgc(ratio=0.05)", None, 2, lambda n, m: (4 + 2) * m),
        ("adaptive(ratio=0.5)", "none", 3, of_sides),
        ("inceptionn(error_bound=0.001)", None, 4, of_formats),
        ("threshold(value=0.05) | natural", "none", 2, lambda n, m: (1 + 2) * m),
        ("dgc(ratio=0.05) | efsignsgd", None, 3, lambda n, m: math.ceil(m / 8) + 4 + 2 * m),
    ],
)
def test_bytes_that_depend_on_the_data_are_those_of_the_entries_sent(
    two_ranks, compressor, memory, tensors, nbytes, communicator
):
    sizes = {name: math.prod(shape) for name, shape in SHAPES.items()}
    payloads = [{name: nbytes(n, entries(n, rank)) if n else 0 for name, n in sizes.items()} for rank in range(2)]
    compressed = len(SHAPES) - 1  # the empty variable is not: its status and two ranks' places take 4 bytes each
    longest = max(eighths(sum(payload.values()) + compressed) for payload in payloads)
    # the sizes of all tensors, the wire, the empty variable
    total = 8 * tensors * compressed + longest + 4 * (1 + 2 * PLACE)
    answers = two_ranks.run(counted_spikes, compressor, memory, communicator)
    for (traffic, handed), payload in zip(answers, payloads, strict=True):
        assert traffic.payload_bytes == {name: STEPS * payload[name] for name in SHAPES}
        assert sum(handed) == STEPS * total
        assert traffic.header_bytes == STEPS * (total - sum(payload.values()))


def test_nothing_is_sent_larger_than_it_is(two_ranks):
    for method in (*METHODS, *MORE):
        (traffic, *_), _ = two_ranks.run(counted, method, None, 25 << 20)
        for name, shape in SHAPES.items():
            assert traffic.payload_bytes[name] <= STEPS * 4 * math.prod(shape)


@pytest.mark.parametrize(
    ("compressor", "bits"),
    [
        ("signsgd", 1),
        ("qsgd", 8 + 1 / 16),
        ("qsgd(levels=7)", 4 + 1 / 16),
        ("fp16", 16),
        ("natural", 8),
        ("terngrad", 2 + 32 / 2**20),
        ("onebit", 1 + 64 / 2**20),
        ("signum", 1),
        ("dynamic8", 8 + 32 / 2**20),
        ("sketch", 6 + 64 * 32 / 2**20),
        ("topk(ratio=0.015625) | natural", (32 + 8) / 64),
    ],
)
def test_the_wire_is_as_narrow_as_the_method_says(two_ranks, compressor, bits):
    for sent, header in two_ranks.run(one_large_tensor, compressor):
        assert sent == bits * (1 << 20) / 8
        assert header == 2 * (1 + 2 * PLACE) if compressor == "fp16" else header < 1 + PLACE + 8


def one_large_tensor(compressor):
    model = Given({"w": (1 << 20,)})
    optimizer = distributed(model, compressor, optimizer=partial(torch.optim.SGD, lr=0.05))
    model.w.grad = torch.randn(1 << 20)
    optimizer.step()
    return optimizer.traffic.payload_bytes["w"], optimizer.traffic.header_bytes


def socket_bytes():
    """Bytes that this process's TCP connections have carried to their peers, as the kernel counts them."""
    total = 0
    for fd in [fd for fd in os.listdir("/proc/self/fd") if _is_socket(fd)]:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            (acknowledged,) = struct.unpack_from("Q", info, 120)  # tcpi_bytes_acked
            total += acknowledged
    return total


def _is_socket(fd):
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return False


def megabytes(compressor, communicator, steps):
    """Bytes that left this rank in a few large exchanges: as Grace counts them, and as the kernel does."""
    model = Given({"w": (1 << 20,)})
    optimizer = distributed(model, compressor, communicator=communicator, broadcast=False)
    dist.barrier()
    before = socket_bytes()
    for _ in range(steps):
        model.w.grad = torch.randn(1 << 20)
        optimizer.step()
    dist.barrier()
    return optimizer.traffic.sent_bytes, socket_bytes() - before


@pytest.mark.parametrize(
    ("ranks", "compressor", "communicator"),
    [
        *((3, "none", "allreduce"), (3, "none", "allgather"), (3, "none", "broadcast"), (2, "fp16", "allreduce")),
        *((2, "qsgd", "allgather"), (2, "natural", "broadcast"), (3, "dynamic8", "scatter_reduce")),
        *((2, "inceptionn", "allgather"), (2, "dynamic8", "scatter_reduce")),
    ],
    indirect=["ranks"],
)
def test_bytes_counted_as_sent_are_what_the_network_carries(ranks, compressor, communicator):
    answers = ranks.run(megabytes, compressor, communicator, 4)
    counted, seen = (sum(numbers) for numbers in zip(*answers, strict=True))
    assert counted > 4e6
    assert seen == pytest.approx(counted, rel=0.02)


def bits_per_element():
    model = net()
    optimizer = distributed(model, "topk(ratio=0.1)")
    train(model, optimizer, range(2))
    return optimizer.traffic.bits_per_element


def test_bits_per_element_counts_payload_and_header(two_ranks):
    for bits in two_ranks.run(bits_per_element):
        assert 0.1 * 32 + 1 < bits < 0.1 * 32 + 1 + 1.5  # values, a bitmap, and the dense few
