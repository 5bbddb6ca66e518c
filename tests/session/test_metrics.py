"""Numbers for loggers: bytes, waiting and residuals since they last asked."""

import math
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import grace
from tests.support.engine_pools import DRAWN
from tests.support.pools import on_ranks
from tests.support.training import ddp, distributed, loss_of, net, sgd, state_of, train

KEYS = ["bytes_sent", "bytes_dense", "ratio", "residual_norm", "seconds_encode", "seconds_wait"]


def norm_of(state, key=None):
    """Return the norm of all tensors of the memories, by NumPy."""
    values = [value if key is None else value[key] for value in state.get("memory", {}).values()]
    return math.sqrt(sum(float((value.numpy().astype("float64") ** 2).sum()) for value in values))


def check(intervals, nbytes, steps, waits=True):
    """Intervals are told once; of one that was not asked for, with the next."""
    before = {"sent": 0, "seconds": 0.0, "headers": 0}
    before_steps = 0
    for metrics, counted in intervals:
        made = before_steps + (steps if counted["headers"] or counted["sent"] else 0)
        if metrics is None:
            before, before_steps = counted, made
            continue
        assert list(metrics) == KEYS
        assert all(type(value) is float for value in metrics.values())
        assert metrics["bytes_sent"] == before["sent"] + counted["sent"]
        assert metrics["bytes_dense"] == made * nbytes  # of two ranks: 2 (W - 1) / W = 1
        if made:
            assert metrics["ratio"] == metrics["bytes_dense"] / metrics["bytes_sent"]
        else:
            assert math.isnan(metrics["ratio"])
        assert metrics["residual_norm"] == pytest.approx(counted["norm"], rel=1e-12)
        spent = metrics["seconds_encode"] + (metrics["seconds_wait"] if waits else 0.0)
        assert 0 <= spent <= before["seconds"] + counted["seconds"]
        assert (metrics["seconds_encode"] > 0) == (made > 0)
        assert math.isnan(metrics["seconds_wait"]) is not waits
        before, before_steps = {"sent": 0, "seconds": 0.0, "headers": 0}, 0


WAYS = [
    ("gloo", "none", {}),
    ("gloo", "topk(ratio=0.1)", {}),
    ("gloo", "dgc(ratio=0.1)", {}),
    ("gloo", "powersgd(rank=2)", {}),
    ("gloo", "qsgd", {"communicator": "scatter_reduce", "memory": "residual"}),
    ("gloo", "topk(ratio=0.1)", {"memory": "none"}),
    *((engine, "topk(ratio=0.1)", {}) for engine in DRAWN),
]


@pytest.mark.every
@pytest.mark.parametrize(("engine", "compressor", "choices"), WAYS, ids=str)
@on_ranks()
def test_an_interval_is_what_was_counted_and_kept(engine, compressor, choices):
    """Three intervals' metrics, of which only rank 1 asks for the second."""
    model = net()
    optimizer = distributed(model, compressor, optimizer=lambda p: torch.optim.SGD(p, lr=0.05), **choices)
    intervals = []
    for asks in (True, grace.rank() == 1, True):
        began, before, headers = time.perf_counter(), optimizer.traffic.sent_bytes, optimizer.traffic.header_bytes
        train(model, optimizer, range(2))
        seconds = time.perf_counter() - began
        counted = {"sent": optimizer.traffic.sent_bytes - before, "seconds": seconds}
        counted["headers"] = optimizer.traffic.header_bytes - headers
        counted["norm"] = norm_of(state_of(optimizer), "accumulated" if "dgc" in compressor else None)
        intervals.append((optimizer.metrics() if asks else None, counted))
    intervals.append((optimizer.metrics(), {**counted, "sent": 0, "seconds": 1e-3, "headers": 0}))
    optimizer.close()
    check(intervals, sum(p.nbytes for p in model.parameters()), 2)
    last, counted = intervals[0]
    assert (last["residual_norm"] > 0) == (compressor != "none" and choices.get("memory") != "none")
    if compressor == "none":
        assert last["bytes_sent"] - counted["headers"] == last["bytes_dense"]


def late():
    model = net()
    optimizer = distributed(model, "topk(ratio=0.1)")
    train(model, optimizer, range(2))
    optimizer.metrics()
    if grace.rank() == 1:
        time.sleep(2.0)  # more than a busy machine takes for a step
    train(model, optimizer, range(1))
    return optimizer.metrics()["seconds_wait"]


def test_who_is_waited_for_waits_less(two_ranks):
    waited, slow = two_ranks.run(late)
    assert slow < waited


def scaled(scale):
    """The norm after steps with a loss scale, in which the gradient's and the residual's bits are the same."""
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1)
    optimizer = distributed(model, "topk(ratio=0.1)", grad_scaler=scaler)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    return optimizer.metrics()["residual_norm"]


def test_the_norm_is_in_the_units_of_the_gradient(two_ranks):
    assert two_ranks.run(scaled, 1.0) == two_ranks.run(scaled, 1024.0)


def plain_net():
    """FSDP2 takes no scalars."""
    linear = torch.nn.Linear
    return torch.nn.Sequential(torch.nn.Flatten(), linear(64, 20), torch.nn.ReLU(), linear(20, 10))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@on_ranks(2)
def test_hooks_tell_as_optimizers_do(kind):
    """After three steps on the same gradients."""
    ours, other = net(make=plain_net), net(make=plain_net)
    optimizer = distributed(ours, "topk(ratio=0.1)")
    train(ours, optimizer, range(3))
    if kind == "ddp":
        model = ddp(other)
        state = grace.torch.register_ddp_hook(model, "topk(ratio=0.1)")
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(other, mesh=mesh["shard"])
        state = grace.torch.register_fsdp_hook(model, mesh["replicate"], "topk(ratio=0.1)")
    plain = sgd(model.parameters())
    for step in range(3):
        plain.zero_grad()
        loss_of(model, step).backward()
        plain.step()
    own, metrics, after = optimizer.metrics(), state.metrics(), state.metrics()
    assert metrics["residual_norm"] == pytest.approx(own["residual_norm"], rel=1e-12)
    assert metrics["bytes_dense"] == own["bytes_dense"]
    assert metrics["bytes_sent"] == pytest.approx(own["bytes_sent"], rel=0.05)  # wires are cut elsewhere
    assert math.isnan(metrics["seconds_wait"]) is (kind == "ddp")
    assert after["bytes_sent"] == after["bytes_dense"] == 0
    assert math.isnan(after["ratio"])


class Averaging(grace.Memory):
    """A user's memory, with two dicts."""

    def __init__(self):
        self.residuals, self.counts = {}, {}

    def compensate(self, tensor, name):
        return tensor + self.residuals.get(name, 0.0)

    def update(self, tensor, name, compressor, payload, ctx):
        self.residuals[name] = tensor - compressor.decompress(payload, ctx).reshape(tensor.shape)
        self.counts[name] = self.counts.get(name, 0.0) + 1.0


def test_of_a_users_memory_all_tensors_count(local):
    model, usual = net(), net()
    own, theirs = distributed(model, "topk(ratio=0.1)", memory=Averaging()), distributed(usual, "topk(ratio=0.1)")
    for each, optimizer in ((model, own), (usual, theirs)):
        train(each, optimizer, range(3))
    assert own.metrics()["residual_norm"] == pytest.approx(theirs.metrics()["residual_norm"], rel=1e-6)
