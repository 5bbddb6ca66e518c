"""A fixture for tests of what a launcher has left."""

import pytest

import grace
from tests.support.launchers import KEYS


@pytest.fixture
def no_launcher(monkeypatch):
    """No run before or after, and the environment of a plain `python`."""
    for key in (*KEYS, "GRACE_QUIET"):
        monkeypatch.delenv(key, raising=False)
    grace.shutdown()
    yield
    grace.shutdown()
