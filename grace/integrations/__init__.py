"""Integrations with frameworks around torch: a module each, imported on first use, which imports its framework."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Import an integration on first use, so that ``grace.integrations.transformers`` needs no import of its own."""
    if name in ("transformers", "lightning", "accelerate"):
        return importlib.import_module(f"grace.integrations.{name}")
    raise AttributeError(f"module 'grace.integrations' has no attribute {name!r}")
