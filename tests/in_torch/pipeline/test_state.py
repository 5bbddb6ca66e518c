"""States of a pipeline are the whole model's, and load on another plan."""

import copy

import numpy as np
import pytest
import torch

from grace.pipeline.torch.batches import broadcast_batch, gather_outputs
from tests.support.pipelines import batch, loss_fn, made, pipeline, run_steps, sgd
from tests.support.pools import on_ranks
from tests.support.training import digest, refusal

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


@on_ranks(2)
def test_what_ranks_broadcast_lies_on_their_devices():
    """GPUs may have an engine of their own: a rank that sends from its GPU to others' host memory waits for ever."""
    engine = pipeline("Residual", stages=2)
    sent = []

    class Noted:
        def broadcast(self, tensor, rank):
            sent.append(str(tensor.device))
            return self

        def wait(self):
            pass

    engine.mesh.device, engine.mesh.channel = torch.device("meta"), Noted()
    engine.parameter(next(iter(engine.tensors.parameter_holders)))
    broadcast_batch(engine.mesh, lambda: [torch.ones(4, 2)])
    gather_outputs([[torch.ones(4, 2)]], [0], [False], engine.mesh, every=True, by_replica=True)
    assert sent == ["meta"] * 3


@on_ranks(2)
def test_tensors_of_every_dtype_are_broadcast():
    """gloo has no unsigned numbers of 16 bits, and torch sends no conjugate that is not computed yet."""
    mesh = pipeline("Residual", stages=2).mesh
    conjugate = torch.tensor([1 + 2j]).conj()
    small = torch.tensor([1, 40000]).to(torch.uint16), torch.tensor(2.0).to(torch.float8_e4m3fn), torch.empty(0, 2)
    for value in (conjugate, conjugate.imag, *small):
        given = value if mesh.rank == 1 else torch.empty(value.shape, dtype=value.dtype)
        received = mesh.broadcast(given, 1)
        assert (received.shape, received.dtype) == (value.shape, value.dtype)
        assert torch.equal(received.to(torch.complex64), value.to(torch.complex64))


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


def in_two_groups(parameters):
    """Weights and biases apart, for which a schedule may choose other rates later."""
    own = list(parameters)
    both = [p for p in own if p.ndim > 1], [p for p in own if p.ndim == 1]
    return torch.optim.SGD([{"params": group} for group in both], lr=0.05, momentum=0.9)


@on_ranks()
def test_groups_of_equal_settings_stay_apart():
    settings = {"stages": 2, "optimizer": in_two_groups}
    state, _ = saved("Residual", settings)
    model = made("Residual")
    model.load_state_dict(state[0])
    optimizer = in_two_groups(model.parameters())
    optimizer.load_state_dict(copy.deepcopy(state[1]))
    engine = pipeline("Residual", **settings)
    engine.load_state_dict(state[0])
    engine.load_optimizer_state_dict(state[1])
    for trained in (optimizer, engine.optimizer):
        trained.param_groups[1]["lr"] = 0.2
    for step in (2, 3):
        optimizer.zero_grad()
        args, _, target = batch("Residual", step)
        loss_fn(model(*args), target).backward()
        optimizer.step()
    run_steps(engine, "Residual", range(2, 4))
    assert close(model.state_dict(), engine.state_dict())


@on_ranks(4)
def test_memories_load_on_other_cuts():
    settings = {"stages": 2, "compressor": TOPK, "cuts": ["linear"]}
    state, end = saved("Residual", settings)
    assert close(resumed("Residual", state, {**settings, "cuts": ["relu__1"]}), end)


class Gate(torch.nn.Module):
    """A factor that is no tensor of the module's, and a count that forward does not read."""

    def __init__(self, form):
        super().__init__()
        self.form, self.factor, self.count = form, 2.0, 1

    def forward(self, x):
        return x * self.factor

    def get_extra_state(self):
        extra = {"factor": self.factor, "counts": [self.count], "array": np.arange(2), "none": None}
        return torch.tensor([self.factor, self.count]) if self.form == "tensor" else extra

    def set_extra_state(self, state):
        self.factor, self.count = state.tolist() if self.form == "tensor" else (state["factor"], *state["counts"])


def gated(form):
    """A model of a toy's inputs with an extra state."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), Gate(form), torch.nn.Linear(5, 4))


@pytest.mark.parametrize("form", ["dict", "tensor"])
@on_ranks()
def test_extra_states_are_saved_and_must_be_loaded_before_the_cut(form):
    """A stage computes with the factor that the model had when it was captured."""
    engine = pipeline("FewParameters", gated(form))
    run_steps(engine, "FewParameters", range(1))
    before = copy.deepcopy(engine.state_dict())
    engine.load_state_dict(before)
    other = gated(form)
    other[1].factor = 3.0
    for p in other.parameters():
        p.data.add_(1.0)
    state = other.state_dict()
    assert "'1._extra_state'" in refusal(engine.load_state_dict, state)
    assert digest(engine.state_dict()) == digest(before)
    model = gated(form)
    model.load_state_dict(state)
    loaded = pipeline("FewParameters", model)
    loaded.load_state_dict(state)
    x = batch("FewParameters", 0)[0][0]
    found = loaded.state_dict()
    assert digest(found) == digest(state)
    plain = gated(form)
    plain.load_state_dict(found)
    assert torch.equal(plain(x), other(x))


@on_ranks()
def test_another_models_state_is_refused():
    engine = pipeline("Residual")
    before = engine.state_dict()
    assert "'more' is on one side only" in refusal(engine.load_state_dict, {**before, "more": torch.ones(1)})
    assert "no parameter or buffer 'nothing'" in refusal(engine.parameter, "nothing")
    assert digest(engine.state_dict()) == digest(before)
