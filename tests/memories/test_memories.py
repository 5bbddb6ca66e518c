"""The memories: nothing of the gradient is lost, and nothing bad is remembered."""

import math
import warnings

import numpy as np
import pytest
import torch

import grace
from grace.communicators import Allgather, Allreduce
from grace.core.communicator import Communicator
from grace.core.context import Context
from grace.memories.residual import Residual
from tests.support.data import EPSILON, data, same
from tests.support.grouping import in_groups

SHAPE = (20, 30)
STEPS = 20


def build(cls, compressor: str, memory: str | None) -> Communicator:
    with warnings.catch_warnings():  # qsgd and none with a memory: unwise, but the identity must hold
        warnings.simplefilter("ignore", UserWarning)
        return cls(compressor, memory)


PAIRS = [
    (Allgather, "topk(ratio=0.05)", None),
    (Allreduce, "randomk(ratio=0.05)", None),
    (Allgather, "randomk(ratio=0.05)", None),
    (Allgather, "efsignsgd", None),
    (Allgather, "efsignsgd", "residual"),
    (Allgather, "topk(ratio=0.05)", "efsignsgd"),
    (Allreduce, "powersgd(rank=2)", None),
    (Allreduce, "powersgd(warm_start=false)", None),
    (Allreduce, "fp16", "residual"),
    (Allgather, "fp16", "residual"),
    (Allreduce, "none", "residual"),
    (Allgather, "none", "residual"),
    (Allgather, "qsgd", "residual"),
    (Allgather, "block(bits=4)", None),
    (Allgather, "block(bits=4, hadamard=32, block=50)", None),
    (Allgather, "block(format=fp8, rounding=stochastic)", None),
    (Allgather, "block", "loco(beta=1, reset=0)"),
    (Allgather, "onebit", None),
    (Allgather, "sketch(quantiles=4)", None),
    (Allgather, "threshold(value=1.5)", None),
    (Allgather, "adaptive(ratio=0.1)", None),
    (Allgather, "topk(ratio=0.05) | qsgd(levels=7)", None),
]


def pairs(names, more):
    """Run a test with each pair and more values, the pairs at once."""
    cases = [(*case, *pair) for case in more for pair in PAIRS]
    return in_groups((*names, "cls", "compressor", "memory"), cases, lambda *case: str(case[0]))


frameworks = pytest.mark.parametrize("make_tensor", [np.array, torch.from_numpy], ids=["numpy", "torch"])


def remembered(communicator: Communicator) -> np.ndarray:
    return np.float64(next(iter(communicator.memory.residual_tensors("w")), np.zeros(SHAPE, np.float32)))


@pairs(("kind", "make_tensor"), [("gaussian", np.array), *((k, torch.from_numpy) for k in ("heavy", "mostly-zero"))])
def test_sent_plus_new_residual_is_gradient_plus_old_residual(cls, compressor, memory, make_tensor, kind):
    communicator = build(cls, compressor, memory)
    for step in range(STEPS):
        gradient, before = data(kind, SHAPE, step), remembered(communicator)
        sent = np.float64(communicator.step(make_tensor(gradient.copy()), "w"))
        after = remembered(communicator)
        scale = np.abs(before).max() + np.abs(gradient).max() + np.abs(sent).max()
        error = np.abs((sent + after) - (np.float64(gradient) + before)).max()
        assert error <= 4 * EPSILON * scale, step
    assert np.abs(after).max() > 0 or compressor == "none" or kind == "mostly-zero"


@frameworks
@pytest.mark.parametrize(("beta", "gamma"), [(1.0, 1.0), (0.5, 1.0), (0.9, 0.1), (0.0, 1.0)])
def test_the_residual_weighs_what_it_keeps_and_what_is_new(make_tensor, beta, gamma):
    communicator = Allgather("topk(ratio=0.1)", Residual(beta=beta, gamma=gamma))
    residual = np.zeros(100)
    for step in range(10):
        gradient = data("gaussian", 100, step)
        x = beta * residual + gamma * np.float64(gradient)
        keep = np.argsort(-np.abs(x), kind="stable")[:10]
        sent = np.zeros(100)
        sent[keep] = x[keep]
        residual = x - sent
        np.testing.assert_allclose(communicator.step(make_tensor(gradient), "w"), sent, atol=1e-5)


@frameworks
@pytest.mark.parametrize(("beta", "reset"), [(0.5, 4), (0.2, 0), (1.0, 3), (0.9, 512)])
def test_loco_follows_the_papers_algorithm(make_tensor, beta, reset):
    """e = (1 - beta) e + beta (g + e - C(g + e)), and 0 every ``reset`` steps (arXiv 2407.04480, algorithm 1)."""
    communicator = Allgather("block(bits=4, block=25)", f"loco(beta={beta}, reset={reset})")
    e = np.zeros(100)
    for step in range(10):
        if reset and step % reset == 0:
            e[:] = 0
        gradient = data("gaussian", 100, step)
        h = np.float64(gradient) + e
        scale = np.abs(h).reshape(4, 25).max(1).repeat(25)
        sent = np.float64(communicator.step(make_tensor(gradient), "w"))
        clear = np.abs(np.abs(h / scale * 7) % 1 - 0.5) > 1e-4  # else rounding may decide the code
        np.testing.assert_allclose(sent[clear], (scale * np.rint(h / scale * 7) / 7)[clear], atol=1e-5)
        e = (1 - beta) * e + beta * (h - sent)
        np.testing.assert_allclose(remembered(communicator).reshape(-1), e, atol=1e-5)


def test_loco_begins_anew_at_the_first_good_step_where_the_one_that_was_due_overflows():
    communicator = Allgather("block(bits=4, block=25)", "loco(beta=0.5, reset=3)")
    for step in range(3):
        communicator.step(data("gaussian", 100, step), "w")
    with pytest.warns(RuntimeWarning):
        communicator.step(np.full(100, np.inf, np.float32), "w")
    gradient, left_out = data("gaussian", 100, 4), remembered(communicator)
    sent = communicator.step(gradient.copy(), "w")
    assert left_out.any()
    np.testing.assert_allclose(remembered(communicator), 0.5 * (gradient - np.float64(sent)), atol=1e-6)
    kept, gradient = remembered(communicator), data("gaussian", 100, 5)
    sent = communicator.step(gradient.copy(), "w")  # and not once more
    np.testing.assert_allclose(
        remembered(communicator), 0.5 * kept + 0.5 * (gradient + kept - np.float64(sent)), atol=1e-6
    )


SCHEDULES = {
    "constant": lambda step: 0.1,
    "changes every step": lambda step: 0.1 * 0.9**step,
    "cosine": lambda step: 0.5 * (1.001 + math.cos(step)),
    "warm-up from zero": lambda step: 0.01 * step,
    "zero now and then": lambda step: 0.0 if step % 7 in (3, 4) else 0.1 / (1 + step),
    "whole numbers": lambda step: 1 + step % 3,
}


@frameworks
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_efsignsgd_follows_algorithm_1_of_the_paper(make_tensor, schedule):
    communicator = Allgather("efsignsgd")
    error = np.zeros(SHAPE)
    for step in range(STEPS):
        lr = SCHEDULES[schedule](step)
        communicator.context.lr = lambda name, lr=lr: lr
        gradient = data("heavy", SHAPE, step)
        update = lr * np.float64(communicator.step(make_tensor(gradient), "w"))
        if lr == 0:  # the paper's rate is positive: here nothing reaches the weights, and the error waits
            assert not update.any()
            continue
        p = lr * np.float64(gradient) + error
        delta = np.abs(p).mean() * np.where(p >= 0, 1, -1)
        error = p - delta
        clear = np.abs(p) > 1e-5 * np.abs(p).max()  # else rounding may decide the sign
        assert clear.mean() > 0.99
        np.testing.assert_allclose(update[clear], delta[clear], rtol=1e-4)
        error = lr * remembered(communicator)  # keep rounding from growing through undecided signs
        np.testing.assert_allclose(error[clear], (p - delta)[clear], atol=1e-4 * np.abs(p).max())


@pytest.mark.parametrize("lr", [1, 0.5, torch.tensor(0.5)], ids=["int", "float", "tensor"])
def test_rescale_scales_the_residual_and_not_the_rate(lr):
    communicator = Allgather("efsignsgd")
    communicator.bind(Context(lr=lambda name: lr))
    communicator.step(torch.tensor([1.0, -3.0]), "w")
    before = communicator.memory.state["w"]["residual"].clone()
    communicator.memory.rescale(8.0)
    state = communicator.memory.state["w"]
    assert torch.equal(state["residual"], 8 * before)
    assert state["lr"] == float(lr)


def test_rescale_scales_residuals():
    communicator = Allgather("topk(ratio=0.5)")
    communicator.step(torch.tensor([1.0, -3.0]), "w")
    communicator.memory.rescale(0.5)
    assert communicator.memory.state["w"].tolist() == [0.5, 0.0]


def test_a_moving_average_without_dimensions_is_rescaled_every_time():
    communicator = Allgather("onebit", "loco(beta=1)")
    communicator.memory.state["w"] = {"error": np.array(0.5, np.float32), "resets": 0}
    for _ in range(2):
        communicator.memory.rescale(2.0)
    same(communicator.memory.state["w"]["error"], np.array(2, np.float32))
    assert communicator.memory.residual_tensors("w")


class Own(grace.Memory):
    """A user's, as the contract shows it."""

    def compensate(self, tensor, name):
        return tensor + self.state.get(name, 0)

    def update(self, tensor, name, compressor, payload, ctx):
        self.state[name] = tensor - compressor.decompress(payload, ctx)


class Halves(grace.Compressor):
    """A user's, whose arithmetic is NumPy's."""

    traits = grace.Traits(category="quantization", fixed_size=True)

    def compress(self, tensor, name):
        return tensor / 2, None

    def decompress(self, payload, ctx):
        return payload[0] * 1


@frameworks
@pytest.mark.parametrize("kind", ["Allgather", "Broadcast", "ReduceBroadcast", "ScatterReduce"])
def test_users_parts_take_tensors_without_dimensions(make_tensor, kind):
    means = []
    for compressor, memory in (("block(bits=4)", Own()), ("block(bits=4)", "residual"), (Halves(), Own())):
        if kind != "ScatterReduce" or compressor == "block(bits=4)":
            communicator = getattr(grace.torch, kind)(compressor, memory)
            x = make_tensor(np.array(3, np.float32))
            means.append([communicator.step(x, "w") for _ in range(3)])
            assert all(tuple(mean.shape) == () for mean in means[-1])
    assert means[0] == means[1] == [3.0] * 3
    if kind in ("Allgather", "Broadcast"):
        assert means[2] == [1.5, 2.25, 2.625]


# -- bad numbers -------------------------------------------------------------------------------------------


def everything(communicator: Communicator) -> dict:
    parts = {"compressor": communicator.compressor, "memory": communicator.memory}
    flat = {}
    for kind, part in parts.items():
        for name, value in part.state.items():
            for key, item in value.items() if isinstance(value, dict) else [("", value)]:
                flat[kind, name, key] = np.asarray(item).copy()
    return flat


@pairs(
    ("bad", "make_tensor", "position"),
    [(np.nan, np.array, 0), (np.inf, torch.from_numpy, 1), (-np.inf, torch.from_numpy, 599)],
)
def test_a_bad_number_is_seen_and_leaves_all_state_unchanged(cls, compressor, memory, make_tensor, bad, position):
    communicator = build(cls, compressor, memory)
    for step in range(3):
        communicator.step(make_tensor(data("gaussian", SHAPE, step)), "w")
    before = everything(communicator)
    gradient = data("gaussian", SHAPE, 3)
    gradient.reshape(-1)[position] = bad
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        got = np.asarray(communicator.step(make_tensor(gradient), "w"))
    assert not np.isfinite(got).all()
    after = everything(communicator)
    assert before.keys() == after.keys()
    for key in before:
        same(before[key], after[key])


@pairs(("when", "make_tensor"), [(0, np.array), (4, torch.from_numpy)])
def test_training_goes_on_as_if_the_overflowed_step_had_not_been(cls, compressor, memory, make_tensor, when):
    clean, other = build(cls, compressor, memory), build(cls, compressor, memory)
    for step in range(8):
        gradient = data("gaussian", SHAPE, step)
        if step == when:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                other.step(make_tensor(np.full(SHAPE, np.nan, np.float32)), "w")
            clean.context.step += 1
        same(np.asarray(clean.step(make_tensor(gradient.copy()), "w")), other.step(make_tensor(gradient), "w"))


def test_a_memory_without_its_methods_says_which_are_missing():
    class Nothing(grace.Memory):
        name = "nothing"

    with pytest.raises(TypeError, match="Nothing must define compensate"):
        Nothing().compensate(np.zeros(1), "w")
    assert Nothing().update(np.zeros(1), "w", grace.make("compressor", "none"), [], None) is None  # optional
