"""Ranks that several files share."""

import pytest

from tests.support.pool import Ranks
from tests.support.pools import launched, ranks_of


@pytest.fixture
def horovod() -> Ranks:
    """2 ranks under horovodrun."""
    return launched("horovodrun-gloo", 2)


@pytest.fixture
def four() -> Ranks:
    """4 real gloo ranks."""
    return ranks_of(4)
