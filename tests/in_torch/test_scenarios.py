"""Training scripts drawn from seeds; `make soak` draws many more."""

import pytest

import grace
from tests.support.drawing import THOROUGH
from tests.support.pools import on_ranks
from tests.support.scenarios import compared

SEEDS = 24 if THOROUGH else 4


@pytest.mark.parametrize("part", range(4))
@on_ranks(2, 3)
def test_scripts_drawn_from_seeds_keep_what_is_promised(part):
    for seed in range(1000 * grace.size() + part, 1000 * grace.size() + SEEDS, 4):
        assert compared(seed) == "", f"seed {seed}"


@pytest.mark.parametrize("engine", ["mpirun-mpi", "horovodrun-gloo"])
@on_ranks()
def test_scripts_drawn_from_seeds_keep_it_on_engines_too(engine):
    for seed in range(5000, 5004 if THOROUGH else 5001):  # in 5000 means come later, and ranks begin in other orders
        assert compared(seed) == "", f"seed {seed}"
