"""What several benchmarks' options have in common: methods and sizes as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

from grace.bench import training
from grace.errors import ConfigError

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def parse_methods(text: str) -> list[str]:
    """Compressor specs separated by commas, or ``all``, in the order given and each once.

    >>> parse_methods("topk, qsgd,topk"), len(parse_methods("all")) > 20
    (['topk', 'qsgd'], True)
    """
    return list(dict.fromkeys(training.every_method() if text.strip() == "all" else split(text)))


def split(text: str) -> list[str]:
    """Specs separated by commas; those inside parentheses belong to a spec.

    >>> split("none, qsgd(levels=7, norm=max),topk")
    ['none', 'qsgd(levels=7, norm=max)', 'topk']
    """
    parts, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def parse_size(text: str) -> int:
    """A number of elements.

    Raises:
        ConfigError: it is not a whole number above 0.

    >>> parse_size("25M"), parse_size("4096"), parse_size("1e6"), parse_size("2.5M")
    (25000000, 4096, 1000000, 2500000)
    >>> parse_size("25MB")
    Traceback (most recent call last):
    grace.errors.ConfigError: a size is a number of elements, as in 4096, 1e6, 2.5M or 25M, not '25MB'
    """
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)(?:e(\d{1,2}))?\s*([kmg]?)\s*", text, re.ASCII | re.IGNORECASE)
    count = Fraction(found[1]) * 10 ** int(found[2] or 0) * UNITS[found[3].lower()] if found else Fraction(0)
    if count < 1 or count.denominator != 1:
        raise ConfigError(f"a size is a number of elements, as in 4096, 1e6, 2.5M or 25M, not {text!r}")
    return int(count)
