"""Errors that Grace raises on purpose, and its warnings. Messages name the fault, its location, and a remedy."""

import contextlib
import importlib.util
import re
import sys
import warnings
from collections.abc import Iterator
from types import FrameType


class GraceError(Exception):
    """Base of every error that Grace raises on purpose. Long inputs are cut in its message."""

    __init__ = Exception.__init__  # else TensorFlow raises a StagingError instead, where a function is traced

    def __str__(self) -> str:
        return shortened(super().__str__())


WORD, MESSAGE = 400, 6000
"""Largest numbers of characters of a word, and of a message, that are shown."""


def shortened(text: str) -> str:
    """Return a message without the middle of words that are too long, and of the message if that is too long.

    >>> shortened("unknown method " + "x" * 10**6).replace("x" * 50, "x")
    'unknown method xxxxx...(999,700 more)...x'
    """
    text = re.sub(rf"\S{{{WORD + 1},}}", lambda word: _cut(word[0], WORD), text) if len(text) > WORD else text
    return text if len(text) <= MESSAGE else _cut(text, MESSAGE)


def _cut(text: str, length: int) -> str:
    head, tail = length * 5 // 8, length // 8
    return f"{text[:head]}...({len(text) - head - tail:,} more)...{text[-tail:]}"


def said_of(error: BaseException) -> str:
    """Return the message of an error for other ranks, with its type if it is not Grace's own.

    >>> said_of(KeyError("w"))
    "KeyError: 'w'"
    """
    return str(error) if isinstance(error, GraceError) else f"{type(error).__name__}: {error}"


def in_one_line(text: str) -> str:
    """Return a message as one line of at most 500 characters, from its beginning and its end.

    TensorFlow's errors of graphs begin with the place where an operation was made, and end with the error in it.

    >>> in_one_line(f"Graph execution error:\\n{'line ' * 200}\\nValueError: a mistake")[-22:]
    ' ValueError: a mistake'
    """
    line = " ".join(text.split())
    return line if len(line) <= 500 else f"{line[:150]} ... {line[-345:]}"


WITHIN = {
    *("grace", "torch", "tensorflow", "keras", "horovod", "lightning", "transformers", "accelerate", "ray"),
    *("numba", "triton", "contextlib", "functools"),
}
"""Packages through which a user's program calls Grace, and Grace itself."""


def warn(message: str) -> None:
    """Warn, at the line of the user's program that called Grace, directly or through its framework."""
    caller = sys._getframe(1)
    frame: FrameType | None = caller
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in WITHIN:
        frame = frame.f_back
    line = frame or caller  # a thread of Grace's own has no line of the user's
    registry = line.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, UserWarning, line.f_code.co_filename, line.f_lineno, registry=registry)


class ConfigError(GraceError, ValueError):
    """Error of a name, parameter or combination that cannot work; raised before any gradient is exchanged."""


class RankError(GraceError, RuntimeError):
    """Error of ranks that disagree, or of another rank that failed."""


class ExchangeError(GraceError, RuntimeError):
    """Error of a collective that failed, or of gradients that were touched during their exchange."""


class PayloadError(ExchangeError):
    """Error of a payload that cannot be decoded: a position, a code or a size is out of range."""

    place: int | None = None
    """Index of the payload among those that were decoded together: the number of its sender. None if unknown."""
    variable: str = ""
    """Name of the payload's variable; empty if unknown."""


@contextlib.contextmanager
def payload_of(place: int | None = None, variable: str = "") -> Iterator[None]:
    """Add the index of the payload, if it has none, and its variable to a :class:`PayloadError` that is raised in this
    context."""
    try:
        yield
    except PayloadError as error:
        error.place = place if error.place is None else error.place
        error.variable = variable or error.variable
        raise


class StepError(RankError, ExchangeError):
    """Desync: ranks are at different steps, or run them with different settings."""


class MissingExtraError(GraceError, ImportError):
    """Error of an optional package that is needed; the message has the command that installs it."""


def missing_extra(package: str, extra: str) -> MissingExtraError:
    """Return the error for an optional package that is not installed.

    >>> print(missing_extra("torch", "torch"))
    torch is not installed; install it with: pip install "grace-compress[torch]"
    """
    return MissingExtraError(f'{package} is not installed; install it with: pip install "grace-compress[{extra}]"')


def require(module: str, extra: str, package: str = "") -> None:
    """Raise MissingExtraError unless a module is installed; ``package`` brings it, if that has another name."""
    if not installed(module):
        raise missing_extra(package or module, extra)


def installed(module: str) -> bool:
    """Return True if a module can be found, which is not imported.

    >>> installed("numpy"), installed("no_such_module")
    (True, False)
    """
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # raised by finders that hide modules
        return False
