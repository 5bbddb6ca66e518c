"""Rank 0's strategy counts; where something is wrong every rank says so, and none waits for another."""

import json
from dataclasses import replace

import pytest
import torch

import grace
from grace.strategy import schema
from grace.strategy.plan import ShardPlan
from tests.support.pools import on_ranks
from tests.support.strategies import (
    Tables,
    built_for,
    executed,
    mixed,
    mixed_loss,
    sgd,
    strategy_of,
    train,
    weights,
    whole,
)
from tests.support.training import digest

SECONDS = 30


def saved(path, size, builder="partitioned_ps(min_shard_bytes=0)", model=None):
    """A strategy in a file."""
    schema.dump(built_for(builder, size, model), path)
    return str(path)


def each(given, models=None):
    """Train with each rank's own strategy; return the kind of error and its message, or the weights' hash.

    Afterwards the ranks are still in step: they train with plain all-reduce.
    """
    rank = grace.rank()
    make_model = mixed if models is None or not models[rank] else models[rank]
    model = make_model()
    try:
        if given[rank] == "nothing":
            optimizer = grace.DistributedOptimizer(sgd(model.parameters()), model)
        else:
            optimizer = executed(model, given[rank])
        train(model, optimizer, range(2))
        answer = ("trained", digest(weights(model)))
    except grace.GraceError as error:
        answer = (type(error).__name__, str(error))
    after = mixed()
    train(after, grace.DistributedOptimizer(sgd(after.parameters()), after), range(2))
    return answer, digest(weights(after))


def answers_of(ranks, given, models=None):
    """Every rank's answer; all must be in step after it."""
    found = ranks.run(each, given, models, timeout=SECONDS)
    assert len({after for _, after in found}) == 1
    return [answer for answer, _ in found]


def test_only_rank_0s_strategy_counts(ranks, tmp_path):
    here, others = saved(tmp_path / "s.yaml", ranks.size), ["/nowhere/s.yaml"] * (ranks.size - 1)
    answers = answers_of(ranks, [here, *others])
    assert answers == answers_of(ranks, [here] * ranks.size)
    assert {kind for kind, _ in answers} == {"trained"}
    assert answers_of(ranks, [here, *(["ps(compressor=topk)"] * (ranks.size - 1))]) == answers


def check_refused(answers, *texts, own="ConfigError"):
    """Rank 0 says what is wrong; the others do too, or that rank 0 cannot start."""
    assert answers[0][0] == own
    assert {kind for kind, _ in answers[1:]} <= {"RankError", "ConfigError"}
    for text in texts:
        assert all(text in message for _, message in answers), answers


def test_a_file_that_rank_0_has_not(ranks, tmp_path):
    there = saved(tmp_path / "s.yaml", ranks.size)
    answers = answers_of(ranks, ["/nowhere/s.yaml", *([there] * (ranks.size - 1))])
    check_refused(answers, "/nowhere/s.yaml: cannot be read")


@pytest.mark.parametrize("form", ["file", "object"])
def test_a_strategy_for_another_number_of_ranks(ranks, tmp_path, form):
    path = saved(tmp_path / "s.yaml", 4)
    given = path if form == "file" else schema.load(path)
    answers = answers_of(ranks, [given] * ranks.size)
    check_refused(answers, "is for 4 ranks", f"this run has {ranks.size}")


def another():
    """The mixed model with another matrix."""
    model = mixed()
    model.prime = torch.nn.Parameter(torch.zeros(14, 6))
    model.dense = torch.nn.Linear(14, 4)
    return model


@pytest.mark.parametrize("form", ["file", "object"])
def test_a_strategy_for_another_model(ranks, tmp_path, form):
    path = saved(tmp_path / "s.yaml", ranks.size, model=another())
    given = path if form == "file" else schema.load(path)
    answers = answers_of(ranks, [given] * ranks.size)
    check_refused(answers, "'prime'", "14")


def of_complex_numbers():
    model = mixed()
    model.odd = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    return model


@pytest.mark.parametrize(("model", "said"), [(another, "'prime'"), (of_complex_numbers, "complex")])
def test_a_rank_with_another_model_or_parameters_that_are_refused(ranks, tmp_path, model, said):
    here = saved(tmp_path / "s.yaml", ranks.size)
    answers = answers_of(ranks, [here] * ranks.size, [None] * (ranks.size - 1) + [model])
    assert answers[-1][0] == "ConfigError"
    assert {kind for kind, _ in answers[:-1]} == {"RankError"}
    assert all(said in message for _, message in answers)


@pytest.mark.parametrize("which", [0, -1])
def test_a_rank_without_a_strategy(ranks, tmp_path, which):
    given = [saved(tmp_path / "s.yaml", ranks.size)] * ranks.size
    given[which] = "nothing"
    answers = answers_of(ranks, given)
    assert {kind for kind, _ in answers} <= {"RankError", "ConfigError"}, answers
    assert all("strategy" in message for _, message in answers), answers


def test_all_ranks_but_one_without_a_strategy(three_ranks, tmp_path):
    for which in range(3):
        given = ["nothing"] * 3
        given[which] = saved(tmp_path / "s.yaml", 3)
        answers = answers_of(three_ranks, given)
        assert {kind for kind, _ in answers} <= {"RankError", "ConfigError"}, answers


@pytest.mark.parametrize("given", ["no_such_builder", "parallax(chunks=2)", 7, {"version": 1, "variables": 3}])
def test_what_is_no_strategy(two_ranks, given):
    check_refused(answers_of(two_ranks, [given] * 2))


@on_ranks()
def test_a_variable_that_is_sparse_in_the_strategy_only():
    """The model's embedding is dense, but the strategy says that it is sparse."""
    strategy = strategy_of(whole("t.weight", (5, 2), ShardPlan(), sparse=True), size=grace.size())
    model = Tables({}, {"t": (5, 2)})
    model.t.sparse = False
    with pytest.raises(grace.GraceError, match=r"'t.weight'.*sparse"):
        executed(model, strategy)


def test_a_step_after_the_hand_out_is_the_strategys(two_ranks, tmp_path):
    """The whole strategy is broadcast: changing a destination changes who remembers the answers."""
    path = saved(tmp_path / "s.json", 2, "ps(compressor='topk(ratio=0.3)')")
    first = schema.load(path)
    plans = tuple(
        replace(plan, parts=tuple(replace(part, sync=replace(part.sync, destination=1)) for part in plan.parts))
        for plan in first.plans
    )
    moved = replace(first, plans=plans)
    assert two_ranks.run(who_answers, first) == [True, False]
    assert two_ranks.run(who_answers, moved) == [False, True]


def who_answers(strategy):
    model = mixed()
    optimizer = executed(model, strategy if grace.rank() == 0 else "ps")
    mixed_loss(model, 0).backward()
    optimizer.step()
    return bool(optimizer._grace.runner.state().get("answer_memory"))


PORTABLE = {
    "version": 1,
    "rules": [
        {"match": {"sparse": True}, "sync": {"type": "reduce_broadcast", "destination": 1}},
        {
            "match": {"rule": "rows(least=10)", "ndim": 2},
            "sync": {"type": "allgather"},
            "compressor": "topk(ratio=0.5)",
        },
        {"match": {}, "sync": {"type": "allreduce"}},
    ],
}


def test_a_file_of_rules_without_a_cluster_is_for_any_number_of_ranks(ranks, tmp_path):
    (tmp_path / "rules.json").write_text(json.dumps(PORTABLE))
    answers = answers_of(ranks, [str(tmp_path / "rules.json")] + ["nowhere.json"] * (ranks.size - 1))
    assert {kind for kind, _ in answers} == {"trained"}
    assert len({digest for _, digest in answers}) == 1


def test_a_file_for_more_ranks_says_how_it_would_be_for_any(two_ranks):
    answers = answers_of(two_ranks, [{**PORTABLE, "cluster": {"world_size": 3}}] * 2)
    check_refused(answers, "the strategy is for 3 ranks, this run has 2", "a file that names no cluster is for any")
