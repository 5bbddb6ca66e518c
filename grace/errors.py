"""Errors that say what was wrong, where, and what would be right."""

import contextlib
import re
from collections.abc import Iterator


class GraceError(Exception):
    """Base of every error that Grace raises on purpose. What it repeats of an input is cut."""

    __init__ = Exception.__init__  # else TensorFlow raises a StagingError instead, where a function is traced

    def __str__(self) -> str:
        return shortened(super().__str__())


WORD, MESSAGE = 400, 6000
"""Characters of a word, and of a whole message, that are shown."""


def shortened(text: str) -> str:
    """A message for people: the middle of what is too long is left out.

    >>> shortened("unknown method " + "x" * 10**6).replace("x" * 50, "x")
    'unknown method xxxxx...(999,700 more)...x'
    """
    text = re.sub(rf"\S{{{WORD + 1},}}", lambda word: _cut(word[0], WORD), text) if len(text) > WORD else text
    return text if len(text) <= MESSAGE else _cut(text, MESSAGE)


def _cut(text: str, length: int) -> str:
    head, tail = length * 5 // 8, length // 8
    return f"{text[:head]}...({len(text) - head - tail:,} more)...{text[-tail:]}"


class ConfigError(GraceError, ValueError):
    """A name, parameter or combination that cannot work; raised before any gradient is exchanged."""


class RankError(GraceError, RuntimeError):
    """The ranks disagree, or another rank failed."""


class ExchangeError(GraceError, RuntimeError):
    """A collective failed, or gradients were touched while they were being exchanged."""


class PayloadError(ExchangeError):
    """What another rank sent cannot be decoded: a position, a code or a size is out of range."""

    place: int | None = None
    """Which of the payloads that were decoded together it was: the rank that sent it."""
    variable: str = ""
    """The variable whose payload it was; empty if it is not known."""


@contextlib.contextmanager
def payload_of(place: int) -> Iterator[None]:
    """What is decoded here is the payload at this place."""
    try:
        yield
    except PayloadError as error:
        if error.place is None:
            error.place = place
        raise


class StepError(RankError, ExchangeError):
    """The ranks are at different steps, or make them with different settings."""


class MissingExtraError(GraceError, ImportError):
    """An optional package is needed; the message is the line that installs it."""


def missing_extra(package: str, extra: str) -> MissingExtraError:
    """The error for an optional package that is not installed.

    >>> print(missing_extra("torch", "torch"))
    torch is not installed; install it with: pip install "grace-compress[torch]"
    """
    return MissingExtraError(f'{package} is not installed; install it with: pip install "grace-compress[{extra}]"')
