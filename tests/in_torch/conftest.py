"""Ranks that several files share."""

import pytest

from tests.support.pool import Ranks
from tests.support.pools import launched


@pytest.fixture
def horovod() -> Ranks:
    """2 ranks under horovodrun."""
    return launched("horovodrun-gloo", 2)
