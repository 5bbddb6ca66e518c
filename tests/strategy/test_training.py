"""Training under strategies: optimizers, accumulation, priorities, and how a strategy is given."""

import contextlib
import copy
import json
import os
from pathlib import Path

import pytest
import torch
import yaml

import grace
from grace.core.registry import make
from grace.strategy import ShardPlan, Sync, schema
from tests.support.pools import on_ranks, ranks_of
from tests.support.strategies import (
    BUILDERS,
    Tables,
    assert_close,
    built_for,
    executed,
    mixed,
    mixed_loss,
    on_the_mean,
    sgd,
    spec_for,
    strategy_of,
    train,
    weights,
    whole,
)
from tests.support.training import digest, refusal

pytestmark = pytest.mark.ranks


class Looped(torch.nn.Module):
    """Uses one matrix three times, and one embedding twice."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(10, 6, sparse=True)
        self.matrix = torch.nn.Parameter(torch.randn(6, 6) / 3)
        self.head = torch.nn.Linear(6, 4)

    def forward(self, words):
        hidden = self.table(words[:, 0])
        for _ in range(3):
            hidden = torch.tanh(hidden @ self.matrix + self.table(words[:, 1]))
        return self.head(hidden)


def adagrad(parameters):
    """An optimizer with state that takes sparse gradients."""
    return torch.optim.Adagrad(parameters, lr=0.1)


OPTIMIZERS = {"sgd": sgd, "adagrad": adagrad}


@pytest.mark.parametrize("builder", ["parallax", "partitioned_ps(min_shard_bytes=64)"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@on_ranks(2, 3)
def test_a_model_that_uses_its_parameters_several_times_trains_like_one_process(optimizer, builder):
    torch.manual_seed(5)
    model = Looped()
    reference = copy.deepcopy(model)
    train(model, executed(model, builder, OPTIMIZERS[optimizer]), range(3))
    wanted = on_the_mean(reference, grace.size(), range(3), OPTIMIZERS[optimizer])
    # Adagrad divides by the root of what may be nearly nothing
    assert_close(weights(model), wanted, 1e-3 if optimizer == "adagrad" else 2e-5)
    return digest(weights(model))


def both_losses(model, step, rank=None):
    return mixed_loss(model, 2 * step, rank) + mixed_loss(model, 2 * step + 1, rank)


@pytest.mark.parametrize("how", ["passes", "no_sync"])
@pytest.mark.parametrize("builder", ["parallax", "partitioned_ps(min_shard_bytes=64)"])
@on_ranks()
def test_accumulated_gradients(builder, how):
    """Two backward passes a step."""
    model = mixed()
    optimizer = executed(model, builder, backward_passes_per_step=2 if how == "passes" else 1)
    for step in range(0, 4, 2):
        optimizer.zero_grad()
        with optimizer.no_sync() if how == "no_sync" else contextlib.nullcontext():
            mixed_loss(model, step).backward()
        mixed_loss(model, step + 1).backward()
        optimizer.step()
    assert_close(weights(model), on_the_mean(mixed(), 2, range(2), loss=both_losses))
    return digest(weights(model))


@on_ranks(1)
def test_gradients_changed_under_way_are_refused_in_parts_too():
    model = mixed()
    optimizer = executed(model, "partitioned_ps(min_shard_bytes=0)")
    mixed_loss(model, 0).backward()
    model.prime.grad.mul_(0.5)
    said = refusal(optimizer.step, kind=grace.ExchangeError)
    assert "'prime' was changed after its exchange began" in said


@pytest.mark.parametrize(("priorities", "order"), [((0, 0, 0), "cba"), ((-1, 5, 0), "acb"), ((2, 1, 1), "cba")])
@on_ranks()
def test_parts_of_a_lower_priority_start_first(priorities, order):
    """Any order of groups gives the same."""
    model = Tables({"a": (4,), "b": (4,), "c": (4,)})
    parts = [ShardPlan(Sync("allreduce", group=i), priority=p) for i, p in enumerate(priorities)]
    plans = [whole(name, (4,), part) for name, part in zip("abc", parts, strict=True)]
    optimizer = executed(model, strategy_of(*plans))
    model.backward({name: torch.full((4,), float(grace.rank() + i)) for i, name in enumerate("abc")})
    optimizer.step()
    assert "".join(v.name for group in optimizer._grace.runner.buckets for v in group.variables) == order
    for i, p in enumerate(model.parameters()):
        assert p.tolist() == pytest.approx([-0.1 * (0.5 + i)] * 4)


# -- how a strategy is given -------------------------------------------------------------------------------


def given(strategy, environment=None, **choices):
    """Weights after training with what a user gave, or the error."""
    before = os.environ.get("GRACE_STRATEGY")
    os.environ.update({} if environment is None else {"GRACE_STRATEGY": environment})
    try:
        model = mixed()
        options = {} if strategy is None else {"strategy": strategy}
        optimizer = grace.DistributedOptimizer(sgd(model.parameters()), model, **options, **choices)
        train(model, optimizer, range(2))
        return digest(weights(model)), optimizer._grace.runner.name
    except grace.ConfigError as error:
        return str(error), None
    finally:
        if environment is not None and before is None:
            del os.environ["GRACE_STRATEGY"]


SPEC = "partitioned_ps(min_shard_bytes=0, compressor='topk(ratio=0.3)')"


def test_all_ways_to_give_a_strategy_mean_the_same(two_ranks, tmp_path):
    strategy = built_for(SPEC, 2)
    wanted = two_ranks.run(given, strategy)
    assert wanted[0] == wanted[1]
    assert wanted[0][1] == f"strategy {strategy.id}"
    for name in ("s.yaml", "s.json"):
        schema.dump(strategy, tmp_path / name)
        assert two_ranks.run(given, str(tmp_path / name)) == wanted
        assert two_ranks.run(given, tmp_path / name) == wanted
        assert two_ranks.run(given, None, str(tmp_path / name)) == wanted
    for form in (SPEC, make("builder", SPEC), make("builder", SPEC).to_dict(), strategy.to_dict()):
        assert two_ranks.run(given, form) == wanted


def test_rules_are_resolved_on_the_ranks(two_ranks, tmp_path):
    rules = {
        "version": 1,
        "cluster": {"world_size": 2},
        "rules": [
            {"match": {"sparse": True}, "sync": {"type": "reduce_broadcast", "destination": 1}},
            {
                "match": {"ndim": 2, "min_bytes": 8},
                "sync": {"type": "allreduce"},
                "compressor": "fp16",
                "partition": {"axis": 0, "shards": 3},
            },
            {"match": {}, "sync": {"type": "allreduce", "group": 1}},
        ],
    }
    for name, text in {"r.yaml": yaml.safe_dump(rules), "r.json": json.dumps(rules)}.items():
        Path(tmp_path, name).write_text(text)
        answers = two_ranks.run(shards, str(tmp_path / name))
        assert answers[0] == answers[1]
        assert answers[0] == {
            "words.weight": "reduce_broadcast(destination=1)",
            **{f"prime/part_{i}": "allreduce" for i in range(3)},
            **{f"dense.weight/part_{i}": "allreduce" for i in range(3)},
            **dict.fromkeys(["dense.bias", "scale", "empty"], "allreduce"),
        }


def shards(strategy):
    optimizer = executed(mixed(), strategy)
    return {
        name: shard.communicator.spec
        for name, shard in sorted(optimizer._grace.runner.shards.items(), key=lambda item: item[0] != "words.weight")
    }


@pytest.mark.parametrize("choice", [{"compressor": "topk"}, {"memory": "residual"}, {"communicator": "allgather"}])
def test_a_strategy_and_one_method_for_all_are_refused(choice, tmp_path):
    schema.dump(built_for("parallax", 1), tmp_path / "s.yaml")
    one = ranks_of(1)
    for arguments in (("parallax", None), (None, str(tmp_path / "s.yaml"))):
        ((message, _),) = one.run(with_choice, arguments, choice)
        assert f"{next(iter(choice))}= for all of them" in message
        assert ("GRACE_STRATEGY" in message) == (arguments[0] is None)


def with_choice(arguments, choice):
    return given(*arguments, **choice)


@on_ranks(2, 3)
def test_where_names_alone_are_given_the_strategy_says_what_is_sparse():
    """``named_parameters`` are pairs."""
    model, strategy = mixed(), built_for("parallax", grace.size())
    optimizer = grace.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), strategy=strategy)
    train(model, optimizer, range(4))
    assert_close(weights(model), on_the_mean(mixed(), grace.size(), range(4)))
    return digest(weights(model))


@pytest.mark.parametrize("builder", [b for b in BUILDERS if not b.startswith(("uniform", "by_type", "size"))])
@on_ranks(3)
def test_sums_instead_of_means(builder):
    model = mixed()
    train(model, executed(model, spec_for(builder, 3), op="sum", gradient_predivide_factor=1.0), range(1))
    wanted = on_the_mean(mixed(), 3, range(1), lambda parameters: sgd(parameters, 0.3))
    assert_close(weights(model), wanted, 2e-6)


@on_ranks()
def test_an_optimizer_tells_its_strategy():
    assert grace.DistributedOptimizer(sgd(mixed().parameters()), None, "topk").strategy is None
    return executed(mixed(), "parallax").strategy.id


class Words(torch.nn.Module):
    """A model of an embedding alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(11, 4, sparse=True)


def words_loss(model: torch.nn.Module, step: int, rank: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + (grace.rank() if rank is None else rank))
    return (model.words(torch.randint(11, (4,), generator=generator)) ** 2).sum()


def sparse_adam(parameters):
    return torch.optim.SparseAdam(list(parameters), lr=0.05)


@pytest.mark.parametrize("builder", ["parallax", "partitioned_ps(min_shard_bytes=0)", "all_reduce"])
@on_ranks(2, 3)
def test_sparse_adam_updates_the_rows_that_some_rank_had(builder):
    model, reference = Words(), Words()
    train(model, executed(model, builder, sparse_adam), range(5), words_loss)
    optimizer = sparse_adam(reference.parameters())
    for step in range(5):
        gradients = []
        for rank in range(grace.size()):
            reference.zero_grad()
            words_loss(reference, step, rank).backward()
            gradients.append(reference.words.weight.grad)
        reference.words.weight.grad = (sum(gradients[1:], start=gradients[0]) / grace.size()).coalesce()
        optimizer.step()
    torch.testing.assert_close(model.words.weight, reference.words.weight, rtol=1e-5, atol=1e-6)
