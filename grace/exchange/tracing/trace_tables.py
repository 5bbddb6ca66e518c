"""The tables of ``grace trace``."""

import math
import re

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from grace.exchange.tracing.summary import PHASES, Summary


def tables(summary: Summary, top: int) -> Group:
    """Return the tables to print: the parts of a step's time, and the ``top`` most expensive variables and buckets."""
    steps = f"{summary.steps} step{'s' if summary.steps > 1 else ''}"
    ranks = f"{summary.ranks} rank{'s' if summary.ranks > 1 else ''}"
    found: list[Table | str] = [f"Milliseconds per step, on average over {steps} of {ranks}.", ""]
    found.append(_variables(summary, top))
    if len(summary.variables) > top:
        left = summary.variables[top:]
        found.append(f"{len(left)} more variables: {_ms(sum(cost.total for cost in left))} ms\n")
    found.append(_buckets(summary, top))
    if len(summary.buckets) > top:
        left_buckets = summary.buckets[top:]
        found.append(
            f"{len(left_buckets)} more buckets: waited {_ms(sum(bucket.waited for bucket in left_buckets))} ms\n"
        )
    found += [_step_table(summary), escape(summary.sentence())]
    return Group(*found)


def _table(*columns: tuple[str, bool]) -> Table:
    """Return an empty table.

    Args:
        columns: the header of each column, and True if it holds numbers.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for header, numbers in columns:
        table.add_column(header, justify="right" if numbers else "left", no_wrap=numbers, overflow="fold")
    return table


def _variables(summary: Summary, top: int) -> Table:
    phases = [("compen-\nsate", True), ("com-\npress", True), ("up-\ndate", True), ("de-\ncode", True)]
    table = _table(
        ("variable", False),
        ("size", True),
        ("method", False),
        ("calls", True),
        *phases,
        ("bytes", True),
    )
    for cost in summary.variables[:top]:
        times = [_ms(cost.ms[phase]) for phase in PHASES]
        size, calls = _si(math.prod(cost.shape)), f"{cost.calls:.3g}"
        table.add_row(escape(cost.name), size, escape(_names(cost.method)), calls, *times, _si(cost.nbytes))
    return table


def _buckets(summary: Summary, top: int) -> Table:
    table = _table(
        ("bucket", False),
        ("carried by", False),
        ("collec-\ntives", True),
        ("bytes", True),
        ("pack,\nunpack", True),
        ("under\nway", True),
        ("waited\nfor", True),
    )
    for bucket in summary.buckets[:top]:
        waited = "?" if summary.waits else _ms(bucket.waited)
        numbers = [f"{bucket.collectives:.3g}", _si(bucket.nbytes), _ms(bucket.packing), _ms(bucket.under_way), waited]
        table.add_row(escape(bucket.variables), escape(bucket.communicator), *numbers)
    return table


def _step_table(summary: Summary) -> Table:
    table = _table(("a step", False), ("ms", True), ("share", True))
    for part, ms in sorted(summary.parts.items(), key=lambda part: -part[1]):
        table.add_row(escape(summary.descriptions[part]), _ms(ms), f"{100 * ms / summary.step:.0f} %")
    table.add_section()
    table.add_row("the step", _ms(summary.step), "100 %")
    table.add_row("(collectives under way)", _ms(summary.under_way), f"{100 * summary.under_way / summary.step:.0f} %")
    return table


def _names(spec: str) -> str:
    """Return a spec without its parameters.

    >>> _names("topk(ratio=0.1) | qsgd(levels=7)")
    'topk | qsgd'
    """
    return re.sub(r"\([^()]*\)", "", spec)


def _ms(milliseconds: float) -> str:
    """Return milliseconds as text with three significant digits.

    >>> _ms(0.01234), _ms(1.234), _ms(12.34), _ms(1234.5)
    ('0.012', '1.23', '12.3', '1234')
    """
    digits = next((n for n, limit in ((3, 0.9995), (2, 9.995), (1, 99.95)) if milliseconds < limit), 0)
    return f"{milliseconds:.{digits}f}"


def _si(number: float) -> str:
    """Return a number as text with three significant digits and an SI prefix.

    >>> _si(0), _si(999), _si(2_359_296), _si(14_200)
    ('0', '999', '2.36M', '14.2k')
    """
    power = next((n for n, limit in enumerate((999.5, 999.5e3, 999.5e6)) if number < limit), 3)
    return f"{number / 1000**power:.3g}{['', 'k', 'M', 'G'][power]}"
