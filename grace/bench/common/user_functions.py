"""Functions of the user's, found by name."""

import importlib
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from grace.errors import ConfigError


def load_function(name: str, what: str, known: Collection[str]) -> Callable[..., Any]:
    """Return the function of ``module:function``; modules are also looked for in the current folder.

    A ConfigError says what is missing: the role ``what`` of the function, and names ``known`` that would have been
    accepted.

    >>> load_function("math:sqrt", "model", [])(4.0)
    2.0
    """
    module_name, colon, function = name.partition(":")
    if not (module_name and colon and function):
        names = ", ".join([*known, "or module:function"]) if known else "none but module:function"
        raise ConfigError(f"unknown {what} {name!r}; known: {names}")
    folder = str(Path.cwd())  # a console script has its own folder on the path, in place of the current one
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that a user's file hides no package
    try:
        found = getattr(importlib.import_module(module_name), function, None)
    except (Exception, SystemExit) as error:  # a user's module may raise anything, and end as a script does
        why = error if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):  # argparse found arguments that are not the script's
            why = f"{why}. Put what it does as a script under if __name__ == '__main__':"
        raise ConfigError(f"{what} {name!r}: cannot import {module_name}: {why}") from error
    if not callable(found):
        raise ConfigError(f"{what} {name!r}: {module_name} has no function {function!r}")
    return found
