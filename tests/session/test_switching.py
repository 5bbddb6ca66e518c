"""Another strategy in the middle of training: memories go along, nothing is lost, and all ranks switch or none."""

import numpy as np
import pytest
import torch

import grace
from grace.strategy import ShardPlan, Sync
from tests.support.pools import on_ranks
from tests.support.strategies import cut, executed, strategy_of, uneven
from tests.support.training import Given, copied, digest, made_up, refusal, train_given, weights

SHAPES = {"w": (12, 8), "v": (40, 6), "b": (5,)}
PLAIN, TOPK = "uniform", "uniform(compressor=topk(ratio=0.1))"
POWERSGD = "uniform(compressor=powersgd(rank=1))"
EFSIGNSGD = "uniform(compressor=efsignsgd)"


def made(strategy, momentum=0.0, **options):
    model = Given(SHAPES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum)
    return model, grace.DistributedOptimizer(optimizer, model, strategy=strategy, **options)


def switching(*strategies, momentum=0.0):
    """Weights after two steps of each strategy, and one more of the last."""
    model, optimizer = made(strategies[0], momentum)
    train_given(model, optimizer, range(2))
    for i, strategy in enumerate(strategies[1:], 1):
        optimizer.use_strategy(strategy)
        train_given(model, optimizer, range(2 * i, 2 * i + 2))
    assert optimizer.traffic.steps == 2 * len(strategies)
    return weights(model)


def on_the_mean(count, size):
    return {
        name: -sum(made_up(SHAPES, step, rank)[name] for step in range(count) for rank in range(size)) / size
        for name in SHAPES
    }


def check_is_the_mean(got, count):
    for name, wanted in on_the_mean(count, grace.size()).items():
        np.testing.assert_allclose(got[name], wanted, rtol=1e-4, atol=1e-4)


def parts(compressor="topk(ratio=0.1)"):
    """One variable in three parts, each summed up by another method."""
    gathered = ShardPlan(Sync("allgather", group=0), compressor, "residual")
    dense = ShardPlan(Sync("allreduce", group=1), "none", "none")
    plans = [cut(name, SHAPES[name], [gathered, dense, gathered], 0, [SHAPES[name][0] - 2, 1, 1]) for name in SHAPES]
    return strategy_of(*plans).to_dict()


@pytest.mark.parametrize("between", [[TOPK], [TOPK, POWERSGD], [EFSIGNSGD], [POWERSGD, TOPK, EFSIGNSGD]], ids=str)
@on_ranks()
def test_nothing_is_lost_on_the_way_back_to_plain_sums(between):
    check_is_the_mean(switching(PLAIN, *between, PLAIN), 2 * (len(between) + 2))


@on_ranks(3)
def test_nothing_is_lost_where_variables_are_cut_anew():
    check_is_the_mean(switching(TOPK, parts(), TOPK, PLAIN), 8)


class WithRows(Given):
    """The same, whose rows of an embedding have gradients, too."""

    def __init__(self):
        super().__init__(SHAPES)
        self.words = torch.nn.Embedding.from_pretrained(torch.zeros(12, 6), freeze=False, sparse=True)

    def forward(self, given):
        rows = torch.as_tensor(given["words.weight"])
        dense = {name: value for name, value in given.items() if name in SHAPES}
        return super().forward(dense) + (self.words(torch.arange(12)) * rows).sum()


def by(sync, compressor, hierarchical=False):
    """One choice for dense variables, with a residual; rows take the one that they can."""
    sync = {"type": sync, "hierarchical": True} if hierarchical else {"type": sync}
    rows = {**sync, "type": "allgather"}
    rules = [{"match": {"sparse": True}, "sync": rows, "compressor": "topk(ratio=0.2)"}]
    rules += [{"match": {}, "sync": sync, "compressor": compressor, "memory": "residual"}]
    return {"version": 1, "rules": rules}


PS, ELSEWHERE = "ps(compressor=topk(ratio=0.1))", "ps(compressor=topk(ratio=0.1), destination=2)"
CUT = "partitioned_ps(min_shard_bytes=0, compressor=topk(ratio=0.1))"
SHARDS = by("scatter_reduce", "block(bits=2)")
LED, LED_SHARDS = by("allgather", "topk(ratio=0.1)", True), by("scatter_reduce", "block(bits=2)", True)
LED_MATRIX = {"version": 1, "rules": [{**LED["rules"][1], "match": {"name": "w"}}, *by("allgather", "topk")["rules"]]}
KEPT = {
    "answers": [PS],
    "delayed answers": ["ps(compressor=topk(ratio=0.1), staleness=1)"],
    "answers elsewhere": [PS, ELSEWHERE, CUT],
    "no answers": [ELSEWHERE, TOPK],
    "shards": [SHARDS],
    "shards no more": [SHARDS, TOPK],
    "leaders": [LED],
    "leaders no more": [LED, TOPK, LED],
    "shards of leaders": [LED_SHARDS, SHARDS],
    "leaders of one": [LED_MATRIX, TOPK, LED_MATRIX, LED, LED_MATRIX],
}


@pytest.mark.every
@pytest.mark.parametrize("op", ["average", "sum"])
@on_ranks(3)
def test_nothing_is_lost_of_rows_answers_shards_and_leaders(op):
    """On two nodes, of two ranks and one."""
    shapes = {**SHAPES, "words.weight": (12, 6)}
    ends = {}
    for case, between in KEPT.items():
        model, step = WithRows(), 0
        optimizer = executed(model, PLAIN, lambda p: torch.optim.SGD(p, lr=1.0), op=op)
        for strategy in [*between, PLAIN]:
            train_given(model, optimizer, range(step, step + 2))
            with uneven():
                optimizer.use_strategy(strategy)
            step += 2
        train_given(model, optimizer, range(step, step + 2))
        optimizer.close()
        for name, got in weights(model).items():
            given = [made_up(shapes, n, rank)[name] for n in range(step + 2) for rank in range(3)]
            wanted = -sum(given) / (3 if op == "average" else 1)
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4, err_msg=f"{case}: {name}")
        ends[case] = digest(weights(model))
    return ends


def unswitched(strategy):
    model, optimizer = made(strategy, momentum=0.9)
    train_given(model, optimizer, range(6))
    return digest(weights(model))


@on_ranks()
def test_a_switch_to_the_same_changes_no_bit():
    assert digest(switching(TOPK, TOPK, TOPK, momentum=0.9)) == unswitched(TOPK)


def foreign():
    return strategy_of(cut("other", (4,), [ShardPlan(Sync("allreduce", group=0))] * 2, 0, [2, 2]), size=2).to_dict()


@pytest.mark.parametrize(
    ("strategy", "words"),
    [("uniform(compressor=tokp)", "did you mean 'topk'"), (foreign(), "other")],
    ids=["name", "model"],
)
@on_ranks()
def test_what_is_refused_changes_nothing(strategy, words):
    model, optimizer = made(TOPK, momentum=0.9)
    train_given(model, optimizer, range(3))
    assert words in refusal(optimizer.use_strategy, strategy, kind=grace.GraceError)
    train_given(model, optimizer, range(3, 6))
    assert digest(weights(model)) == unswitched(TOPK)


@on_ranks()
def test_no_switch_in_the_middle_of_a_step():
    model, optimizer = made(TOPK)
    train_given(model, optimizer, range(3))
    model.backward(made_up(SHAPES, 9, grace.rank()))
    said = refusal(optimizer.use_strategy, PLAIN, kind=grace.GraceError)
    assert said.startswith("the exchange of a step is under way")
    train_given(model, optimizer, range(3, 6))


@on_ranks()
def test_a_checkpoint_after_a_switch():
    """A run that was saved after a switch and went on ends as one that loaded that."""
    one, optimizer = made(TOPK, momentum=0.9)
    train_given(one, optimizer, range(2))
    optimizer.use_strategy(POWERSGD)
    train_given(one, optimizer, range(2, 4))
    saved = copied({"model": one.state_dict(), "optimizer": optimizer.full_state_dict()})
    two, other = made(POWERSGD, momentum=0.9)
    two.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    train_given(one, optimizer, range(4, 6))
    train_given(two, other, range(4, 6))
    assert digest(weights(one)) == digest(weights(two))


@on_ranks(2)
def test_residuals_are_given_back_in_units_of_the_loss_scale():
    """With a loss scale of 8, and back to plain sums: the residual is in its units."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    model, optimizer = made(TOPK, grad_scaler=scaler)
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(model(made_up(SHAPES, step, grace.rank()))).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 6:
            optimizer.use_strategy(PLAIN)
    check_is_the_mean(weights(model), 8)


@pytest.mark.parametrize("thrown_away", ["overflow", "zero_grad"])
@on_ranks(2)
def test_residuals_are_given_back_by_the_first_step_that_is_used(thrown_away):
    """Right after the switch one rank overflows, or all clear the means of synchronize()."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    model, optimizer = made(TOPK, grad_scaler=scaler)

    def backward(step, factor=1.0):
        optimizer.zero_grad()
        gradients = made_up(SHAPES, step, grace.rank())
        scaler.scale(model({name: factor * g for name, g in gradients.items()})).backward()

    for step in range(6):
        backward(step)
        scaler.step(optimizer)
        scaler.update()
        if step != 3:
            continue
        optimizer.use_strategy(PLAIN)
        if thrown_away == "overflow":
            backward(9, factor=np.inf if grace.rank() else 1.0)
            scaler.step(optimizer)
            scaler.update()
        else:
            backward(9)
            optimizer.synchronize()
    check_is_the_mean(weights(model), 6)


@on_ranks(2)
def test_a_residual_is_given_back_once_where_nothing_skips_a_step_that_overflowed():
    model, optimizer = made(TOPK)
    train_given(model, optimizer, range(2))
    optimizer.use_strategy(PLAIN)
    before = weights(model)["w"]
    optimizer.zero_grad()
    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    model.backward({**zeros, "b": np.full(SHAPES["b"], np.inf, np.float32)})
    optimizer.step()
    assert torch.equal(weights(model)["w"], before)
    train_given(model, optimizer, range(2, 4))
    np.testing.assert_allclose(weights(model)["w"].numpy(), on_the_mean(4, 2)["w"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ["horovodrun-gloo", "mpirun-mpi"])
@on_ranks()
def test_on_other_engines(engine):
    check_is_the_mean(switching(PLAIN, TOPK, PLAIN), 6)
