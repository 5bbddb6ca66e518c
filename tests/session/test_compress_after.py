"""Steps that are exchanged uncompressed first: plain means, then the method as if training had begun there."""

import json
import os

import numpy as np
import pytest
import torch

import grace
import grace.torch
from grace.errors import ConfigError
from tests.support.pools import launched, ranks_of
from tests.support.trained import bits
from tests.support.training import Given, ddp, distributed, made_up, sgd, state_of

pytestmark = pytest.mark.ranks
BEGIN, STEPS = 3, 6
SHAPES = {"matrix": (40, 30), "vector": (700,), "scalar": ()}


def stepped(steps, compressor=None, shapes=SHAPES, wrap=distributed, dtype=torch.float32, **choices):
    """Gradients after each step, as bits; what is remembered at the end; the optimizer and its parameters."""
    model = Given(shapes, dtype)
    optimizer = wrap(model, compressor, **choices)
    found = []
    for step in steps:
        optimizer.zero_grad()
        model.backward(made_up(shapes, step, grace.rank()))
        optimizer.step()
        found.append([bits(p.grad) for p in model.parameters()])
    return found, optimizer


def beside_both(choices, dtype=torch.float32):
    """True if the first steps are plain means, the others those of a run that begins there, and memories are alike."""
    plain = {key: value for key, value in choices.items() if key not in ("compressor", "memory")}
    if str(plain.get("communicator", "")).startswith(("scatter", "allgather", "broadcast")):
        del plain["communicator"]
    before, _ = stepped(range(BEGIN), dtype=dtype, **plain)
    later, other = stepped(range(BEGIN, STEPS), dtype=dtype, **choices)
    found, optimizer = stepped(range(STEPS), dtype=dtype, compress_after=BEGIN, **choices)
    same = state_of(optimizer).keys() == state_of(other).keys()
    return found[:BEGIN] == before, found[BEGIN:] == later, same


CHOICES = [
    {"compressor": "topk(ratio=0.1)"},
    {"compressor": "block(bits=4)"},
    {"compressor": "block(bits=4)", "communicator": "scatter_reduce"},
    {"compressor": "topk(ratio=0.1)", "communicator": "reduce_broadcast(destination=1)"},
    {"compressor": "topk(ratio=0.1)", "communicator": "scatter_merge"},
    {"compressor": "fp16"},
    {"compressor": "signsgd", "memory": "none"},
    {"compressor": "threshold(value=0.5)"},
]


@pytest.mark.parametrize("choices", CHOICES, ids=lambda choices: " ".join(choices.values()))
def test_plain_means_and_then_the_method_from_its_beginning(two_ranks, choices):
    assert two_ranks.run(beside_both, choices) == [(True, True, True)] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_variables_of_other_dtypes_are_summed_as_they_are(two_ranks, dtype):
    assert two_ranks.run(beside_both, {"compressor": "topk(ratio=0.1)"}, dtype) == [(True, True, True)] * 2


def on_two_nodes():
    os.environ["GRACE_NODE"] = "aab"[grace.rank()]
    try:
        return beside_both({"compressor": "topk(ratio=0.1)", "hierarchical": True})
    finally:
        del os.environ["GRACE_NODE"]


def test_ranks_of_a_node_reduce_first_all_the_time():
    assert ranks_of(3).run(on_two_nodes) == [(True, True, True)] * 3


def delayed():
    """Sums of all means: of a run that begins late, and of one that never compresses."""
    totals = []
    for compressor, options in (("topk(ratio=0.9)", {"compress_after": BEGIN}), ("none", {})):
        communicator = {"name": "reduce_broadcast", "staleness": 2}
        model = Given(SHAPES)
        optimizer = distributed(model, compressor, communicator=communicator, **options)
        total = [torch.zeros_like(p) for p in model.parameters()]
        for step in range(BEGIN + 2):
            optimizer.zero_grad()
            model.backward(made_up(SHAPES, step, grace.rank()))
            optimizer.step()
            for own, p in zip(total, model.parameters(), strict=True):
                if p.grad is not None:
                    own += p.grad
        totals.append([bits(own) for own in total])
    return totals[0] == totals[1]


def test_no_delayed_mean_is_lost_when_compression_begins(two_ranks):
    assert two_ranks.run(delayed) == [True, True]


def rows():
    """Weights of a table after steps with sparse gradients, of a plain run and of one that compresses later."""
    found = []
    for options in ({"compressor": "topk(ratio=0.1)", "compress_after": BEGIN}, {"compressor": "none"}):
        torch.manual_seed(0)
        model = torch.nn.Embedding(50, 8, sparse=True)
        optimizer = grace.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)
        weights = []
        for step in range(BEGIN + 1):
            optimizer.zero_grad()
            model(torch.tensor([step, 7 + grace.rank()])).square().sum().backward()
            optimizer.step()
            weights.append(bits(model.weight.detach()))
        found.append(weights)
    late, plain = found
    return late[:BEGIN] == plain[:BEGIN], late[BEGIN] != plain[BEGIN]


def test_rows_of_sparse_gradients_are_plain_first(two_ranks):
    assert two_ranks.run(rows) == [(True, True)] * 2


def resumed(at):
    model = Given(SHAPES)
    optimizer = distributed(model, "topk(ratio=0.1)", compress_after=BEGIN)

    def run(model, optimizer, steps):
        found = []
        for step in steps:
            optimizer.zero_grad()
            model.backward(made_up(SHAPES, step, grace.rank()))
            optimizer.step()
            found.append([bits(p.grad) for p in model.parameters()])
        return found

    run(model, optimizer, range(at))
    saved = optimizer.full_state_dict()
    rest = run(model, optimizer, range(at, STEPS))
    again = Given(SHAPES)
    other = distributed(again, "topk(ratio=0.1)", compress_after=BEGIN)
    other.load_state_dict(saved)
    return rest == run(again, other, range(at, STEPS))


@pytest.mark.parametrize("at", [1, BEGIN, BEGIN + 1])
def test_a_run_resumes_before_and_after_compression_begins(two_ranks, at):
    assert two_ranks.run(resumed, at) == [True, True]


class Weighted(Given):
    """Its loss has the gradients that it is given, by a forward pass, as DDP needs one."""

    def forward(self, given):
        named = dict(self.named_parameters())
        return sum((named[name] * torch.as_tensor(g)).sum() for name, g in given.items())


def hooked(steps, **options):
    """Gradients after each step under DDP's hook."""
    model = Weighted(SHAPES)
    wrapped, optimizer = ddp(model, bucket_cap_mb=0.001), sgd(model.parameters())
    grace.torch.register_ddp_hook(wrapped, optimizer=optimizer, **options)
    found = []
    for step in steps:
        optimizer.zero_grad()
        wrapped(made_up(SHAPES, step, grace.rank())).backward()
        found.append([bits(p.grad) for p in model.parameters()])
        optimizer.step()
    return found


def hooks():
    plain, late = hooked(range(BEGIN), compressor="none"), hooked(range(BEGIN, STEPS), compressor="topk(ratio=0.1)")
    return hooked(range(STEPS), compressor="topk(ratio=0.1)", compress_after=BEGIN) == plain + late


def test_ddps_hook_begins_late_as_well(two_ranks):
    assert two_ranks.run(hooks) == [True, True]


def by_strategy(file):
    plain, _ = stepped(range(BEGIN))
    later, _ = stepped(range(BEGIN, STEPS), strategy=file.replace("late", "usual"))
    found, optimizer = stepped(range(STEPS), strategy=file)
    written = optimizer.strategy.to_dict()["variables"]["matrix"]["compress_after"]
    return found == plain + later, written


def test_a_strategy_file_says_it_for_some_variables(two_ranks, tmp_path):
    rule = {"match": {}, "sync": {"type": "allgather"}, "compressor": "topk(ratio=0.1)"}
    for name, more in (("late", {"compress_after": BEGIN}), ("usual", {})):
        (tmp_path / f"{name}.json").write_text(json.dumps({"version": 1, "rules": [{**rule, **more}]}))
    assert two_ranks.run(by_strategy, str(tmp_path / "late.json")) == [(True, BEGIN)] * 2


def keras_means(options):
    import tensorflow as tf

    import grace.tensorflow

    found = []
    for graph in (False, True):
        w = tf.Variable(tf.zeros([400]))
        exchange = grace.tensorflow.GradientExchange("topk(ratio=0.1)", **options)
        call = tf.function(lambda g, exchange=exchange, w=w: exchange([g], [w])[0].value) if graph else None
        for step in range(BEGIN + 2):
            given = tf.constant(made_up({"w": (400,)}, step, grace.rank())["w"])
            mean = call(given) if graph else exchange([given], [w])[0].value
            found.append(int(np.count_nonzero(np.array(mean))))
        exchange.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun-mpi", "horovodrun-gloo"])
def test_keras_gradients_are_plain_first_eagerly_and_in_graphs(launcher):
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    for found in launched(launcher, 2, "tensorflow").run(keras_means, {"compress_after": BEGIN}):
        for counts in (found[: BEGIN + 2], found[BEGIN + 2 :]):
            assert counts[:BEGIN] == [400] * BEGIN
            assert all(count <= 80 for count in counts[BEGIN:])


def test_momentum_cannot_wait_and_sums_are_no_votes():
    with pytest.raises(ConfigError, match=r"compress_after=3: the memory dgc.* replaces the optimizer's momentum"):
        distributed(Given(SHAPES), "dgc", optimizer=lambda p: torch.optim.SGD(p, lr=0.1), compress_after=3)
    with pytest.raises(ConfigError, match=r"op='sum' with compress_after=3: signsgd votes"):
        distributed(Given(SHAPES), "signsgd", op="sum", compress_after=3)
    with pytest.raises(ConfigError, match="does not go with strategy='auto'"):
        distributed(Given(SHAPES), strategy="auto", compress_after=3)
    with pytest.raises(ConfigError, match="compress_after must be a whole number of at least 0, not -1"):
        distributed(Given(SHAPES), "topk", compress_after=-1)
