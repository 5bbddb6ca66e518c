"""Errors that say what was wrong, where, and what would be right."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class GraceError(Exception):
    """Base of every error that Grace raises on purpose."""


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
