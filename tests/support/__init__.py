"""Helpers that tests share."""

import contextlib
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent

with contextlib.suppress(ImportError):
    import triton  # noqa: F401 - as in conftest.py, for ranks
