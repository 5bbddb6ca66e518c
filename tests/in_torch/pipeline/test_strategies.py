"""Replicas of stages exchange by strategies: builders, documents, and ``auto``, which times each stage's exchange."""

import copy
import json

import pytest
import torch

import grace
from grace.core.variable import Variable
from grace.pipeline.planning.exchange_prediction import strategy_document, strategy_of_stage
from grace.planner import auto_planner, driver
from grace.strategy import ShardPlan, Strategy, Sync, VariablePlan
from tests.support.pipelines import made, pipeline, run_steps
from tests.support.pools import on_ranks
from tests.support.training import digest, refusal

NAME = "TiedEmbedding"
CUT = {"cuts": ["embedding"], "replicas": 2, "microbatches": 2}
"""The embedding on one stage, and the head, which is the same parameter, on the other."""
LARGE = {"match": {"ndim": 2}, "sync": {"type": "allgather"}, "compressor": "topk(ratio=0.3)", "memory": "residual"}
RULES = {"version": 1, "rules": [LARGE, {"match": {}, "sync": {"type": "allreduce"}}]}
LATE = {"version": 1, "rules": [{"match": {}, "sync": {"type": "reduce_broadcast", "destination": 1, "staleness": 1}}]}


def exchanged(settings):
    engine = pipeline(NAME, **CUT, **settings)
    run_steps(engine, NAME, range(4))
    return engine


def whole(method="topk(ratio=0.3)"):
    """A strategy for the whole model, on all ranks."""
    part = ShardPlan(Sync("allgather"), method, "residual")
    own = [Variable(name, tuple(p.shape)) for name, p in made(NAME).named_parameters()]
    return Strategy(tuple(VariablePlan(variable, (part,)) for variable in own), world_size=4)


def check_same_bits(engine):
    """Replicas of a stage have the same parameters, and all ranks the same tied one."""
    own = engine.stage, digest(dict(engine.parameters)), digest(engine.parameters["table.weight"])
    ranks = grace.allgather_object(own)
    assert len({(stage, bits) for stage, bits, _ in ranks}) == 2
    assert len({tied for *_, tied in ranks}) == 1


@pytest.mark.parametrize("strategy", ["parallax(compressor=qsgd)", RULES, LATE])
@on_ranks(4)
def test_replicas_and_tied_copies_have_the_same_bits(strategy):
    check_same_bits(exchanged({"strategy": strategy}))


@on_ranks(4)
def test_a_strategy_of_the_whole_model_is_its_methods():
    expected = exchanged({"compressor": "topk(ratio=0.3)", "communicator": "allgather"})
    engine = exchanged({"strategy": whole()})
    check_same_bits(engine)
    assert digest(dict(engine.parameters)) == digest(dict(expected.parameters))


@on_ranks(4)
def test_parts_of_a_state_that_are_of_another_save_are_refused_whichever_stage_they_are_of():
    """Rank 1 loads the second stage's part of an earlier save."""
    engine = pipeline(NAME, **CUT, strategy=RULES)
    saves = []
    for step in range(2):
        run_steps(engine, NAME, [step])
        saves.append(copy.deepcopy(engine.optimizer_state_dict()))
    first, second = saves
    assert len(second["grace"]) == 2
    mixed = {**second, "grace": [second["grace"][0], first["grace"][1]]}
    given = mixed if engine.backend.rank == 1 else second
    said = refusal(engine.load_optimizer_state_dict, given, kind=grace.RankError)
    assert said.startswith("rank 0 loads a checkpoint of step 2, rank 1 a checkpoint of step 1. ")


def test_documents_are_cut_for_stages_and_checked():
    document = strategy_document(whole(), ["table.weight", "middle.weight", "middle.bias"])
    assert list(strategy_of_stage(document, ["middle.bias"])["variables"]) == ["middle.bias"]
    with pytest.raises(grace.ConfigError, match=r"this one has no parameter 'middle\.weight'"):
        strategy_document(whole(), ["table.weight"])


def test_a_strategys_file_may_have_any_name(tmp_path):
    """``grace launch --strategy`` takes a file of any name."""
    document, file = whole().to_dict(), tmp_path / "strategy"
    file.write_text(json.dumps(document))
    assert strategy_document(str(file), document["variables"]) == document
    assert strategy_document("parallax", document["variables"]) is None


@on_ranks(4)
def test_auto_chooses_for_each_stage_and_resumes():
    """``auto`` until it has chosen, saved, and resumed."""
    for name, number in {"WARM": 1, "HELD": 3, "PLAIN": 3, "TIMED": 2}.items():
        setattr(driver, name, number)
    auto_planner.LINK_SECONDS, auto_planner.CODEC_SECONDS = 0.2, 0.01
    auto = {"strategy": "auto(methods=['topk(ratio=0.3)'])"}
    engine = pipeline(NAME, **CUT, **auto)
    followed = engine.optimizer._grace.driver
    for step in range(200):
        run_steps(engine, NAME, [step])
        if all(engine.backend.allgather_object(followed.plan is not None and followed.settled)):
            break  # stages try different numbers of candidates
    saved = engine.state_dict(), copy.deepcopy(engine.optimizer_state_dict())
    chosen = engine.optimizer._grace.strategy.to_dict()
    assert engine.plan.compressor == auto["strategy"]
    run_steps(engine, NAME, range(2))
    end = engine.state_dict()
    again = pipeline(NAME, **CUT, **auto)
    again.load_state_dict(saved[0])
    again.load_optimizer_state_dict(saved[1])
    resumed = again.optimizer._grace
    assert resumed.strategy.to_dict() == chosen
    assert resumed.driver.settled
    run_steps(again, NAME, range(2))
    state = again.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in end.items())
    problem = getattr(followed.planner, "problem", None)  # of the stage's first rank, which plans by the slowest one
    waits = 0.0 if problem is None else problem.timeline.forward
    assert followed.plan is not None
    assert waits < 1e-3  # the schedule is no part of what is compared
    check_same_bits(again)
    stages = grace.allgather_object((again.stage, digest(chosen)))
    assert len(set(stages)) == 2
    middle = ["middle.bias", "middle.weight"] if again.stage else []
    assert sorted(chosen["variables"]) == [*middle, "table.weight"]
