"""Numbers as people read them, on axes and in tables; unknown ones are a dash."""

import math
import re

UNKNOWN = "\u2013"


def number(value: object) -> float | None:
    """Return a finite number, or None for any other value that a file may hold.

    >>> number(3), number(float("nan")), number("3"), number(None), number(True)
    (3.0, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an int that no float holds
        return None


def digits(value: object, count: int = 3) -> str:
    """Format a number with so many significant digits, and never fewer than those before the point.

    >>> digits(1234.5), digits(12.345), digits(0.012345), digits(4.56e-8), digits(None), digits(0)
    ('1,234', '12.3', '0.0123', '4.56e-8', '–', '0')
    >>> digits(9.996), digits(0.9996)
    ('10.0', '1.00')
    """
    value = number(value)
    if value is None:
        return UNKNOWN
    if value == 0:
        return "0"
    rounded = float(f"{value:.{count - 1}e}")  # first: 9.996 is 10.0, with one digit behind the point
    exponent = math.floor(math.log10(abs(rounded)))
    if exponent < -4 or exponent > 8:
        base, _, power = f"{value:.{count - 1}e}".partition("e")
        return f"{base}e{int(power)}"
    return f"{value:,.{max(0, count - 1 - exponent)}f}"


def of_ranks(value: object) -> str:
    """Format a number of ranks that was read from a file.

    >>> of_ranks(1), of_ranks(2), of_ranks(None)
    ('1 rank', '2 ranks', '\u2013 ranks')
    """
    known = number(value)
    return f"{UNKNOWN if known is None else format(known, ',.10g')} {'rank' if value == 1 else 'ranks'}"


def of_bytes(value: object) -> str:
    """Format bytes with a decimal unit.

    >>> of_bytes(1_204_264), of_bytes(25), of_bytes(1e9), of_bytes(None)
    ('1.20 MB', '25 B', '1.00 GB', '–')
    """
    value = number(value)
    if value is None:
        return UNKNOWN
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{digits(value) if units[0] != 'B' else format(value, '.0f')} {units[0]}"


def of_rate(value: object) -> str:
    """Format a bandwidth in bit/s; None is no emulated link.

    >>> of_rate(1e8), of_rate(2.5e9), of_rate(999_990), of_rate(None)
    ('100 Mbit/s', '2.5 Gbit/s', '1 Mbit/s', 'no emulated link')
    """
    value = number(value)
    if value is None:
        return "no emulated link"
    amount, unit = _in_unit(value)
    return f"{amount:.10g} {unit.replace('m', 'M').replace('g', 'G')}bit/s"


def of_seconds(value: object) -> str:
    """Format a duration.

    >>> of_seconds(0.5), of_seconds(75), of_seconds(7300), of_seconds(None)
    ('0.500 s', '75.0 s', '2 h 2 min', '–')
    """
    value = number(value)
    if value is None:
        return UNKNOWN
    if value < 100:
        return f"{digits(value)} s"
    minutes = round(value / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


UNITS = {"g": 1e9, "m": 1e6, "k": 1e3}


def show_rate(rate: float) -> str:
    """Format bits per second as text that :func:`grace.core.quantities.parse_rate` reads; four significant digits.

    >>> show_rate(1e9), show_rate(2.5e9), show_rate(98_765_432), show_rate(999_990)
    ('1gbit', '2.5gbit', '98.77mbit', '1mbit')
    """
    amount, unit = _in_unit(rate)
    return f"{amount:.10g}{unit}bit"


def _in_unit(rate: float) -> tuple[float, str]:
    """Return bits per second, to four digits, in the largest unit that is not larger, and its prefix."""
    rate = float(f"{rate:.4g}")  # first: 999,990 bit/s are 1 Mbit/s, not 1000 kbit/s
    size, unit = next(((size, unit) for unit, size in UNITS.items() if rate >= size), (1.0, ""))
    return rate / size, unit


def scenario(ranks: int, rate: float | None) -> str:
    """Return the name of a scenario of so many ranks over a network.

    >>> scenario(2, 1e9), scenario(4, None)
    ('2 ranks at 1gbit', '4 ranks on loopback')
    """
    return of_ranks(ranks) + (" on loopback" if rate is None else f" at {show_rate(rate)}")


def clean(text: object) -> str:
    """Return a text as one line without characters that HTML cannot hold.

    >>> clean("a\\x00b\\n c")
    'ab c'
    """
    return "".join(c for c in " ".join(str(text).split()) if c.isprintable())


def short(text: str, length: int = 28) -> str:
    """Return the text; if it is longer, a spec without the names of its parameters, and then without its middle.

    >>> short("topk(ratio=0.01) | qsgd(levels=127)"), short("an answer that is too long", 15)
    ('topk(0.01) | qsgd(127)', 'an answ…oo long')
    """
    text = clean(text)
    if len(text) > length:
        text = re.sub(r"(?<=[(, ])\w+=", "", text)
    if len(text) <= length:
        return text
    half = length // 2
    return f"{text[:half]}…{text[len(text) - (length - half - 1) :]}"
