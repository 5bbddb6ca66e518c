"""Communicators of the user's own that move payloads variable by variable, by the original GRACE's contract."""

from dataclasses import dataclass

import pytest
import torch
from torch import distributed as dist

import grace
from grace.core.backend import Handle
from grace.torch import Communicator, Compressor
from tests.support.pools import launched, on_ranks
from tests.support.training import Given, ddp, digest, distributed, made_up, refusal

pytestmark = pytest.mark.ranks

SHAPES = {"matrix": (40, 30), "kernel": (8, 5, 3, 3), "vector": (700,)}


class Gathering(Communicator):
    """GRACE's all-gather for torch.distributed: a collective for each tensor, in the order of its arguments."""

    def send_receive(self, tensors, name, ctx):
        assert isinstance(tensors, list)
        gathered = []
        for tensor in tensors:
            of_ranks = [torch.empty_like(tensor) for _ in range(self.world_size)]
            dist.all_gather(of_ranks, tensor)
            gathered.append(of_ranks)
        decoded = [self.compressor.decompress(payload, ctx) for payload in zip(*gathered, strict=True)]
        total = self.compressor.aggregate(decoded)
        return total / self.world_size if self.compressor.average else total


class InPlace(Communicator):
    """GRACE's all-reduce for Horovod: sums overwrite what was sent; started first, and awaited later."""

    def async_send(self, tensors, name):
        return [self.backend.allreduce(tensor.view(-1)) for tensor in tensors], tensors

    def wait_receive(self, handles, ctx):
        sums, tensors = handles
        for handle in sums:
            handle.wait()
        total = self.compressor.decompress(tensors, ctx)
        return total / self.world_size if self.compressor.average else total


class ByBackend(Communicator):
    """Any payload over any engine, with the backend's collectives."""

    def async_send(self, tensors, name):
        return [(self.backend.allgather(tensor.reshape(-1)), tensor.shape) for tensor in tensors]

    def wait_receive(self, handles, ctx, name):
        assert name in SHAPES
        parts = [[part.view(shape) for part in handle.wait()] for handle, shape in handles]
        decoded = [self.compressor.decompress(list(payload), ctx) for payload in zip(*parts, strict=True)]
        return self.compressor.aggregate(decoded) / self.world_size


def means(choose, steps=3):
    """Return the means by an optimizer's steps, which steps by hand give too, and a hash of the memories."""
    model = Given(SHAPES)
    optimizer = distributed(model, communicator=choose(), optimizer=lambda p: torch.optim.SGD(p, 0.0))
    grc, found = choose(), []
    for step in range(steps):
        given = made_up(SHAPES, step, grace.rank())
        optimizer.zero_grad()
        model.backward(given)
        optimizer.step()
        found.append([p.grad.clone() for p in model.parameters()])
        begun = [grc.send_step(torch.tensor(given[name]), name) for name in SHAPES]
        for one, mine in zip(begun, found[-1], strict=True):
            torch.testing.assert_close(grc.receive_step(one), mine)
    kept = digest(optimizer.state_dict()["grace"]["state"])
    traffic = optimizer.traffic.payload_bytes
    optimizer.close()
    return found, kept, traffic


def compared(own, spec, usual):
    theirs = means(lambda: getattr(grace.torch, usual)(*spec))
    mine = means(lambda: own(*spec))
    for got, wanted in zip(mine[0], theirs[0], strict=True):
        torch.testing.assert_close(got, wanted)
    return mine[1] == theirs[1], mine[2] == theirs[2]


@pytest.mark.parametrize(
    ("own", "spec", "usual"),
    [
        (Gathering, ("topk(ratio=0.1)", "residual"), "Allgather"),
        (Gathering, ("signsgd", "none"), "Allgather"),
        (InPlace, ("randomk(ratio=0.1)", "residual"), "Allreduce"),
        (InPlace, ("none", "none"), "Allreduce"),
        (ByBackend, ("qsgd", "none"), "Allgather"),
        (ByBackend, ("topk(ratio=0.02)", "residual"), "Allgather"),  # 16-bit positions
    ],
)
def test_it_gives_what_graces_own_communicator_does(two_ranks, own, spec, usual):
    assert two_ranks.run(compared, own, spec, usual) == [(True, True)] * 2


def test_it_works_over_every_engine(engine):
    spec = ("topk(ratio=0.02)", "residual")
    assert launched(engine, 2).run(compared, ByBackend, spec, "Allgather") == [(True, True)] * 2


class Signs(Compressor):
    """Signs as GRACE's TensorFlow code has them: a tensor of bools."""

    def compress(self, tensor, name):
        return [tensor.flatten() >= 0], tensor.shape

    def decompress(self, tensors, shape):
        (signs,) = tensors
        assert signs.dtype is torch.bool
        return (signs.float() * 2 - 1).view(shape)


class Threshold(Compressor):
    """GRACE's: what is sent has another size on each rank."""

    def __init__(self, said=True):
        super().__init__(**({"tensors_size_are_same": False} if said else {}))

    def compress(self, tensor, name):
        flat = tensor.flatten()
        (where,) = torch.where(flat.abs() > 0.5)
        return [flat[where], where], tensor.shape

    def decompress(self, tensors, shape):
        values, where = tensors
        return torch.zeros(shape.numel()).scatter_(0, where, values).view(shape)


class Objects(Communicator):
    """Gathers payloads of any sizes at once."""

    def send_receive(self, tensors, ctx, name):
        gathered = self.backend.allgather_object([tensor.tolist() for tensor in tensors])
        payloads = [[torch.tensor(of, dtype=t.dtype) for of, t in zip(one, tensors, strict=True)] for one in gathered]
        return self.compressor.aggregate([self.compressor.decompress(one, ctx) for one in payloads]) / self.world_size


class Later(Communicator):
    """A communicator in two parts; it keeps its rank, as GRACE's ``Broadcast(..., world_size, rank)`` does."""

    def __init__(self, compressor, memory, world_size, rank):
        super().__init__(compressor, memory, world_size)
        self.rank = rank

    def async_send(self, tensors, name):
        return tensors

    def wait_receive(self, handles, ctx, name):
        assert self.rank == grace.rank()
        return Objects.send_receive(self, handles, ctx, name)


@on_ranks()
def test_payloads_and_communicators_of_grace_are_taken_as_they_are():
    """Bools, sizes that differ, and communicators that know their rank, give what Grace's all-gather does."""
    where = grace.size(), grace.rank()
    for method in (Signs, Threshold):
        wanted = means(lambda method=method: grace.torch.Allgather(method(), "none"))[0]
        for own, more in ((Objects, ()), (Later, where), (ByBackend, ()))[: 3 if method is Signs else 2]:
            for said in ((),) if method is Signs else ((True,), (False,)):
                got = means(lambda method=method, own=own, more=more, said=said: own(method(*said), "none", *more))[0]
                for mine, theirs in zip(got, wanted, strict=True):
                    torch.testing.assert_close(mine, theirs)


@on_ranks()
def test_bools_travel_over_every_engine(engine):
    """Grace's own all-gather carries them, and so does one collective of the engine for each tensor."""
    given = [torch.randn(30, 20, generator=torch.Generator().manual_seed(rank)) for rank in range(grace.size())]
    wanted = sum((each >= 0).float() * 2 - 1 for each in given) / grace.size()
    for kind in (grace.torch.Allgather, ByBackend):
        torch.testing.assert_close(kind(Signs(), "none").step(given[grace.rank()], "matrix"), wanted)


class Halving(Gathering):
    """Halves what comes, so that one sees that it did."""

    def send_receive(self, tensors, name, ctx):
        self.calls = [*getattr(self, "calls", []), name]
        return super().send_receive(tensors, name, ctx) / 2


@on_ranks()
def test_missing_gradients_and_overflows_are_told_beside_the_payloads():
    """Rank 1 has no gradient of one variable, no rank of another, and one of rank 1's overflows in the second step."""
    model = Given({"a": (30, 20), "b": (400,), "c": (300,)})
    optimizer = distributed(model, communicator=Halving("topk(ratio=0.5)", "residual"))
    own = optimizer._grace.runner.communicators[0]
    for step, spoilt in enumerate((False, True, False)):
        optimizer.zero_grad()
        given = made_up({"a": (30, 20)}, 0, grace.rank())
        if grace.rank() == 0:
            given["b"] = [2.0] * 400
        elif spoilt:
            given["a"][0, 0] = float("inf")
        before = digest(optimizer.state_dict()["grace"]["state"])
        model.backward(given)
        optimizer.step()
        assert (digest(optimizer.state_dict()["grace"]["state"]) == before) == spoilt
        assert bool(model.a.grad.isfinite().all()) == (not spoilt)
        assert step > 0 or model.b.grad.sum() == 100  # 200 entries of 2, from one rank of two, halved
        assert model.c.grad is None
    assert own.calls == 3 * ["a", "b", "c"]


class Nothing(Communicator):
    pass


class Half(Communicator):
    def async_send(self, tensors, name):
        return tensors


class Mixed(grace.torch.Allreduce):
    def send_receive(self, tensors, ctx, name):
        return tensors[0]


def test_who_does_not_say_how_payloads_move_is_refused_when_it_is_made():
    with pytest.raises(grace.ConfigError, match=r"Nothing does not say how payloads move: define communicate\(wire\)"):
        Nothing("topk")
    with pytest.raises(grace.ConfigError, match=r"one of async_send and wait_receive, and lacks wait_receive\(\)"):
        Half("topk")
    with pytest.raises(grace.ConfigError, match="its base moves whole buckets"):
        Mixed("none")
    with pytest.raises(grace.ConfigError, match="it needs several reductions"):
        Gathering("powersgd")


class Misshapen(Gathering):
    def send_receive(self, tensors, name, ctx):
        super().send_receive(tensors, name, ctx)
        return self.wrong

    wrong = None


@on_ranks()
def test_what_is_no_mean_is_refused_by_name():
    for wrong, words in (
        (None, "Misshapen.send_receive() of 'w' at step 0: no kernels for builtins.NoneType"),
        (torch.zeros(3), "of 'w' at step 0: it gave a tensor of shape (3,), where (4,) is wanted"),
    ):
        grc = Misshapen("none", "none")
        grc.wrong = wrong
        assert words in refusal(grc.step, torch.ones(4), "w", kind=grace.ExchangeError)
        grc.wrong = torch.full((4,), 7.0)
        assert grc.step(torch.ones(4), "w").tolist() == [7.0] * 4


@on_ranks()
def test_it_serves_ddps_hook():
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(40, 30))
    state = grace.torch.register_ddp_hook(model, communicator=Gathering("topk(ratio=0.5)", "residual"))
    other = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(40, 30))
    other.load_state_dict(model.state_dict())
    usual = grace.torch.register_ddp_hook(other, communicator=grace.torch.Allgather("topk(ratio=0.5)", "residual"))
    for step in range(2):
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * step + grace.rank()))
        for each in (model, other):
            each.zero_grad()
            each(x).square().sum().backward()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    state.close()
    usual.close()


class WhenAwaited(Communicator):
    """An all-gather that begins when its handle is awaited."""

    def communicate(self, wire):
        begun = []
        return Handle(lambda: begun.append(self.backend.allgather(wire)), later=lambda: begun[0].wait())


def sent(communicator, hook):
    """Bytes that a training counts as sent: by the optimizer, or by DDP's hook."""
    model = Given({"matrix": (40, 30)})
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = ddp(model) if hook else model
    if hook:
        owner = grace.torch.register_ddp_hook(wrapped, communicator=communicator, optimizer=plain)
    else:
        owner = plain = grace.DistributedOptimizer(plain, model, communicator=communicator)
    for step in range(2):
        plain.zero_grad()
        wrapped(made_up({"matrix": (40, 30)}, step, grace.rank())).backward()
        plain.step()
    return owner.traffic.sent_bytes, digest(model.matrix.detach())


@pytest.mark.parametrize("hook", [False, True], ids=["optimizer", "hook"])
@on_ranks()
def test_collectives_that_begin_when_a_handle_is_awaited_are_counted(hook):
    found = sent(WhenAwaited("topk(ratio=0.1)"), hook)
    assert found == sent(grace.torch.Allgather("topk(ratio=0.1)"), hook)
    return found


class Moving(Communicator):
    """A communicator whose ``communicate`` is a function of itself and the wire."""

    name = "moving"

    def __init__(self, compressor, memory, move):
        super().__init__(compressor, memory)
        self.move = move

    def communicate(self, wire):
        return self.move(self, wire)


class Summing(Moving):
    """The same, which says that it brings a sum."""

    name = "summing"
    sums = True


def brings(change):
    """Gather a wire, and change what the handle brings."""
    return lambda grc, wire: grc.backend.allgather(wire).map(change)


MISTAKES = {
    "moving: communicate() must return a grace.Handle, not a NoneType": (Moving, lambda grc, wire: None),
    "moving: the handle of communicate() must bring a list of 1 tensors": (Moving, brings(lambda wires: wires[0])),
    "the handle of communicate() gave a tensor of shape": (Moving, brings(lambda wires: [x[:-3] for x in wires])),
    "must bring tensors of the wire's dtype, uint8": (Moving, brings(lambda wires: [x.float() for x in wires])),
    "summing: the handle of communicate() must bring a list of one tensor": (Summing, brings(lambda wires: wires * 2)),
}


@pytest.mark.parametrize(("words", "mistake"), MISTAKES.items(), ids=MISTAKES)
def test_what_communicate_returns_is_checked(local, words, mistake):
    cls, move = mistake
    with pytest.raises(grace.GraceError) as caught:
        cls("none", "none", move).step(torch.ones(4), "w")
    assert words in str(caught.value)


def test_the_engine_is_not_blamed_for_what_communicate_returns(local):
    model = torch.nn.Linear(3, 3)
    wrong = Summing("none", "none", lambda grc, wire: grc.backend.allreduce(wire))
    optimizer = grace.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, communicator=wrong)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(grace.ExchangeError, match=r"at step 0: summing: the handle.*one tensor, the sum") as caught:
        optimizer.step()
    assert "ended" not in str(caught.value)


def test_what_a_handle_is_mapped_by_is_called_once(local):
    def halved(total):
        called.append(len(total))
        return [total.mul_(0.5)]

    called, model = [], Given({"w": (4,)})
    halving = Summing("none", "none", lambda grc, wire: grc.backend.allreduce(wire).map(halved))
    optimizer = grace.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, communicator=halving)
    model.backward({"w": [2.0, 4.0, 6.0, 8.0]})
    optimizer.step()
    assert model.w.grad.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert len(called) == 1


@dataclass
class Dataclass(Communicator):
    """A communicator whose ``__init__`` a dataclass has made, without that of its base."""

    name = "dataclass"
    most: int = 3

    def communicate(self, wire):
        return self.backend.allgather(wire)


def test_a_communicator_that_has_no_parts_is_refused(local):
    with pytest.raises(grace.ConfigError, match=r"Dataclass.__init__\(\) must call super\(\).__init__\(compressor"):
        distributed(Given(SHAPES), communicator=Dataclass())
