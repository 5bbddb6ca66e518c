"""Checks of the lines of a rank's trace, which may have been cut, mixed up or edited."""

import json
from collections.abc import Callable
from typing import Any

from grace.errors import ConfigError
from grace.exchange.tracing.recorder import FORMAT

MOST = 2**62
"""Largest number of nanoseconds, bytes or elements."""
MOST_RANKS = 1 << 20
"""Largest number of ranks."""
PHASES = ("compensate", "compress", "update", "decode", "sum rows", "encode", "average")
"""Names of the events of one variable."""


def entry_of(line: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the event or the facts in a line.

    Args:
        line: the line of the file.
        facts: the facts in the lines before it; empty for the first line.

    Raises:
        ValueError: the line is damaged; the message names the fault.

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


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _check_number(value: object, low: float = 0) -> str:
    """Return the fault of a value that is no number of at least ``low``; empty if it is one."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= MOST
    return "" if number else f"must be a number from {low} on"


def _check_integer(value: object, low: float = 0) -> str:
    """Return the fault of a value that is no whole number of at least ``low``; empty if it is one."""
    return "" if isinstance(value, int) and not _check_number(value, low) else f"must be a whole number from {low} on"


def _check_sizes(value: object) -> str:
    """Return the fault of a value that is no list of sizes; empty if it is one."""
    return "" if isinstance(value, list) and not any(map(_check_integer, value)) else "must be sizes"


def _check_text(value: object) -> str:
    """Return the fault of a value that is no printable text; empty if it is one."""
    try:
        if isinstance(value, str):
            value.encode()
            return ""
    except UnicodeEncodeError:  # halves of characters, which cannot be printed
        pass
    return "must be text"


def _check(entry: dict[str, Any], place: str = "", **wanted: Callable[[object], str]) -> None:
    for key, fault_of in wanted.items():
        fault = fault_of(entry[key]) if key in entry else "is missing"
        if fault:
            raise ValueError(f"{place}{key} {fault}" + (f", not {_short(entry[key])}" if key in entry else ""))


def _check_event(event: dict[str, Any], facts: dict[str, Any]) -> None:
    _check(event, ph=lambda value: "" if value in ("X", "b", "e", "i") else "must be X, b, e or i")
    phase, args = event["ph"], event.get("args", {})
    _check(event, name=_check_text, cat=_check_text, ts=_check_number, tid=_check_integer)
    if phase == "X":
        _check(event, dur=lambda value: _check_number(value, int(event["name"] == "step")))
    elif phase in ("b", "e"):
        _check(event, id=_check_integer)
    if not isinstance(args, dict):
        raise ValueError(f"args must be an object, not {_short(args)}")
    if phase == "b" or "communicator" in args:
        _check(args, "args.", variables=_check_text, communicator=_check_text)
    if phase == "b":
        _check(args, "args.", bytes=_check_number)
    named = list(args) if event["name"] == "payload" else [args.get("variable")] if event["name"] in PHASES else []
    for name in named:
        if not isinstance(name, str) or name not in facts["variables"]:
            raise ValueError(f"the variable {_short(name)} is none that the rank has")
    if event["name"] == "payload":
        _check(args, "args.", **dict.fromkeys(args, _check_number))
    elif event["name"] == "step" and phase != "X":
        raise ValueError("a step must have a duration")


def _check_facts(entry: dict[str, Any], first: bool) -> None:
    if first:
        _check(entry, rank=_check_integer, size=_check_integer, host=_check_text, engine=_check_text)
        _check(entry, offset=lambda value: _check_integer(value, -MOST))
        if not entry["rank"] < entry["size"] <= MOST_RANKS:
            raise ValueError(f"there is no rank {entry['rank']} of {entry['size']}")
    elif "rank" in entry:
        raise ValueError("it is of another trace")
    if "waits" in entry:
        _check(entry, waits=_check_text)
    for key in ("tracks", "variables"):
        if not isinstance(entry.get(key, {}), dict):
            raise ValueError(f"{key} must be an object, not {_short(entry[key])}")
    for track, name in entry.get("tracks", {}).items():
        if not (track.isdecimal() and track.isascii() and len(track) < 10) or _check_text(name):
            raise ValueError(f"tracks must name numbers, not {_short(track)} {_short(name)}")
    for name, variable in entry.get("variables", {}).items():
        if not isinstance(variable, dict) or _check_text(name):
            raise ValueError(f"variables.{_short(name)} must be an object, not {_short(variable)}")
        _check(variable, f"variables.{_short(name)}.", shape=_check_sizes, method=_check_text)
