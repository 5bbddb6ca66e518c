"""Training scripts drawn from seeds; `make soak` draws many more."""

from __future__ import annotations

import pytest
from scenarios import compared

pytestmark = pytest.mark.ranks

SEEDS = 48


@pytest.mark.parametrize("part", range(4))
def test_scripts_drawn_from_seeds_keep_what_is_promised(ranks, part):
    for seed in range(part, SEEDS, 4):
        assert set(ranks.run(compared, 1000 * ranks.size + seed)) == {""}, f"seed {1000 * ranks.size + seed}"
