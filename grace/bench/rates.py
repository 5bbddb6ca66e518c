"""Bandwidths as people write them."""

from __future__ import annotations

import re

from grace.errors import ConfigError

UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


def parse_rate(text: str) -> float:
    """Bits per second.

    Raises:
        ConfigError: it is not a rate.

    >>> parse_rate("100mbit"), parse_rate("2.5 Gbit")
    (100000000.0, 2500000000.0)
    >>> parse_rate("100MB")
    Traceback (most recent call last):
    grace.errors.ConfigError: a bandwidth is a number above 0 of kbit, mbit or gbit (per second), as in 800kbit, 100mbit
        or 2.5gbit, not '100MB'
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([kmg]?)bit\s*", text, re.ASCII | re.IGNORECASE)
    rate = float(found[1]) * UNITS[found[2].lower()] if found else 0.0
    if not rate or rate == float("inf"):
        raise ConfigError(
            "a bandwidth is a number above 0 of kbit, mbit or gbit (per second), as in 800kbit, 100mbit or 2.5gbit, "
            f"not {text!r}"
        )
    return rate


def show_rate(rate: float) -> str:
    """Bits per second, as text that :func:`parse_rate` reads; four significant digits.

    >>> show_rate(1e9), show_rate(2.5e9), show_rate(98_765_432), show_rate(999_990)
    ('1gbit', '2.5gbit', '98.77mbit', '1mbit')
    """
    rounded = float(f"{rate:.4g}")
    unit = next((unit for unit in ("g", "m", "k") if rounded >= UNITS[unit]), "")
    return f"{rounded / UNITS[unit]:.10g}bit".replace("bit", f"{unit}bit")
