"""Checks that the settings of several benchmarks share; each raises a ConfigError that says what is wrong."""

from collections.abc import Iterable

from grace.communicators.choice import build_communicator
from grace.errors import ConfigError

MOST_RANKS = 1000


def unique_lists(settings: object, *fields: str, allow_empty: bool = False) -> None:
    """Remove repeated values from lists of settings, which must not be empty."""
    for field in fields:
        values = list(dict.fromkeys(getattr(settings, field)))
        if not values and not allow_empty:
            raise ConfigError(f"nothing is to be measured: there are no {field}")
        setattr(settings, field, values)


def check_at_least_1(settings: object, *fields: str) -> None:
    """Refuse numbers below 1; None is the default of a benchmark."""
    for field in fields:
        value = getattr(settings, field)
        if value is not None and value < 1:
            raise ConfigError(f"--{field.replace('_', '-')} must be at least 1, not {value}")


def check_ranks(ranks: int) -> None:
    """Refuse a number of ranks that is below 1 or unreasonably large."""
    if not 1 <= ranks <= MOST_RANKS:
        raise ConfigError(f"--ranks must be between 1 and {MOST_RANKS}, not {ranks}")


def check_methods(specs: Iterable[str]) -> None:
    """Refuse compressors that cannot be built."""
    for spec in specs:
        build_communicator(spec, None, None)
