"""Plan of ``grace plan`` as one HTML file, in the look of the benchmarks' reports."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grace.bench.common.text import digits, format_count, of_bytes
from grace.bench.report.figures import plan_figures
from grace.bench.report.figures.style import escaped
from grace.bench.report.page import document, figure_html, write
from grace.bench.report.report_tables import figure_of, table, words_of
from grace.bench.report.scaling import over_ranks, over_rates
from grace.planner.explain import Plan
from grace.planner.network import links_of
from grace.planner.problem import Problem, methods_of, short

CHOSEN = "this plan"


def write_plan(path: Path, plan: Plan, problem: Problem, about: Mapping[str, str]) -> Path:
    """Write one self-contained HTML file: the verdict, a step as a Gantt chart, other ranks and bandwidths, memory.
    ``about`` has facts about the problem, and the sources of figures."""
    return write(path, page(plan, problem, about))


def page(plan: Plan, problem: Problem, about: Mapping[str, str]) -> str:
    """Return the page as text."""
    methods = methods_of(problem.methods, problem.quality, problem.cluster.world_size, bool(problem.errors.tables))
    shown = [short(method.compressor) for method in methods]
    strategies = {CHOSEN: plan.chosen.strategy} if plan.compresses else {}
    ranks = problem.cluster.world_size
    steps = {CHOSEN: problem.predict(plan.chosen.strategy)} if plan.compresses else {}
    rates = over_rates(problem, shown, strategies)
    here = over_ranks(problem, shown, ranks=[ranks])
    links = links_of(problem.costs.network)
    now = links.bandwidth * 8 if links else None
    drawn = [
        plan_figures.gantt({"plain all-reduce": problem.predict(plan.plain.strategy), **steps}, "step"),
        plan_figures.over_ranks(over_ranks(problem, shown, strategies), ranks, "ranks"),
        plan_figures.over_rates(rates, now, "rates"),
        plan_figures.memory({**steps, **{name: line[0][1] for name, line in here.items()}}, "memory"),
    ]
    facts = "".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(text)}</dd></div>" for name, text in about.items())
    parts = [
        f'<section id="plan"><h2>{escaped("A plan" if plan.compresses else "No compression")} for {ranks} ranks</h2>',
        f'<div class="verdict">{escaped(plan.why)}</div><dl class="facts">{facts}</dl>',
        *map(figure_html, drawn[:1]),
        f"<h3>Candidates</h3>{table(_candidates(plan), CANDIDATES, {}, 'Candidates')}",
    ]
    if plan.compresses:
        parts.append(f"<h3>Variables</h3>{table([vars(row) for row in plan.rows], VARIABLES, {}, 'Variables')}")
    return document("Grace plan", ["\n".join([*parts, *map(figure_html, drawn[1:]), "</section>"])])


def _candidates(plan: Plan) -> list[dict[str, Any]]:
    plain = plan.plain.prediction.step
    return [
        {
            **vars(one.prediction),
            "name": "plain all-reduce" if one is plan.plain else one.name,
            "taken": "taken" if one is plan.chosen else "",
            "faster": plain / one.prediction.step if one.prediction.step else None,
            "error": one.share,
        }
        for one in plan.candidates
    ]


def _in_ms(seconds: float) -> str:
    return digits(1e3 * seconds)


CANDIDATES = [
    words_of("name", "plan"),
    words_of("taken", ""),
    figure_of("step", "step", "ms, expected", _in_ms),
    figure_of("faster", "speedup", "over plain"),
    figure_of("compute", "compute", "ms", _in_ms),
    figure_of("codec", "codec", "ms", _in_ms),
    figure_of("exposed", "exposed", "ms", _in_ms),
    figure_of("sent", "sent", "per rank, step", of_bytes),
    figure_of("memory", "memory", "per rank", of_bytes),
    figure_of("error", "error", "of the bound"),
]
VARIABLES = [
    words_of("variables", "variables"),
    figure_of("count", "count", show=format_count),
    figure_of("elements", "elements", show=format_count),
    words_of("method", "method"),
    words_of("sync", "sync"),
    figure_of("share", "error", "of the bound"),
    words_of("why", "why"),
]
