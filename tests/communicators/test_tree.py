"""A communicator is one file: a tree, which says its route, is carried, counted, planned, described and traced."""

import dataclasses
import json
import os
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import grace
import grace.torch
from grace.compressors.cast import Cast
from grace.core.route import BROADCAST, Carries, Collective, EngineTraits, Leg
from grace.core.variable import Variable
from grace.exchange.bucket import Bucket
from grace.exchange.route_bytes import predict_bytes
from grace.exchange.tracing import recorder
from tests.support.drawing import THOROUGH
from tests.support.own_parts import registered
from tests.support.pools import launched, on_ranks
from tests.support.strategies import assert_close, executed, mixed, on_the_mean, train, weights
from tests.support.training import Given, ddp, distributed, loss_of, means, net, sgd

pytestmark = pytest.mark.ranks
SHAPES = {"matrix": (40, 30), "vector": (700,), "scalar": ()}


class Tree(grace.Communicator):
    """Sums payloads in ceil(log2 W) hops: in hop h rank r + 2^h sends its partial sum to rank r. Rank 0 has the total
    then, and broadcasts it."""

    name = "tree"
    cost = "p; (W-1)p in and out of the destination"
    sums = True

    def legs(self, nbytes, engine):
        return [Leg(TO_THE_ROOT, Carries.GRADIENTS, root=0), Leg(BROADCAST, Carries.SUMS, root=0)]


class Reduction:
    """A sum on its way down the tree."""

    def __init__(self, backend: Any, wire: Any):
        self.backend, self.total, self.done = backend, wire, False
        if backend.rank:
            backend.count(grace.kernels_of(wire).nbytes(wire))

    def wait(self) -> None:
        """Take part in the hops, up to the one in which this rank sends."""
        rank, size, hop = self.backend.rank, self.backend.size, 1
        while hop < size and not self.done:
            if rank % (2 * hop):
                send(self.backend, self.total, rank - hop)
                self.done = True
            elif rank + hop < size:
                self.total = self.total + receive(self.backend, self.total, rank + hop)
            hop *= 2
        self.done = True


def to_the_root(backend, wire, root):
    """Start a reduction to rank 0."""
    reduction = Reduction(backend, wire)
    return grace.Handle(reduction.wait, later=lambda: [reduction.total])


def sent(nbytes, ranks, rank, root):
    """Return the bytes that leave a rank: every one but the root sends once."""
    return nbytes if rank != root else 0.0


TO_THE_ROOT = Collective("tree", to_the_root, sent)


def send(backend, wire, rank):
    """Send a wire to a rank, over torch.distributed or MPI."""
    if hasattr(backend, "comm"):
        backend.comm.Send(np.ascontiguousarray(wire), rank)
    else:
        dist.send(wire, rank, group=backend.group)


def receive(backend, like, rank):
    """Return what a rank sends."""
    if hasattr(backend, "comm"):
        buffer = np.empty(tuple(like.shape), grace.kernels_of(like).dtype(like))
        backend.comm.Recv(buffer, rank)
        return grace.kernels_of(like).full(buffer.tolist(), grace.kernels_of(like).dtype(like), like)
    buffer = torch.empty_like(like)
    dist.recv(buffer, rank, group=backend.group)
    return buffer


def stepped(communicator, steps=3):
    """Gradients after each step, the bytes that left this rank, and those that the route's shapes say."""
    model = Given(SHAPES)
    optimizer = distributed(model, communicator=communicator)
    found = means(model, optimizer, range(steps))
    runner = optimizer._grace.runner
    engine = EngineTraits(grace.size(), runner.channel.by_ring, runner.channel.concatenates)
    said = 0.0
    for bucket in runner.buckets:
        said += sum(leg.sent(nbytes, grace.size(), grace.rank()) for leg, nbytes, _ in predict_bytes(bucket, engine))
    return found, runner.traffic.sent_bytes, steps * said


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("spec", ["none", "randomk(ratio=0.5)", "powersgd(rank=2)"])
@on_ranks()
def test_its_means_are_an_allreduces_and_its_bytes_those_that_its_route_says(spec, size):
    mine, sent, said = stepped(Tree(spec))
    usual, *_ = stepped(grace.torch.Allreduce(spec))
    pairs = [(one[name], other[name]) for one, other in zip(mine, usual, strict=True) for name in SHAPES]
    assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-5
    assert sent == said


def through_ddp(communicator):
    model = net()
    wrapped, optimizer = ddp(model, bucket_cap_mb=0.001), sgd(model.parameters())
    grace.torch.register_ddp_hook(wrapped, communicator=communicator)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(wrapped, step).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@on_ranks()
def test_ddps_hook_carries_it():
    pairs = zip(through_ddp(Tree("none")), through_ddp(grace.torch.Allreduce("none")), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-5


def by_strategy(strategy):
    with registered(Tree):
        model = mixed()
        optimizer = executed(model, strategy)
        train(model, optimizer, range(3))
        return weights(model), optimizer.strategy.to_dict()["variables"]["dense.weight"]["sync"]["type"]


def test_a_strategy_file_names_it_and_it_is_described(two_ranks, tmp_path):
    document = {"version": 1, "cluster": {"world_size": 2}, "rules": [{"match": {}, "sync": {"type": "tree"}}]}
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(document))
    for got, kind in two_ranks.run(by_strategy, str(file)):
        assert_close(got, on_the_mean(mixed(), 2, range(3)))
        assert kind == "tree"


def traced(folder):
    os.environ[recorder.FOLDER], os.environ[recorder.SKIP] = folder, "0"
    try:
        stepped(Tree("none"))
    finally:
        del os.environ[recorder.FOLDER], os.environ[recorder.SKIP]
        recorder.run.write()
        recorder.run = recorder.active = None


def test_its_legs_are_traced(two_ranks, tmp_path):
    two_ranks.run(traced, str(tmp_path))
    events = [json.loads(line) for line in (tmp_path / "rank1.jsonl").read_text().splitlines()]
    begun = [event for event in events if event.get("ph") == "b"]
    assert len(begun) == 2 * 3  # two legs in each of three steps
    assert all(event["args"]["communicator"].startswith("tree") for event in begun)


def keras_means():
    import tensorflow as tf

    import grace.tensorflow

    w = tf.Variable(tf.zeros([40]))
    exchange = grace.tensorflow.GradientExchange(communicator=Tree("none"))
    gradients = [np.full(40, n + grace.rank(), np.float32) for n in range(3)]
    return [np.array(exchange.exchange([tf.constant(gradient)], [w])[0].value) for gradient in gradients]


@pytest.mark.skipif(
    not THOROUGH, reason="left to `make thorough`: ranks of TensorFlow, which exchange by the same route"
)
def test_keras_gradients_are_carried_by_it():
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    for found in launched("mpirun-mpi", 2, "tensorflow").run(keras_means):
        np.testing.assert_allclose(found, [np.full(40, n + 0.5) for n in range(3)], atol=1e-6)


def test_the_planner_reads_its_route():
    from grace.planner.exchange_costs import transfers_of
    from grace.planner.network import Links

    bucket = Bucket(0, Tree("none"), [Variable("w", (1000,))])
    found = transfers_of(predict_bytes(bucket, EngineTraits(4)), 4, Links(1e9))
    assert [transfer.kind for transfer in found] == ["alltoall", "broadcast"]  # measured as the nearest known one
    assert found[1].root == 0


def test_torch_tensors_of_one_rank_stay_as_they_are():
    assert Tree("none").step(torch.tensor([1.0, 2.0]), "w").tolist() == [1.0, 2.0]


class Halved(Cast):
    """Half precision, which the tree carries unless another communicator is named."""

    name = "halved"
    traits = dataclasses.replace(Cast.traits, communicator="tree")

    def payload_spec(self, shape, step):
        return super().payload_spec(shape, step)


def planned_model():
    model = torch.nn.Linear(512, 256)
    return model, lambda model: model(torch.ones(4, 512)).sum(), 4


def command(*words) -> str:
    """Run a ``grace`` command, and return what it prints."""
    pytest.importorskip("typer", reason="typer is not installed")
    from typer.testing import CliRunner

    from grace.cli.main import app

    with registered(Tree, Halved):
        ran = CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "200"})
    assert ran.exit_code == 0, ran.output
    return " ".join(ran.output.split())


MODEL = ("--model", "tests.communicators.test_tree:planned_model")
GIVEN = ("--forward", "1ms", "--backward", "2ms", "--optimizer", "1ms", "--bandwidth", "100mbit", "--ranks", 4)


@pytest.mark.parametrize("codecs", ["usual", *(["measure"] if THOROUGH else [])])
def test_grace_plan_predicts_it(codecs):
    said = command("plan", *MODEL, *GIVEN, "--methods", "halved", "--codecs", codecs)
    assert re.search(r" halved (?:[\d.]+ ){5}[\d.]+ MB ", said), said  # a row of the table, with its bytes


def test_grace_strategy_show_tells_what_it_sends(tmp_path):
    rule = {"match": {}, "sync": {"type": "tree"}, "compressor": "halved"}
    file = tmp_path / "tree.json"
    file.write_text(json.dumps({"version": 1, "cluster": {"world_size": 4}, "rules": [rule]}))
    said = command("strategy", "show", file, *MODEL)
    assert "tree: counted as tree, broadcast" in said
    assert "rank 0 sends, and receives, 788 kB a step" in said


def test_grace_describe_says_what_it_costs():
    assert "p; (W-1)p in and out of the destination" in command("describe", "tree")
