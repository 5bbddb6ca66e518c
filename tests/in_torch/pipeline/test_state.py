"""What a pipeline saves is the whole model's, and loads on another plan."""

import copy

import pytest
import torch

from tests.support.pipelines import batch, loss_fn, made, pipeline, run_steps, sgd
from tests.support.pools import on_ranks
from tests.support.training import digest, refusal

pytestmark = pytest.mark.ranks
TOPK = "topk(ratio=0.3)"


def saved(name, settings):
    """The state after two steps, and the model's tensors after two more."""
    engine = pipeline(name, **settings)
    run_steps(engine, name, range(2))
    state = copy.deepcopy((engine.state_dict(), engine.optimizer_state_dict()))
    run_steps(engine, name, range(2, 4))
    end = engine.state_dict()
    assert digest({key: engine.parameter(key) for key in end}) == digest(end)
    assert engine.gradient(next(key for key, _ in engine.model.named_parameters())).any()
    return state, end


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


def close(a, b):
    return a.keys() == b.keys() and all(torch.allclose(a[key], b[key], rtol=1e-4, atol=1e-6) for key in a)


EARLY = {"sync": {"type": "allgather"}, "compressor": TOPK, "memory": "residual"}
LATE = {"sync": {"type": "allreduce"}, "compressor": "powersgd(rank=1)", "memory": "residual"}
RULES = [{"match": {"name": "layers.[01].*"}, **EARLY}, {"match": {"ndim": 2}, **LATE}, {"match": {}, **EARLY}]
RESUMED = {
    "TiedEmbedding": {"stages": 2, "compressor": TOPK},
    "Normalized": {"stages": 2, "compressor": TOPK},
    "Residual": {"cuts": ["relu_"], "strategy": {"version": 1, "rules": RULES}},  # stages exchange in different ways
}


@pytest.mark.every
@pytest.mark.parametrize("name", RESUMED)
@on_ranks(4)
def test_a_resumed_run_has_the_same_bits(name):
    state, end = saved(name, RESUMED[name])
    assert digest(resumed(name, state, RESUMED[name])) == digest(end)
    return digest(end)


@on_ranks()
def test_the_state_loads_in_a_plain_program_and_on_another_plan():
    state, end = saved("TiedEmbedding", {"stages": 2})
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
    assert close(resumed("TiedEmbedding", state, {"cuts": ["linear"]}), end)


@on_ranks(4)
def test_memories_load_on_other_cuts():
    settings = {"stages": 2, "compressor": TOPK, "cuts": ["linear"]}
    state, end = saved("Residual", settings)
    assert close(resumed("Residual", state, {**settings, "cuts": ["relu__1"]}), end)


@on_ranks()
def test_another_models_state_is_refused():
    engine = pipeline("Residual")
    before = engine.state_dict()
    assert "'more' is on one side only" in refusal(engine.load_state_dict, {**before, "more": torch.ones(1)})
    assert "no parameter or buffer 'nothing'" in refusal(engine.parameter, "nothing")
    assert digest(engine.state_dict()) == digest(before)
