"""Numbers with units, as people write them: bandwidths, times and sizes."""

import math
import re
from collections.abc import Mapping, Sequence

from grace.errors import ConfigError

BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
"""Units of a bandwidth, in bit/s."""
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
BYTES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
"""Prefixes of bytes, and their values."""

BYTE_UNITS = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}
"""Units in which bytes are shown, the largest first."""


def parse_quantity(text: str, units: Mapping[str, float], form: str) -> float:
    """Return the value of a number with a unit, in units of 1.

    Args:
        text: the number and its unit.
        units: the value of each unit, in small letters.
        form: the beginning of the error's message: how such a number is written.

    Raises:
        ConfigError: the text is no such number.

    >>> parse_quantity("100mbit", BITS, "a bandwidth"), parse_quantity(" 50 us", SECONDS, "a latency")
    (100000000.0, 5e-05)
    >>> parse_quantity("2", SECONDS, "a latency is a number with s, ms or us")
    Traceback (most recent call last):
    grace.errors.ConfigError: a latency is a number with s, ms or us, not '2'
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)\s*([a-z]*)\s*", text, re.ASCII | re.IGNORECASE)
    value = float(found[1]) * units.get(found[2].lower(), math.nan) if found else math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{form}, not {text!r}")
    return float(f"{value:.15g}")  # 50 us are 5e-05 s, not 4.9999999999999996e-05


def parse_rate(text: str) -> float:
    """Return a bandwidth in bit/s.

    Raises:
        ConfigError: it is not a bandwidth.

    >>> parse_rate("100mbit"), parse_rate("2.5 Gbit")
    (100000000.0, 2500000000.0)
    >>> parse_rate("100MB")
    Traceback (most recent call last):
    grace.errors.ConfigError: a bandwidth is a number above 0 of kbit, mbit or gbit (per second), as in 800kbit, 100mbit
        or 2.5gbit, not '100MB'
    """
    form = "a bandwidth is a number above 0 of kbit, mbit or gbit (per second), as in 800kbit, 100mbit or 2.5gbit"
    rate = parse_quantity(text, BITS, form)
    if not rate:
        raise ConfigError(f"{form}, not {text!r}")
    return rate


def parse_bytes(text: str) -> float:
    """Return a size in bytes.

    >>> parse_bytes("16GB"), parse_bytes("500 MB"), parse_bytes("1e9")
    (16000000000.0, 500000000.0, 1000000000.0)
    """
    return parse_quantity(text.rstrip("Bb"), BYTES, "a size is a number with kB, MB, GB or TB, as 16GB")


def byte_unit(nbytes: float) -> tuple[str, float]:
    """Return the largest of :data:`BYTE_UNITS` that is not larger than some bytes, and its bytes."""
    return next((item for item in BYTE_UNITS.items() if nbytes >= item[1]), ("B", 1.0))


def show_bytes(nbytes: float, digits: int = 4) -> str:
    """Return bytes as text, to so many digits.

    >>> show_bytes(2.5e9), show_bytes(245e3), show_bytes(7.0), show_bytes(0.0), show_bytes(1_234_000, 3)
    ('2.5 GB', '245 kB', '7 B', '0 B', '1.23 MB')
    >>> show_bytes(999_600, 3), show_bytes(2e12, 3)
    ('1 MB', '2 TB')
    """
    rounded = float(f"{nbytes:.{digits}g}")  # first: 999,600 bytes are 1 MB in three digits, not 1e+03 kB
    unit, size = byte_unit(rounded)
    return f"{rounded / size:.{digits}g} {unit}"


def show_ms(seconds: float) -> str:
    """Return seconds as text: milliseconds, to three digits.

    >>> show_ms(0.0121), show_ms(1.5), show_ms(0.0), show_ms(-1e-17)
    ('12.1 ms', '1500 ms', '0 ms', '0 ms')
    """
    ms = seconds * 1e3
    if abs(ms) < 5e-4:
        return "0 ms"
    return f"{ms:.0f} ms" if abs(ms) >= 100 else f"{ms:.3g} ms"


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of text whose cells stand below each other.

    >>> align_columns([("plan", "step"), ("fp16", "2 ms")])
    ['plan  step', 'fp16  2 ms']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
