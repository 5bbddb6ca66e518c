"""What a line of a rank's trace must be; anything may stand in a file that was cut, mixed up or edited."""

import json
import math
from collections.abc import Callable
from typing import Any

from grace.errors import ConfigError
from grace.exchange.tracing.recorder import FORMAT

MOST = 2**62
"""Nanoseconds, bytes, elements, and clocks."""
MOST_RANKS = 1 << 20
PHASES = ("compensate", "compress", "update", "decode", "sum rows", "encode", "average")
"""Events of one variable."""


def entry_of(line: str, facts: dict[str, Any]) -> dict[str, Any]:
    """The event or the facts in a line.

    Args:
        line: of the file.
        facts: what the lines before it said; empty if there are none.

    Raises:
        ValueError: it is damaged; the message says what is wrong.

    >>> entry_of('{"waits": "DDP"}', {"rank": 0})
    {'waits': 'DDP'}
    >>> entry_of('{"ph": "X", "name": "step", "cat": "step", "ts": 1, "dur": -1, "tid": 0}', {"rank": 0})
    Traceback (most recent call last):
    ValueError: dur must be a number from 1 on, not -1
    """
    try:
        entry = json.loads(line, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(entry, dict):
        raise ValueError(f"it is {_short(entry)}, not an object")
    if not facts:
        if "grace_trace" not in entry:
            raise ValueError("the first line must say what rank it is of")
        if entry["grace_trace"] != FORMAT:
            raise ConfigError("it was written by another version of Grace, in another format; trace again")
    if "ph" in entry:
        _check_event(entry, facts)
    else:
        _check_facts(entry, not facts)
    return entry


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _number(value: Any, low: float = 0) -> str:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= MOST
    return "" if number and math.isfinite(value) else f"must be a number from {low} on"


def _whole(value: Any, low: float = 0) -> str:
    return "" if isinstance(value, int) and not _number(value, low) else f"must be a whole number from {low} on"


def _text(value: Any) -> str:
    try:
        value.encode()
        return ""
    except (AttributeError, UnicodeEncodeError):  # no text, or halves of characters, which cannot be printed
        return "must be text"


def _check(entry: dict[str, Any], place: str = "", **wanted: Callable[[Any], str]) -> None:
    for key, fault_of in wanted.items():
        fault = fault_of(entry[key]) if key in entry else "is missing"
        if fault:
            raise ValueError(f"{place}{key} {fault}" + (f", not {_short(entry[key])}" if key in entry else ""))


def _check_event(event: dict[str, Any], facts: dict[str, Any]) -> None:
    _check(event, ph=lambda value: "" if value in ("X", "b", "e", "i") else "must be X, b, e or i")
    phase, args = event["ph"], event.get("args", {})
    _check(event, name=_text, cat=_text, ts=_number, tid=_whole)
    if phase == "X":
        _check(event, dur=lambda value: _number(value, int(event["name"] == "step")))
    elif phase in ("b", "e"):
        _check(event, id=_whole)
    if not isinstance(args, dict):
        raise ValueError(f"args must be an object, not {_short(args)}")
    if phase == "b" or "communicator" in args:
        _check(args, "args.", variables=_text, communicator=_text)
    if phase == "b":
        _check(args, "args.", bytes=_number)
    named = list(args) if event["name"] == "payload" else [args.get("variable")] if event["name"] in PHASES else []
    for name in named:
        if not isinstance(name, str) or name not in facts["variables"]:
            raise ValueError(f"the variable {_short(name)} is none that the rank has")
    if event["name"] == "payload":
        _check(args, "args.", **dict.fromkeys(args, _number))
    elif event["name"] == "step" and phase != "X":
        raise ValueError("a step must have a duration")


def _check_facts(entry: dict[str, Any], first: bool) -> None:
    if first:
        _check(entry, rank=_whole, size=_whole, host=_text, engine=_text, offset=lambda value: _whole(value, -MOST))
        if not entry["rank"] < entry["size"] <= MOST_RANKS:
            raise ValueError(f"there is no rank {entry['rank']} of {entry['size']}")
    elif "rank" in entry:
        raise ValueError("it is of another trace")
    if "waits" in entry:
        _check(entry, waits=_text)
    for key in ("tracks", "variables"):
        if not isinstance(entry.get(key, {}), dict):
            raise ValueError(f"{key} must be an object, not {_short(entry[key])}")
    for track, name in entry.get("tracks", {}).items():
        if not (track.isdecimal() and track.isascii() and len(track) < 10) or _text(name):
            raise ValueError(f"tracks must name numbers, not {_short(track)} {_short(name)}")
    for name, variable in entry.get("variables", {}).items():
        if not isinstance(variable, dict) or _text(name):
            raise ValueError(f"variables.{_short(name)} must be an object, not {_short(variable)}")
        sizes = lambda value: "" if isinstance(value, list) and not any(map(_whole, value)) else "must be sizes"  # noqa: E731
        _check(variable, f"variables.{_short(name)}.", shape=sizes, method=_text)
