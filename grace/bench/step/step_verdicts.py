"""Verdicts on the rows of a scenario of ``grace bench step``, in words: does compression pay?"""

import math
from collections.abc import Mapping

from grace.bench.common.results import Row
from grace.bench.step.step_settings import SHARDS_ALONE

LEAST_GAIN = 1.05
"""Speedup over plain averaging that a method must have to pay."""
LARGEST_SHORTFALL = 0.03
"""Part of what uncompressed training gains that a recommended method may lack."""
LONGEST_LIST = 4
PLAIN = {"torch": ("DDP", "HSDP"), "horovod": ("Horovod",)}
"""Uncompressed baselines of each engine."""


def plain_row(rows: list[Row], engine: str) -> Row | None:
    """Return the row that others are compared with: the engine's uncompressed baseline, another engine's, or Grace's
    ``none``.

    >>> plain_row([{"name": "none"}, {"name": "DDP"}], "mpi"), plain_row([{"name": "none"}], "torch")
    ({'name': 'DDP'}, {'name': 'none'})
    """
    order = [*PLAIN.get(engine, ()), "DDP", "Horovod", "none"]
    found = {row["name"]: row for row in rows}
    return next((found[name] for name in order if name in found), None)


def pays(row: Row, plain: Row) -> bool:
    """Return True if a row is clearly faster than the plain one: by 5 %, and their middle halves do not overlap.

    >>> plain = {"step_ms": 100.0, "step_low_ms": 95.0}
    >>> [pays({"step_ms": step, "step_high_ms": step + 3}, plain) for step in (50.0, 93.0, 96.0)]
    [True, False, False]
    """
    return row["step_high_ms"] < plain["step_low_ms"] and plain["step_ms"] >= LEAST_GAIN * row["step_ms"]


def verdict_text(rows: list[Row], engine: str, shortfalls: Mapping[str, float | None] | None = None) -> str:
    """Return the verdict on a scenario, in a few sentences.

    ``engine`` is that of Grace's methods. With the shortfalls of methods that were trained, the parts that they lack of
    what training gains without compression, only those that lack at most 3 % are recommended.
    """
    plain = plain_row(rows, engine)
    bound = next((row for row in rows if row["kind"] == "bound"), None)
    if rows and all(row.get("ranks") == 1 for row in rows):
        return "One rank has nobody to send to: nothing can be gained."
    if plain is None or bound is None:
        return "There is no uncompressed exchange to compare with."
    others = [row for row in rows if row is not plain and row["kind"] != "bound"]
    paying = sorted((row for row in others if row["pays"]), key=lambda row: row["step_ms"])
    slower = [row["name"] for row in others if row["step_low_ms"] > plain["step_high_ms"]]
    good = [row for row in paying if shortfalls is None or learns(row, shortfalls)]
    own = [row for row in good if row["kind"] == "grace" and row.get("method", row["name"]) != "none"]
    sentences = []
    if own:
        gain = f"{own[0]['name']} makes a step {_speedup(own[0], plain)} as fast as {plain['name']}"
        sentences.append(f"Compress: {gain} ({_ms(own[0])} instead of {_ms(plain)}).")
        if good[0] is not own[0]:
            sentences.append(f"Faster still: {', '.join(_times(row, plain) for row in good[: good.index(own[0])])}.")
        rest = good[good.index(own[0]) + 1 :]
        if rest:
            sentences.append(f"It pays too with {_listed([_times(row, plain) for row in rest])}.")
    else:
        such = "method" if len(good) == len(paying) else "method that learns as well"
        sentences.append(f"Do not compress: no {such} is clearly faster than {plain['name']} ({_ms(plain)} a step).")
        if good:
            sentences.append(f"But {', '.join(_times(row, plain) for row in good)} would be.")
    if shortfalls is not None and len(good) < len(paying):
        bad = [_fast_but(row, plain, _lacks(row, shortfalls)) for row in paying if not learns(row, shortfalls)]
        sentences.append(f"Fast, but not recommended: {', '.join(bad)}.")
    if slower:
        sentences.append(f"Slower than {plain['name']}: {_listed(slower)}.")
    most = plain["step_ms"] / bound["step_ms"]
    without = "Without an exchange between replicas" if bound["name"] == SHARDS_ALONE else "Without any communication"
    sentences.append(f"{without} it would be {most:.1f}x{'' if own else ' as fast'}.")
    return " ".join(sentences)


def learns(row: Row, shortfalls: Mapping[str, float | None]) -> bool:
    """Return True if a row's method was trained, and lacks at most 3 % of what training gains without compression."""
    lacks = _lacks(row, shortfalls)
    return lacks is not None and lacks <= LARGEST_SHORTFALL


def _lacks(row: Row, shortfalls: Mapping[str, float | None]) -> float | None:
    method = row.get("method", row["name"])
    return None if method is None else shortfalls.get(method)


def _fast_but(row: Row, plain: Row, lacks: float | None) -> str:
    """Return a row's name, its speedup, and why it is not recommended."""
    why = "not trained here" if lacks is None else "diverged"
    if lacks is not None and math.isfinite(lacks):
        why = f"lacks {100 * lacks:.0f} % of what training gains without compression"
    return f"{row['name']} ({_speedup(row, plain)}; {why})"


def _listed(names: list[str]) -> str:
    """Return the first few names as a list in words.

    >>> _listed(["a", "b", "c", "d"]), _listed(["a", "b", "c", "d", "e", "f"])
    ('a, b, c, d', 'a, b, c and 3 others')
    """
    return ", ".join(names) if len(names) <= LONGEST_LIST else f"{', '.join(names[:3])} and {len(names) - 3} others"


def _times(row: Row, plain: Row) -> str:
    return f"{row['name']} ({_speedup(row, plain)})"


def _speedup(row: Row, plain: Row) -> str:
    return f"{plain['step_ms'] / row['step_ms']:.1f}x"


def _ms(row: Row) -> str:
    return f"{row['step_ms']:.3g} ms" if row["step_ms"] < 1000 else f"{row['step_ms'] / 1000:.2f} s"
