"""Steps that are exchanged uncompressed first: plain means, then the method as if training had begun there."""

import json

import pytest
import torch

import grace
from tests.support.pools import on_ranks
from tests.support.trained import bits
from tests.support.training import Given, ddp, distributed, made_up, refusal, sgd, state_of, train_given

BEGIN, STEPS = 3, 6
SHAPES = {"matrix": (40, 30), "vector": (700,), "scalar": ()}
TOPK = "topk(ratio=0.1)"


def gradients_of(model, optimizer, steps):
    """Gradients after each step, as bits."""
    found = []
    for step in steps:
        train_given(model, optimizer, [step])
        found.append([bits(p.grad) for p in model.parameters()])
    return found


def stepped(steps, compressor=None, dtype=torch.float32, **choices):
    """Gradients after each step of a new model, and its optimizer."""
    model = Given(SHAPES, dtype)
    optimizer = distributed(model, compressor, **choices)
    return gradients_of(model, optimizer, steps), optimizer


def check_begins_late(choices, dtype=torch.float32):
    """The first steps are plain means, the others those of a run that begins there, and memories are alike."""
    plain = {key: value for key, value in choices.items() if key not in ("compressor", "memory")}
    if str(plain.get("communicator", "")).startswith(("scatter", "allgather", "broadcast")):
        del plain["communicator"]
    before, _ = stepped(range(BEGIN), dtype=dtype, **plain)
    later, other = stepped(range(BEGIN, STEPS), dtype=dtype, **choices)
    found, optimizer = stepped(range(STEPS), dtype=dtype, compress_after=BEGIN, **choices)
    assert state_of(optimizer).keys() == state_of(other).keys()
    assert found[:BEGIN] == before
    assert found[BEGIN:] == later


CHOICES = [
    {"compressor": TOPK},
    {"compressor": "block(bits=4)"},
    {"compressor": "block(bits=4)", "communicator": "scatter_reduce"},
    {"compressor": TOPK, "communicator": "reduce_broadcast(destination=1)"},
    {"compressor": TOPK, "communicator": "scatter_merge"},
    {"compressor": "fp16"},
    {"compressor": "signsgd", "memory": "none"},
    {"compressor": "threshold(value=0.5)"},
]


@pytest.mark.parametrize("choices", CHOICES, ids=lambda choices: " ".join(choices.values()))
@on_ranks()
def test_plain_means_and_then_the_method_from_its_beginning(choices):
    check_begins_late(choices)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@on_ranks()
def test_variables_of_other_dtypes_are_summed_as_they_are(dtype):
    check_begins_late({"compressor": TOPK}, dtype)


@on_ranks(3)
def test_ranks_of_a_node_reduce_first_all_the_time():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRACE_NODE", "aab"[grace.rank()])
        check_begins_late({"compressor": TOPK, "hierarchical": True})


@on_ranks()
def test_no_delayed_mean_is_lost_when_compression_begins():
    """The sums of all means are those of a run that never compresses."""
    totals = []
    for compressor, options in (("topk(ratio=0.9)", {"compress_after": BEGIN}), ("none", {})):
        model = Given(SHAPES)
        optimizer = distributed(model, compressor, communicator="reduce_broadcast(staleness=2)", **options)
        total = [torch.zeros_like(p) for p in model.parameters()]
        for step in range(BEGIN + 2):
            train_given(model, optimizer, [step])
            for own, p in zip(total, model.parameters(), strict=True):
                if p.grad is not None:
                    own += p.grad
        totals.append([bits(own) for own in total])
    assert totals[0] == totals[1]


@on_ranks()
def test_rows_of_sparse_gradients_are_plain_first():
    found = []
    for options in ({"compressor": TOPK, "compress_after": BEGIN}, {"compressor": "none"}):
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
    assert late[:BEGIN] == plain[:BEGIN]
    assert late[BEGIN] != plain[BEGIN]


@pytest.mark.parametrize("at", [1, BEGIN, BEGIN + 1])
@on_ranks()
def test_a_run_resumes_before_and_after_compression_begins(at):
    model, again = Given(SHAPES), Given(SHAPES)
    optimizer = distributed(model, TOPK, compress_after=BEGIN)
    train_given(model, optimizer, range(at))
    saved = optimizer.full_state_dict()
    rest = gradients_of(model, optimizer, range(at, STEPS))
    other = distributed(again, TOPK, compress_after=BEGIN)
    other.load_state_dict(saved)
    assert gradients_of(again, other, range(at, STEPS)) == rest


def hooked(steps, **options):
    """Gradients after each step under DDP's hook."""
    model = Given(SHAPES)
    wrapped, optimizer = ddp(model, bucket_cap_mb=0.001), sgd(model.parameters())
    grace.torch.register_ddp_hook(wrapped, optimizer=optimizer, **options)
    found = []
    for step in steps:
        optimizer.zero_grad()
        wrapped(made_up(SHAPES, step, grace.rank())).backward()
        found.append([bits(p.grad) for p in model.parameters()])
        optimizer.step()
    return found


@on_ranks()
def test_ddps_hook_begins_late_as_well():
    plain, late = hooked(range(BEGIN), compressor="none"), hooked(range(BEGIN, STEPS), compressor=TOPK)
    assert hooked(range(STEPS), compressor=TOPK, compress_after=BEGIN) == plain + late


def by_strategy(file):
    plain, _ = stepped(range(BEGIN))
    later, _ = stepped(range(BEGIN, STEPS), strategy=file.replace("late", "usual"))
    found, optimizer = stepped(range(STEPS), strategy=file)
    written = optimizer.strategy.to_dict()["variables"]["matrix"]["compress_after"]
    return found == plain + later, written


def test_a_strategy_file_says_it_for_some_variables(two_ranks, tmp_path):
    rule = {"match": {}, "sync": {"type": "allgather"}, "compressor": TOPK}
    for name, more in (("late", {"compress_after": BEGIN}), ("usual", {})):
        (tmp_path / f"{name}.json").write_text(json.dumps({"version": 1, "rules": [{**rule, **more}]}))
    assert two_ranks.run(by_strategy, str(tmp_path / "late.json")) == [(True, BEGIN)] * 2


@pytest.mark.parametrize(
    ("compressor", "choices", "said"),
    [
        ("dgc", {"compress_after": 3}, "compress_after=3: the memory dgc"),
        ("signsgd", {"op": "sum", "compress_after": 3}, "op='sum' with compress_after=3: signsgd votes"),
        ("topk", {"op": "sum", "outer": "none", "period": 2}, "op='sum' does not go with outer="),
        (None, {"strategy": "auto", "compress_after": 3}, "does not go with strategy='auto'"),
        ("topk", {"compress_after": -1}, "compress_after must be a whole number of at least 0, not -1"),
    ],
)
def test_momentum_cannot_wait_and_sums_are_no_votes_nor_rounds(compressor, choices, said):
    plain = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    message = refusal(distributed, Given(SHAPES), compressor, optimizer=plain, **choices)
    assert said in message
    assert compressor != "dgc" or "replaces the optimizer's momentum" in message
