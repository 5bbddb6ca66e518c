"""A plan as tables, for people."""

from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grace.bench.common.text import digits, of_bytes
from grace.cli.consoles import plain_table
from grace.planner.explain import Plan


def show(plan: Plan, about: Mapping[str, str], console: Console) -> None:
    """Print one.

    Args:
        plan: it.
        about: what was planned, and where figures come from.
        console: where.
    """
    for what, said in about.items():
        console.print(f"{what + ':':<9}{escape(said)}", soft_wrap=True, style="dim")
    console.print()
    console.print(_candidates(plan))
    console.print(
        "ms of a step as expected; exposed: communication that the step waits for; sent: by the rank that sends most;\n"
        "memory: of exchanges, on a rank; error: largest part of a variable's bound (matrices: the error of "
        f"{escape(plan.reference)}), at most 1; quality: {plan.quality}",
        style="dim",
        soft_wrap=True,
    )
    if plan.compresses:
        console.print()
        console.print(_variables(plan))
    console.print()
    console.print(escape(plan.why), style="bold", soft_wrap=True)


def _candidates(plan: Plan) -> Table:
    numbers = ("step", "x plain", "compute", "codec", "exposed", "sent", "memory", "error")
    table = plain_table(["", "plan", *numbers], ("", "plan"))
    plain = plan.plain.prediction.step
    for one in plan.candidates:
        p, taken = one.prediction, one is plan.chosen
        shown = [digits(round(1e3 * seconds, 6)) for seconds in (p.compute, p.codec, p.exposed)]
        faster = f"{plain / p.step:.2f}" if p.step > 0 else ""
        name = escape("plain all-reduce" if one is plan.plain else one.name)
        row = [name, digits(1e3 * p.step), faster, *shown, of_bytes(p.sent), of_bytes(p.memory), digits(one.share, 2)]
        table.add_row("*" if taken else "", *row, style="bold" if taken else "")
    return table


def _variables(plan: Plan) -> Table:
    headings = ("variables", "", "elements", "method", "sync", "error", "why")
    table = plain_table(headings, {"variables", "method", "sync", "why"})
    for row in plan.rows:
        cells = (row.variables, f"x{row.count}", f"{row.elements:,}", row.method, row.sync)
        table.add_row(*map(escape, cells), digits(row.share, 2), escape(row.why))
    return table
