"""Pipelines over real ranks compute what one process computes."""

import pytest

from tests.support.drawing import THOROUGH
from tests.support.pipelines import BY_NAME, alone, check_is_alone, piped_all
from tests.support.pools import ranks_of

pytestmark = pytest.mark.ranks
NAMES = [name for name in BY_NAME if name != "OneOperation"]  # which is one stage: see test_engine.py
WAYS = {
    "gpipe": [{"schedule": "gpipe", "microbatches": n} for n in (1, 2, 4)],
    "1f1b": [{"schedule": "1f1b", "microbatches": n} for n in (2, 4)]  # no fewer than stages
    + [{"schedule": "1f1b", "microbatches": 2, "recompute": True}],
}
REPLICATED = [{"schedule": schedule, "microbatches": 2, "stages": 2} for schedule in WAYS]


def share(ways, turn):
    """Models whose turn it is to meet one of several ways, so that each meets one; `make thorough` runs the product."""
    return NAMES if THOROUGH else NAMES[turn :: len(ways)]


def run_all(names, settings):
    return piped_all(names, 2, **settings)


def run(ranks, names, replicas, settings):
    answers = ranks_of(ranks).run(run_all, names, settings)
    for name in names:
        # a batch norm's statistics are those of the replica's own rows
        buffers = replicas == 1 or name != "Normalized"
        check_is_alone(
            name, [one[name] for one in answers], alone(name, 2, settings["microbatches"], replicas), buffers
        )


@pytest.mark.every
@pytest.mark.parametrize(("schedule", "way"), [(schedule, i) for schedule in WAYS for i in range(3)])
def test_two_stages_are_one_process(schedule, way):
    """Also stages that compute forward again."""
    run(2, share(WAYS[schedule], way), 1, WAYS[schedule][way])


@pytest.mark.every
@pytest.mark.parametrize("way", range(2))
def test_two_replicas_of_two_stages_are_one_process(way):
    """Each schedule has every seventh model: replicas add the exchange alone, which knows no models."""
    run(4, NAMES if THOROUGH else NAMES[way::7], 2, REPLICATED[way])
