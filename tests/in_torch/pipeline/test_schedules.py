"""Pipelines over real ranks compute what one process computes."""

import pytest
import torch

from tests.support.drawing import THOROUGH
from tests.support.pipelines import BY_NAME, alone, piped_all
from tests.support.pools import ranks_of

pytestmark = pytest.mark.ranks
NAMES = [name for name in BY_NAME if name != "OneOperation"]  # which is one stage: see test_engine.py
COUNTS = {"gpipe": (1, 2, 4), "1f1b": (2, 4)}
"""Numbers of micro-batches of each schedule, no fewer than stages in 1F1B."""


def share(names, schedule, microbatches):
    """Of the models those whose turn it is: every one meets every schedule and, over them, every number; `make
    thorough` runs the product."""
    counts = COUNTS[schedule]
    turn = (counts.index(microbatches) + list(COUNTS).index(schedule)) % len(counts)
    return names if THOROUGH else names[turn :: len(counts)]


def check(name, answers, expected, buffers=True):
    losses, gradients, state = expected
    seen = set()
    for got, own, values, place in answers:
        assert got == pytest.approx(losses, rel=1e-5, abs=1e-7), (name, place)
        for key, value in own.items():
            assert torch.allclose(value, gradients[key], rtol=1e-4, atol=1e-6), (name, key, place)
        for key, value in values.items():
            if buffers or key in gradients:
                assert torch.allclose(value, state[key], rtol=1e-4, atol=1e-6), (name, key, place)
        seen |= values.keys()
    aliases = {"head.weight"} if name == "TiedEmbedding" else set()
    assert seen == state.keys() - aliases, name


def run(ranks, names, microbatches, replicas=1, **settings):
    answers = ranks_of(ranks).run(run_all, names, {"microbatches": microbatches, **settings})
    for name in names:
        # a batch norm's statistics are those of the replica's own rows
        buffers = replicas == 1 or name != "Normalized"
        check(name, [one[name] for one in answers], alone(name, 2, microbatches, replicas), buffers)


def run_all(names, settings):
    return piped_all(names, 2, **settings)


@pytest.mark.every
@pytest.mark.parametrize(("schedule", "microbatches"), [(name, n) for name in COUNTS for n in COUNTS[name]])
def test_two_stages_are_one_process(schedule, microbatches):
    run(2, share(NAMES, schedule, microbatches), microbatches, schedule=schedule)


@pytest.mark.parametrize("schedule", COUNTS)
def test_two_replicas_of_two_stages_are_one_process(schedule):
    names = NAMES if THOROUGH else NAMES[list(COUNTS).index(schedule) :: len(COUNTS)]
    run(4, names, 2, 2, schedule=schedule, stages=2)


def test_stages_that_compute_forward_again_are_one_process():
    run(2, NAMES, 2, schedule="1f1b", recompute=True)
