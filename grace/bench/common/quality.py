"""Qualities of models, as people read them."""

from collections.abc import Mapping
from typing import Any

from grace.bench.common.text import digits, number

Settings = Mapping[str, Any]


def shown(value: Any, settings: Settings, unit: bool = True) -> str:
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


def quality_axis(settings: Settings) -> str:
    """Return the label of an axis of qualities."""
    unit = settings.get("unit")
    better_is = "higher is better" if better(settings) > 0 else "lower is better"
    return f"test {settings.get('metric', 'quality')}" + (f" ({unit})" if unit else "") + f", {better_is}"


def difference(task: Settings, quality: float, plain: float) -> str:
    """Format the difference of a quality to the uncompressed one: in points where it is in percent, else relatively.

    >>> difference({"unit": "%"}, 0.95, 0.97), difference({"unit": ""}, 5.5, 5.0)
    ('-2.0', '+10.0 %')
    """
    if task["unit"] == "%":
        return f"{100 * (quality - plain):+.1f}"
    return f"{100 * (quality / plain - 1):+.1f} %"
