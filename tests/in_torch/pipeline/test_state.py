"""What a pipeline saves is the whole model's, and loads on another plan."""

import copy

import pytest
import torch

import grace
from tests.support.pipelines import batch, loss_fn, made, pipeline, run_steps, sgd
from tests.support.pools import ranks_of

pytestmark = pytest.mark.ranks
TOPK = "topk(ratio=0.3)"


def saved(name, settings):
    engine = pipeline(name, **settings)
    run_steps(engine, name, range(2))
    state = engine.state_dict(), engine.optimizer_state_dict()
    run_steps(engine, name, range(2, 4))
    fetched = {key: engine.parameter(key) for key in state[0]}
    gradient = engine.gradient(next(key for key, _ in engine.model.named_parameters()))
    return state, engine.state_dict(), fetched, gradient


def resumed(name, state, settings):
    model = made(name)
    with torch.no_grad():
        for p in model.parameters():  # what is loaded has to count
            p.add_(1.0)
    engine = pipeline(name, model, **settings)
    engine.load_state_dict(state[0])
    engine.load_optimizer_state_dict(state[1])
    run_steps(engine, name, range(2, 4))
    return engine.state_dict()


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def close(a, b):
    return a.keys() == b.keys() and all(torch.allclose(a[key], b[key], rtol=1e-4, atol=1e-6) for key in a)


@pytest.mark.parametrize("name", ["TiedEmbedding", "Normalized"])
def test_a_resumed_run_has_the_same_bits(name):
    settings = {"stages": 2, "compressor": TOPK}
    answers = ranks_of(4).run(saved, name, settings)
    state, end, fetched, gradient = answers[0]
    assert all(equal(end, other) for _, other, _, _ in answers)
    assert equal(fetched, end)
    assert gradient.abs().sum() > 0
    assert all(equal(end, other) for other in ranks_of(4).run(resumed, name, state, settings))


def test_stages_that_exchange_in_different_ways_resume_too():
    early = {"sync": {"type": "allgather"}, "compressor": TOPK, "memory": "residual"}
    late = {"sync": {"type": "allreduce"}, "compressor": "powersgd(rank=1)", "memory": "residual"}
    rules = [{"match": {"name": "layers.[01].*"}, **early}, {"match": {"ndim": 2}, **late}, {"match": {}, **early}]
    settings = {"cuts": ["relu_"], "strategy": {"version": 1, "rules": rules}}
    (state, end, _, _) = ranks_of(4).run(saved, "Residual", settings)[0]
    assert all(equal(end, other) for other in ranks_of(4).run(resumed, "Residual", state, settings))


def test_the_state_loads_in_a_plain_program_and_on_another_plan():
    (state, end, _, _) = ranks_of(2).run(saved, "TiedEmbedding", {"stages": 2})[0]
    model = made("TiedEmbedding")
    model.load_state_dict(state[0])
    optimizer = sgd(model.parameters())
    optimizer.load_state_dict(copy.deepcopy(state[1]))  # torch computes in the tensors that it loads
    for step in (2, 3):
        optimizer.zero_grad()
        args, _, target = batch("TiedEmbedding", step)
        loss_fn(model(*args), target).backward()
        optimizer.step()
    assert close(model.state_dict(), end)
    assert close(ranks_of(2).run(resumed, "TiedEmbedding", state, {"cuts": ["linear"]})[0], end)


def test_memories_load_on_other_cuts():
    settings = {"stages": 2, "compressor": TOPK, "cuts": ["linear"]}
    (state, end, _, _) = ranks_of(4).run(saved, "Residual", settings)[0]
    other = {**settings, "cuts": ["relu__1"]}
    assert close(ranks_of(4).run(resumed, "Residual", state, other)[0], end)


def refused(name):
    engine = pipeline(name)
    wrong = dict(engine.state_dict())
    wrong["more"] = torch.ones(1)
    before = engine.state_dict()
    with pytest.raises(grace.ConfigError, match="'more' is on one side only"):
        engine.load_state_dict(wrong)
    with pytest.raises(grace.ConfigError, match="no parameter or buffer 'nothing'"):
        engine.parameter("nothing")
    return equal(before, engine.state_dict())


def test_another_models_state_is_refused():
    assert all(ranks_of(2).run(refused, "Residual"))
