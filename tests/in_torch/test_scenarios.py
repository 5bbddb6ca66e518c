"""Training scripts drawn from seeds; `make soak` draws many more."""

import pytest

from tests.support.drawing import THOROUGH
from tests.support.pools import launched
from tests.support.scenarios import compared

pytestmark = pytest.mark.ranks

SEEDS = 24 if THOROUGH else 8


@pytest.mark.parametrize("part", range(4))
def test_scripts_drawn_from_seeds_keep_what_is_promised(ranks, part):
    for seed in range(part, SEEDS, 4):
        assert set(ranks.run(compared, 1000 * ranks.size + seed)) == {""}, f"seed {1000 * ranks.size + seed}"


@pytest.mark.parametrize("engine", ["mpirun-mpi", "horovodrun-gloo"])
def test_scripts_drawn_from_seeds_keep_it_on_engines_too(engine):
    for seed in range(5000, 5004 if THOROUGH else 5002):  # in 5000 means come later, and ranks begin in other orders
        assert set(launched(engine, 2).run(compared, seed)) == {""}, f"seed {seed}"
