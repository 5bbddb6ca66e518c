"""The whole catalogue over real ranks: odd tensors, 16-bit gradients, resuming, and overflows."""

import re

import pytest
import torch

import grace
from grace.core.registry import known, legal_communicators, make
from tests.support.pairwise import pairwise
from tests.support.training import Given, digest, made_up, sgd, state_of, used

pytestmark = pytest.mark.ranks

METHODS = (
    *("natural", "terngrad", "onebit", "signum", "dynamic8", "sketch(quantiles=16)"),
    *("block(bits=4, hadamard=32)", "block(format=fp8, rounding=stochastic)", "block(bits=3)", "block(bits=2)"),
    *("threshold(value=0.5)", "dgc(ratio=0.1)", "adaptive(ratio=0.1)", "inceptionn"),
    *("topk(ratio=0.2) | qsgd(levels=7)", "randomk(ratio=0.2) | fp16", "dgc(ratio=0.1) | efsignsgd"),
    *("topk(ratio=0.2) | block(bits=2)",),
)
CASES = pairwise(
    *([2, 3], METHODS, known("communicator"), [torch.float32, torch.float16, torch.bfloat16]),
    allowed=lambda size, method, communicator, dtype: communicator in legal_communicators(make("compressor", method)),
)
SHAPES = {"odd": (13, 7), "kernel": (3, 2, 3, 3), "one": (1,), "scalar": (), "empty": (0, 3), "zeros": (31,)}


def plain(parameters):
    """SGD without momentum, which the dgc memory wants."""
    return torch.optim.SGD(parameters, lr=0.05)


def optimizer_of(model, compressor, communicator):
    return grace.DistributedOptimizer(
        plain(model.parameters()), model.named_parameters(), compressor, communicator=communicator
    )


def given(step: int, rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    gradients = {name: torch.as_tensor(g, dtype=dtype) for name, g in made_up(SHAPES, step, rank).items()}
    gradients["zeros"].zero_()
    return gradients


def five_steps(compressor: str, communicator: str, dtype: torch.dtype) -> tuple[str, bool, list]:
    model = Given(SHAPES).to(dtype)
    optimizer = optimizer_of(model, compressor, communicator)
    finite, dtypes = True, set()
    for step in range(5):
        optimizer.zero_grad()
        model.backward(given(step, grace.rank(), dtype))
        optimizer.step()
        for p in model.parameters():
            finite &= bool(torch.isfinite(p.grad).all())
            dtypes.add(p.grad.dtype)
    return digest({name: p.detach() for name, p in model.named_parameters()}), finite, list(dtypes)


@pytest.mark.parametrize(("ranks", "compressor", "communicator", "dtype"), CASES, indirect=["ranks"], ids=str)
def test_every_rank_ends_with_the_same_finite_bits(ranks, compressor, communicator, dtype):
    answers = ranks.run(five_steps, compressor, communicator, dtype)
    assert len({bits for bits, _, _ in answers}) == 1
    assert all(finite and dtypes == [dtype] for _, finite, dtypes in answers)


def resumed(compressor: str) -> bool:
    """Six steps at once, and three, a new model and optimizer with what was saved, and three."""
    whole, part, again = Given(SHAPES), Given(SHAPES), Given(SHAPES)
    steps = {id(model): optimizer_of(model, compressor, None) for model in (whole, part)}

    def run(model, optimizer, numbers):
        for step in numbers:
            optimizer.zero_grad()
            model.backward(given(step, grace.rank(), torch.float32))
            optimizer.step()

    run(whole, steps[id(whole)], range(6))
    run(part, steps[id(part)], range(3))
    again.load_state_dict(part.state_dict())
    optimizer = optimizer_of(again, compressor, None)
    optimizer.load_state_dict(steps[id(part)].state_dict())
    run(again, optimizer, range(3, 6))
    return digest(whole.state_dict()) == digest(again.state_dict())


@pytest.mark.parametrize("compressor", METHODS)
def test_a_resumed_run_continues_bit_for_bit(two_ranks, compressor):
    assert two_ranks.run(resumed, compressor) == [True, True]


def overflown(compressor: str) -> tuple[bool, bool]:
    model = Given(SHAPES)
    optimizer = optimizer_of(model, compressor, None)
    for step in range(2):
        optimizer.zero_grad()
        model.backward(given(step, grace.rank(), torch.float32))
        optimizer.step()
    before = digest(state_of(optimizer))
    optimizer.zero_grad()
    gradients = given(2, grace.rank(), torch.float32)
    if grace.rank() == 1:
        gradients["odd"][3, 3] = float("inf")
    model.backward(gradients)
    optimizer.synchronize()
    seen = not bool(torch.isfinite(dict(model.named_parameters())["odd"].grad).all())
    used(model, optimizer)
    return seen, digest(state_of(optimizer)) == before


@pytest.mark.parametrize("compressor", METHODS)
def test_an_overflow_is_seen_by_all_and_enters_no_memory(ranks, compressor):
    assert ranks.run(overflown, compressor) == [(True, True)] * ranks.size


def refused(choices: dict) -> str:
    model = Given(SHAPES)
    try:
        grace.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **choices)
    except grace.ConfigError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"compressor": "dgc"}, r"momentum 0.9: it would be applied twice.*memory='dgc\(momentum=0.9\)'"),
        ({"compressor": "qsgd", "memory": "dgc"}, "memory dgc cannot serve qsgd: it clears the momentum"),
        ({"compressor": "onebit", "memory": "none"}, "onebit needs error feedback"),
        (
            {"compressor": "sketch", "communicator": "scatter_reduce"},
            "Legal communicators for sketch: allgather, broad",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_on_every_rank(two_ranks, choices, message):
    for answer in two_ranks.run(refused, choices):
        assert re.search(message, answer), answer
