"""Figures of step times: where a step's time goes, speedup against bandwidth, throughput against ranks."""

from collections.abc import Mapping
from typing import Any

from grace.bench.common.text import digits, number, of_ranks, of_rate
from grace.bench.report.figures.bars import REST, Bar, Mark, bars_panel, outliers
from grace.bench.report.figures.lines import Points, describe, lines, rank_ticks
from grace.bench.report.figures.style import DASHED, INK, MUTED, Figure, Look, Panel, write
from grace.bench.report.rows import Rows, cases, identity, one_bound, plain

KEYS = (
    ("compute", "rest"),
    ("codec (Grace's encoding and decoding)", "full"),
    ("communication that nothing hides; for baselines with their codec", "half"),
)
CLIP = 2.5
"""Multiple of the slowest baseline at which bars are cut."""
GROUPS = {"bound": 0, "baseline": 0}
"""Groups of bars: baselines and the bound stand above the methods."""


def figures(rows: Rows, looks: Mapping[str, Look], name: str) -> list[Figure]:
    """Return all figures that the rows allow; ``name`` is the prefix of their elements' ids."""
    rows = one_bound([row for row in rows if number(row.get("step_ms"))])
    found = [draw(rows, looks, name) for draw in (_time, _bandwidths, _ranks)]
    return [figure for figure in found if figure.panels]


def _time(rows: Rows, looks: Mapping[str, Look], name: str) -> Figure:
    found = cases(rows, "ranks", "bandwidth")
    panels = []
    for i, ((ranks, rate), some) in enumerate(found.items()):
        title = f"{of_ranks(ranks)}, {of_rate(rate)}"
        some = sorted(some, key=lambda row: (GROUPS.get(row["kind"], 1), row["kind"] == "bound", row["step_ms"]))
        bars = [_bar(row, looks) for row in some]
        reference = plain(some)
        bound = next((row for row in some if row["kind"] == "bound"), None)
        marks: list[Mark] = [(bound["name"], bound["step_ms"], ":")] if bound else []
        marks += [(reference["name"], reference["step_ms"], DASHED)] if reference else []
        ends = [CLIP * max((row["step_ms"] for row in some if row["kind"] != "grace"), default=0)]
        ends += [outliers([row["step_ms"] for row in some])]
        clip, what = min((end for end in ends if end), default=0.0), f"the time of a step, {title}"
        form: dict[str, Any] = {"marks": marks, "clip": clip}
        panels.append(bars_panel(title, bars, "time of a step (ms)", f"{name}-time{i}", what, " ms", **form))
    caption = (
        "One bar is the median time of a step; its whisker spans the quartiles. Baselines and the bound stand above, "
        "Grace's methods below, the fastest first. A method pays where its bar ends left of the dashed line, plain "
        "training's time; nothing can end left of the dotted line, the time of the same step without any "
        "communication. The panels' scales differ; bars far beyond the others, or the slowest baseline, are cut where "
        "a gap is, and the number at the end counts."
    )
    return Figure("Where the time of a step goes", caption, panels, KEYS)


def _bar(row: Mapping[str, Any], looks: Mapping[str, Look]) -> Bar:
    compute, codec, exposed = (number(row.get(key)) for key in ("compute_ms", "codec_ms", "exposed_ms"))
    total = row["step_ms"]
    parts: list[tuple[float, str]] = [(total, "half")]
    if compute is not None and exposed is not None:
        parts = [(max(0.0, compute), REST), (max(0.0, codec or 0), "full"), (max(0.0, exposed), "half")]
    low, high = number(row.get("step_low_ms")), number(row.get("step_high_ms"))
    return Bar(row["name"], parts, digits(total), looks[identity(row)], low, high, GROUPS.get(row["kind"], 1))


def _bandwidths(rows: Rows, looks: Mapping[str, Look], name: str) -> Figure:
    panels = []
    for i, ((ranks,), some) in enumerate(cases(rows, "ranks").items()):
        rates = [rate for (rate,) in cases(some, "bandwidth")]
        if len(rates) < 2:
            continue
        series = _series([{**row, "place": rates.index(row["bandwidth"])} for row in some], "place", "speedup")
        x = "bandwidth of the emulated link (log scale)"
        drawing, axes = lines(series, looks, x, "speedup over plain training", include=[1.0])
        axes.set_xticks(range(len(rates)), [of_rate(rate).replace("no emulated ", "no ") for rate in rates])
        axes.axhline(1, color=INK, linewidth=1, linestyle=DASHED, zorder=1)
        title = of_ranks(ranks)
        points = describe(series, dict(enumerate(map(of_rate, rates))))
        about = f"Lines of the speedup against the bandwidth, {title}: {points}"
        panels.append(Panel.of(title, drawing, f"{name}-bandwidth{i}", about))
    caption = (
        "Plain training's time of a step, divided by the method's. Above the dashed line the method makes a step "
        "faster, below it slower. Grey lines are baselines, and the bound that no method can exceed."
    )
    return Figure("Speedup against bandwidth", caption, panels)


def _ranks(rows: Rows, looks: Mapping[str, Look], name: str) -> Figure:
    panels = []
    for i, ((rate,), some) in enumerate(cases(rows, "bandwidth").items()):
        counts = sorted({row["ranks"] for row in some})
        if len(counts) < 2:
            continue
        series = _series(some, "ranks", "samples_per_s")
        first = [row for row in some if row["ranks"] == counts[0]]
        start = next((row for row in first if row["kind"] == "bound"), None) or plain(first)
        speed = None if start is None else number(start.get("samples_per_s"))
        ideal = [speed * count / counts[0] for count in counts] if speed else []
        y = "samples per second, all ranks together (log scale)"
        drawing, axes = lines(series, looks, "ranks (log scale)", y, include=ideal)
        rank_ticks(axes, counts)
        if ideal:
            axes.plot(counts, ideal, color=INK, linewidth=1.1, linestyle=":", zorder=1)
            write(axes, "ideal", (counts[-1], ideal[-1]), (-6, 4), color=MUTED, textcoords="offset points", ha="right")
        title = of_rate(rate)
        points = describe(series, {count: of_ranks(count) for count in counts})
        about = f"Lines of samples per second against ranks, {title}: {points}"
        panels.append(Panel.of(title, drawing, f"{name}-ranks{i}", about))
    caption = (
        "Every rank has a batch of its own, so twice the ranks are at best twice the samples per second: the dotted "
        "line, which starts at the fewest ranks without communication (or, where that was not measured, with plain "
        "training). The further a line falls below it, the more the ranks wait for each other."
    )
    return Figure("Throughput against the number of ranks", caption, panels)


def _series(rows: Rows, x: str, y: str) -> dict[str, Points]:
    """Return points, of the values under two keys, by the rows' names."""
    found: dict[str, list[tuple[Any, float | None]]] = {}
    for row in rows:
        found.setdefault(identity(row), []).append((row[x], number(row.get(y))))
    return dict(found)
