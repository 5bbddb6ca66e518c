"""Functions of the user's, by name."""

import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from grace.errors import ConfigError


def load_function(name: str, what: str, known: Iterable[str]) -> Callable[..., Any]:
    """The function of ``module:function``; modules are looked for in the current folder too.

    Args:
        name: as given by the user.
        what: it is to be, for messages.
        known: names that would have done too.

    Raises:
        ConfigError: there is none; the message says what is missing.

    >>> load_function("math:sqrt", "model", [])(4.0)
    2.0
    """
    module_name, colon, function = name.partition(":")
    if not (module_name and colon and function):
        raise ConfigError(f"unknown {what} {name!r}; known: {', '.join(known)}, or module:function")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        found = getattr(importlib.import_module(module_name), function, None)
    except ImportError as error:
        raise ConfigError(f"{what} {name!r}: cannot import {module_name}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{what} {name!r}: {module_name} has no function {function!r}")
    return found
