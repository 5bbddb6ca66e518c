"""A payload that was damaged on its way, or made by other code, is an error on every rank that names its sender."""

import contextlib
import copy
import os
from functools import partial

import numpy as np
import torch

import grace
from grace.communicators import Allgather, Broadcast, ReduceBroadcast, ScatterReduce
from grace.core.compressor import Compressor, Traits
from grace.errors import PayloadError
from grace.kernels import kernels_of
from tests.support.pools import on_ranks
from tests.support.training import refusal

N, CULPRIT = 70_000, 1  # so many that positions take 32 bits
DATA = torch.linspace(-1, 1, N).roll(7)
FAR, NEGATIVE = [0xFF, 0xFF, 0xFF, 0x7F], [0xFE, 0xFF, 0xFF, 0xFF]  # 2^31 - 1 and -2, little-endian


class Picks(Compressor):
    """The largest entry and where it is: the only method here whose shards have positions."""

    name = "picks"
    traits = Traits(category="sparsification", shardable=True)

    def compress(self, tensor, name):
        where = tensor.abs().argmax().view(1).int()
        return [tensor[where.long()], where], tuple(tensor.shape)

    def decompress(self, payload, ctx):
        k = kernels_of(payload[0])
        return k.scatter_add(torch.zeros(ctx), payload[1], payload[0], 1.0)


@contextlib.contextmanager
def damaging(backend, damage, at: int = 0):
    """The first collectives of rank CULPRIT, from the one at this place on, carry what ``damage`` makes of a tensor."""
    if backend.rank != CULPRIT:
        yield
        return
    count, methods = 0, ("allgather", "broadcast", "alltoall", "gather")

    def through(method):
        send = getattr(type(backend), method)

        def call(tensor, *more):
            nonlocal count
            mine = method != "broadcast" or more[0] == backend.rank
            if mine and count == at:
                damage(tensor)
            count += mine
            return send(backend, tensor, *more)

        return call

    for method in methods:
        setattr(backend, method, through(method))
    try:
        yield
    finally:
        for method in methods:
            delattr(backend, method)


def state_of(communicator) -> list[tuple[str, str, bytes]]:
    """Return the state of a communicator's parts."""
    kept = []
    for kind, part in sorted(communicator.components.items()):
        for name, value in sorted(part.state.items()):
            parts = value if isinstance(value, dict) else {"": value}
            kept += [(kind, name + key, np.asarray(item).tobytes()) for key, item in sorted(parts.items())]
    return kept


def failed(cases) -> list[tuple[str, bool, bool]]:
    """Return for each case the error of a damaged step, whether the state is kept, and whether the next step is as if
    that one had not been."""
    found, rank = [], grace.rank()
    for make, damage, at in cases:
        error, kept, means = "nothing was noticed", False, []
        for spoilt in (True, False):
            communicator = copy.deepcopy(make())  # some of them share a compressor
            communicator.lr = 1.0
            communicator.step(DATA + rank, "w")
            before = state_of(communicator)
            if spoilt:
                with damaging(communicator.backend, DAMAGES[damage], at):
                    try:
                        communicator.step(DATA * 2, "w")
                    except PayloadError as raised:
                        error = str(raised)
                kept = state_of(communicator) == before
            means.append(communicator.step(DATA.flip(0), "w").numpy().tobytes())
        found.append((error, kept, means[0] == means[1]))
    return found


def put(place, *values):
    def damage(tensor):
        tensor.view(torch.uint8)[place : place + len(values)] = torch.tensor(values, dtype=torch.uint8)

    return damage


TOP = 4 * 700  # bytes of the values that topk(ratio=0.01) sends
DAMAGES = {
    "far": put(TOP + 40, *FAR),
    "negative": put(TOP + 40, *NEGATIVE),
    "far shard": put(4, *FAR),  # behind one value
    "far mean": put(4, *FAR),
    "negative size": put(0, *[0xFF] * 8),
    "absurd size": put(0, 0, 0, 0, 0, 0, 1),
    "another size": put(0, 1, 0, 0, 0),
    "code": lambda tensor: tensor[4 * 100 :].fill_(0xFF),  # behind the means of sketch
}
ABSURD, COUNT = "bytes, and they can have", "where there must be"
CASES = [  # communicator, what happens to which collective of rank 1, what is said, who knows why
    (partial(Allgather, "topk"), "far", 0, "position 2147483647 is not in [0, 70000)", (0, 1)),
    (partial(Broadcast, "topk"), "negative", 0, "position -2 is not in [0, 70000)", (0, 1)),
    (partial(Allgather, "topk | efsignsgd"), "code", 0, "is not in [0, 70000)", (0, 1)),
    (partial(Allgather, "sketch(quantiles=100)"), "code", 0, "is not in [0, 100)", (0, 1)),
    (partial(Allgather, "threshold(value=0.9)"), "negative size", 0, "a payload tensor of -1 elements", (0, 1)),
    (partial(Allgather, "threshold(value=0.9)"), "absurd size", 0, ABSURD, (0, 1)),
    (partial(Allgather, "threshold(value=0.9)"), "another size", 0, COUNT, (0, 1)),
    (partial(Allgather, "dgc(ratio=0.01) | qsgd"), "another size", 0, COUNT, (0, 1)),
    (partial(Broadcast, "adaptive"), "another size", 0, "", (0, 1)),
    (partial(Allgather, "inceptionn"), "another size", 0, COUNT, (0, 1)),
    (partial(ReduceBroadcast, "topk"), "far", 0, "position 2147483647 is not in", (0,)),
    (partial(ReduceBroadcast, "topk", destination=1), "far", 1, "position 2147483647 is not in", (0, 1)),
    (partial(ReduceBroadcast, "threshold(value=0.9)"), "absurd size", 0, ABSURD, (0, 1)),
    (partial(ReduceBroadcast, "threshold(value=0.9)"), "another size", 0, COUNT, (0,)),
    (partial(ReduceBroadcast, "threshold(value=0.9)", destination=1), "absurd size", 2, ABSURD, (0, 1)),
    (partial(ScatterReduce, Picks()), "far shard", 0, "position 2147483647 is not in [0, 35000)", (0,)),
    (partial(ScatterReduce, Picks()), "far mean", 1, "position 2147483647 is not in [0, 35000)", (0, 1)),
]


def test_every_rank_raises_and_keeps_its_state(two_ranks):
    answers = two_ranks.run(failed, [case[:3] for case in CASES])
    for (make, damage, _, said, knowing), *found in zip(CASES, *answers, strict=True):
        for rank, (error, kept, as_before) in enumerate(found):
            about = f"{make}, {damage}: {error}"
            assert f"rank {rank} of 2" in error, about
            assert "'w'" in error, about
            assert kept, about
            assert as_before, about
            if rank in knowing:
                assert said in error, about
                assert f"rank {CULPRIT} sent" in error, about
                assert f"payload of {make().compressor.spec}: " in error, about
            else:
                assert "rank 0 could not decode" in error, about


def far_row(tensor):
    """The 20 rows' numbers come last, before the status and the padding, or with the sizes in front."""
    raw = tensor.view(torch.uint8)
    numbers = torch.frombuffer(bytearray(raw.numpy().tobytes()), dtype=torch.int32).tolist()
    place = max(i for i, number in enumerate(numbers) if number == ROWS - 1)
    raw[4 * place : 4 * place + 4] = torch.tensor(FAR, dtype=torch.uint8)


ROWS = 35_000


def stepped(make, damage, at: int, sparse: bool) -> tuple[list[str], bool, bool]:
    """Errors of an optimizer's damaged step, and of the same step once more; whether its state is as it was, and the
    next step as if that one had not been."""
    errors: list[str] = []
    states, ends = [], []
    for spoilt in (True, False):
        torch.manual_seed(0)
        table, communicator = torch.nn.Embedding(ROWS, 2, sparse=sparse), make()
        optimizer = grace.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=0.1), table, communicator=communicator
        )

        def backward(first, table=table):
            rows = torch.arange(first, first + 20) + 7 * grace.rank()
            table(torch.cat([rows[1:], torch.tensor([ROWS - 1])])).square().sum().backward()

        backward(10)
        optimizer.step()
        optimizer.zero_grad()
        if spoilt:
            with damaging(optimizer._grace.runner.channel, damage, at):
                backward(20)
                for _ in range(2):
                    try:
                        optimizer.step()
                    except grace.ExchangeError as error:  # the second time, that the gradient is no longer what it was
                        errors.append(str(error))
            optimizer.zero_grad()
        states.append(optimizer.state_dict()["grace"]["state"])
        backward(30)
        optimizer.step()
        ends.append(table.weight.detach().numpy().tobytes())
        optimizer.close()
    return errors, repr(states[0]) == repr(states[1]), ends[0] == ends[1]


STEPS = [
    (partial(Allgather, "topk"), DAMAGES["far"], 0, False),
    (partial(Allgather, "none", "residual"), far_row, 1, True),
    (partial(ReduceBroadcast, "topk(ratio=0.5)", destination=0), far_row, 1, True),
    (partial(ReduceBroadcast, "none", destination=1), far_row, 3, True),
]


def damaged_steps():
    return [stepped(*case) for case in STEPS]


def test_an_optimizers_step_fails_on_every_rank_until_it_is_dropped(two_ranks):
    for (make, _, _, sparse), *found in zip(STEPS, *two_ranks.run(damaged_steps), strict=True):
        for rank, (errors, kept, as_before) in enumerate(found):
            about = f"{make}: {errors}"
            assert len(errors) == 2, about
            assert f"rank {rank} of 2" in errors[0], about
            assert "'weight'" in errors[0], about
            said = f"2147483647 is not in [0, {ROWS if sparse else N})"
            assert said in errors[0] or "could not decode" in errors[0], about
            assert kept, about
            assert as_before, about


@on_ranks(3)
def test_a_node_hears_that_its_leader_could_not_decode():
    """Nodes reduce first; the second node's only rank sends what does not decode."""
    os.environ["GRACE_NODE"] = "b" if grace.rank() == 2 else "a"
    table = torch.nn.Embedding(ROWS, 2)
    plain = torch.optim.SGD(table.parameters(), lr=0.1)
    optimizer = grace.DistributedOptimizer(plain, table, "topk", hierarchical=True)
    leaders = optimizer._grace.runner.hierarchy.backend
    with damaging(leaders, DAMAGES["far"]) if grace.rank() == 2 else contextlib.nullcontext():
        table(torch.arange(20)).square().sum().backward()
        said = refusal(optimizer.step, kind=PayloadError)
    if grace.rank() == 1:
        assert said == "rank 0, which speaks for this node, could not decode what others sent for weight"
    else:
        assert "of the ranks 0, 2: what rank 2 sent of 'weight'" in said


@on_ranks()
def test_a_delayed_mean_that_cannot_be_made_fails_on_every_rank():
    table = torch.nn.Embedding(ROWS, 2)
    communicator = ReduceBroadcast("topk", staleness=1)
    plain = torch.optim.SGD(table.parameters(), lr=0.1)
    optimizer = grace.DistributedOptimizer(plain, table, communicator=communicator)

    def steps():
        for _ in range(3):
            table(torch.arange(20)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with damaging(optimizer._grace.runner.exchange_thread().backend, DAMAGES["far"]):
        said = refusal(steps, kind=PayloadError)
    assert ("could not decode what it was sent of 'weight'" if grace.rank() else "what rank 1 sent of 'weight'") in said
