"""Qualities of models, as people read them."""

import math
from collections.abc import Mapping
from typing import Any

from grace.bench.common.text import digits, number

Settings = Mapping[str, Any]


def shown(value: object, settings: Settings, unit: bool = True) -> str:
    """Format a quality, with its unit if it has one.

    >>> accuracy = {"scale": 100, "unit": "%"}
    >>> shown(0.97123, accuracy), shown(0.97123, accuracy, unit=False), shown(5.1234, {})
    ('97.1 %', '97.1', '5.12')
    """
    value = number(value)
    scaled = None if value is None else value * scale(settings)
    percent = scaled is not None and settings.get("unit") == "%"
    text = f"{scaled:.1f}" if percent else digits(scaled)
    return f"{text} {settings.get('unit') or ''}".strip() if unit else text


def scale(settings: Settings) -> float:
    """Return the factor that qualities are multiplied with to be shown."""
    return number(settings.get("scale")) or 1.0


def better(settings: Settings) -> int:
    """Return 1 where a higher quality is better, -1 where a lower one is."""
    return 1 if settings.get("higher_is_better", True) else -1


def shortfall(task: Settings, quality: float, plain: float, start: float) -> float | None:
    """Return the part of what uncompressed training gains that a method does not; negative if the method gains more.

    It is (plain - quality) / (plain - start), for accuracies and losses alike, and for the logarithms of perplexities:
    of the final qualities of ``none`` and of the method, and that of the weights that both start from. None if
    ``plain`` has gained nothing; infinite if the method diverged.

    >>> round(shortfall({"metric": "loss", "higher_is_better": False}, 1.8, plain=1.7, start=4.7), 3)
    0.033
    >>> round(shortfall({"metric": "accuracy"}, 0.95, plain=0.97, start=0.1), 3)
    0.023
    """
    if task["metric"] == "perplexity":
        quality, plain, start = (math.log(value) for value in (quality, plain, start))
    if not math.isfinite(quality):  # diverged: not None, which means that nothing is known
        return math.inf
    gain = better(task) * (plain - start)
    return better(task) * (plain - quality) / gain if gain > 0 else None


def against_none(task: Settings, quality: float, plain: float, lacks: float | None) -> str:
    """Format a quality beside that of ``none``: points of a percentage, or else the part of the gain that is lacking.

    >>> against_none({"unit": "%"}, 0.95, 0.97, lacks=0.023), against_none({"unit": ""}, 1.8, 1.7, lacks=0.0333)
    ('-2.0', '3.3 %')
    """
    if task.get("unit") == "%":
        return f"{100 * (quality - plain):+.1f}"
    return "" if lacks is None else f"{100 * lacks:.1f} %"
