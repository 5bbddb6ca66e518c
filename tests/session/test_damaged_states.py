"""Damaged states: a refused load changes nothing, and one that succeeds loads what it was asked for."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grace
from grace.session import state_schema
from grace.strategy import ShardPlan, Sync
from tests.support.damaged_states import at, bent, changed, each, loads_or_changes_nothing, mutated, places, resealed
from tests.support.strategies import Tables, executed, reduced, strategy_of, whole
from tests.support.training import copied, state_of


def raw(value):
    """Nested dicts and lists with bytes for tensors."""
    if isinstance(value, dict):
        return {key: raw(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [raw(item) for item in value]
    return value.numpy().tobytes() if isinstance(value, torch.Tensor) else value


class Run:
    """One rank whose state has something of every kind, three steps on."""

    def __init__(self):
        grace.init("local")
        parts = {
            "w": ShardPlan(Sync("allgather"), "topk(ratio=0.2)"),
            "q": ShardPlan(Sync("allreduce"), "powersgd(rank=1)"),
            "s": ShardPlan(Sync("allgather"), "signum"),
            "e": ShardPlan(Sync("allgather"), "efsignsgd", "efsignsgd"),
            "d": ShardPlan(Sync("allgather"), "dgc(ratio=0.3)"),
            "r": reduced(0, "topk(ratio=0.5)", staleness=1),
        }
        self.shapes = {name: (6, 5) for name in parts}
        model = Tables(self.shapes, {"t": (7, 2)})
        plans = [whole(name, (6, 5), part) for name, part in parts.items()]
        plans.append(whole("t.weight", (7, 2), reduced(0, "topk(ratio=0.5)", staleness=1), sparse=True))
        self.optimizer = executed(model, strategy_of(*plans, size=1))
        for step in range(3):
            generator = np.random.default_rng(step)
            gradients = {
                name: generator.standard_normal(shape).astype(np.float32) for name, shape in self.shapes.items()
            }
            gradients["t"] = generator.integers(0, 7, 4), generator.standard_normal((4, 2)).astype(np.float32)
            self.optimizer.zero_grad()
            model.backward(gradients)
            self.optimizer.step()
        self.parts = [part for _, part in self.optimizer._grace.runner.components]
        self.own, self.full = copied(self.optimizer.state_dict()), copied(self.optimizer.full_state_dict())
        entry = self.full["grace"]
        self.two = {**self.full, "grace": state_schema.seal({**entry, "size": 2, "ranks": entry["ranks"] * 2})}

    def load(self, entry, memory="strict"):
        self.optimizer.load_state_dict({**self.own, "grace": entry}, memory=memory)

    def bits(self):
        """Return the bits of everything that loading changes."""
        runner = self.optimizer._grace.runner
        counters = runner.context.step, runner.context.loss_scale, runner.run_id, self.optimizer.param_groups
        pending = [dict(step) for step in runner.pending_means()]
        states = [part.state.committed for part in self.parts]
        return raw([states, pending, list(self.optimizer.state.values())]), counters

    def tried(self, entry, memory="strict"):
        load = partial(self.load, memory=memory)
        if loads_or_changes_nothing(load, entry, self.bits, partial(state_of, self.optimizer)):
            self.load(self.own["grace"])


@pytest.fixture(scope="module")
def run():
    yield Run()
    grace.shutdown()


def test_the_run_has_something_of_every_kind(run):
    entry = run.own["grace"]
    assert {kind for kind, values in entry["state"].items() if values} == {"compressor", "memory", "answer_memory"}
    assert {type(value) for step in entry["pending"] for value in step.values()} == {torch.Tensor, dict}
    for saved in (run.own, run.full, run.two):
        run.load(saved["grace"])


def some_of_each(value):
    """Every place with so many wrong things in it as there are examples."""
    return itertools.islice(each(value), 0, None, max(1, 160 // settings.default.max_examples))


def test_no_place_of_a_state_may_hold_what_it_must_not(run):
    """Every place, one by one, as if it had been saved so."""
    for entry in some_of_each(run.own["grace"]):
        run.tried(resealed(entry))


@given(data=st.data())
def test_what_is_damaged_is_refused_and_changes_nothing_or_loads_what_it_says(run, data):
    saved = data.draw(st.sampled_from(("own", "full", "two")))
    entry = data.draw(mutated(getattr(run, saved)["grace"]))
    sealed = resealed(entry) if data.draw(st.booleans()) else entry
    run.tried(sealed, data.draw(st.sampled_from(("strict", "strict", "keep", "reset"))))


def test_a_flipped_bit_is_refused_by_name_wherever_it_is(run):
    entry = run.own["grace"]
    paths = [path for path in places(entry) if hasattr(at(entry, path), "shape")]
    for path in paths:
        flipped = changed(entry, path, lambda box, key: box.__setitem__(key, bent(box[key], "bits")))
        with pytest.raises(grace.ConfigError, match=f"{path[2]!r} is not what was saved"):
            run.load(flipped)
    assert len(paths) >= 10


@pytest.mark.slow
def test_what_torch_refuses_of_its_own_part_changes_nothing(run):
    """Other groups, and damaged ones: Grace's part, which would fit, is not loaded either."""
    entry, refused, own = state_schema.seal({**run.own["grace"], "step": 1}), [], run.own
    for damaged in some_of_each({"param_groups": own["param_groups"], "state": own["state"]}):
        before = run.bits()
        try:
            run.optimizer.load_state_dict({**damaged, "grace": entry})
        except Exception as error:
            refused.append(type(error))
            changed_something = run.bits() != before
        else:
            changed_something = False
            run.load(own["grace"])
        assert not changed_something
    assert refused
    assert not {AttributeError, LookupError, KeyError, IndexError, TypeError} & set(refused)
