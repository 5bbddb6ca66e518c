"""Traffic is packed and counted: per variable, at the engine, and by the kernel's sockets."""

import contextlib
import math
import os
import socket
import struct

import pytest
import torch
import torch.distributed as dist

import grace
from grace.core.registry import legal_communicators
from tests.support.methods import SPECS, make
from tests.support.pairwise import pairwise
from tests.support.pools import on_ranks
from tests.support.training import Given, distributed, means, net, plain_sgd, train

METHODS = [
    *(spec for spec in SPECS if make(spec).traits.fixed_size == "by shape" and "cast" not in spec),
    *("block(bits=4, hadamard=32)", "block(format=fp8, rounding=stochastic)"),
    *("topk(ratio=0.1) | efsignsgd", "randomk(ratio=0.1) | fp16"),
]
GATHERED = [
    (method, name)
    for method in METHODS
    for name in {"allreduce", "allgather", "broadcast"}.intersection(legal_communicators(make(method)))
]
"""Methods whose payloads have one size, and communicators that compress once."""
SHAPES = {"big": (50, 41), "odd": (1003,), "kernel": (8, 3, 3, 3), "one": (1,), "scalar": (), "none": (0,)}
STEPS = 3


def counted(compressor, communicator, group_bytes):
    """Traffic of three steps, the bytes that the engine was handed, and the groups."""
    backend = Recorder(grace.init())
    model = Given(SHAPES)
    choices = {"communicator": communicator, "group_bytes": group_bytes, "backend": backend, "broadcast": False}
    optimizer = distributed(model, compressor, optimizer=plain_sgd, **choices)
    means(model, optimizer, range(STEPS))
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
        *(METHODS, sorted({name for _, name in GATHERED}), [25 << 20, 1000]),
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
        assert all(payload[name] <= 4 * math.prod(shape) for name, shape in SHAPES.items())
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


@on_ranks()
def test_bits_per_element_counts_payload_and_header():
    model = net()
    optimizer = distributed(model, "topk(ratio=0.1)")
    train(model, optimizer, range(2))
    assert 0.1 * 32 + 1 < optimizer.traffic.bits_per_element < 0.1 * 32 + 1 + 1.5  # values, a bitmap, and the dense few
