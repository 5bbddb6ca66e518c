"""Results as one HTML file: figures, tables, and facts of the machine; it opens without a network."""

import string
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from grace.bench.common.results import Results
from grace.bench.common.text import clean, digits, format_count, number, of_bytes, of_ranks, of_rate, of_seconds
from grace.bench.report.figures import kernels_figures, step_figures, train_figures
from grace.bench.report.figures.style import Figure, Look, escaped, looks, named
from grace.bench.report.report_tables import KERNELS, step_columns, step_rows, table, train_columns
from grace.bench.report.rows import Row, identity
from grace.bench.report.words import verdict
from grace.core.atomic_files import atomic_write
from grace.core.quantities import parse_rate
from grace.core.version import __version__
from grace.errors import ConfigError

HEADINGS = {"step": "Step time", "train": "Training", "kernels": "Compressors alone"}
NEEDED = {
    "step": ("name", "kind", "engine", "ranks", "bandwidth", "step_ms"),
    "train": ("method", "bandwidth", "quality"),
    "kernels": ("method", "tensor"),
}
"""Keys of every row of a kind."""
SIZES = {"parameters": "{} parameters", "elements": "tensors of {} elements"}
NAMES = {"about": "{}", "engine": "engine {}", "framework": "{}", "device": "on {}", "optimizer": "{}"}
"""Settings that the sentence about a benchmark names, and how."""


def write_report(path: Path, results: Sequence[Results]) -> Path:
    """Write one self-contained HTML file: styles, script and figures (SVG) are in it, and nothing is loaded.

    Each of the results, at least one, becomes a section; a method has the same colour in all of them.

    Raises:
        ConfigError: a row lacks keys that identify it, or the file cannot be written.
    """
    if not results:
        raise ConfigError("a report needs results of at least one benchmark")
    try:
        return write(path, page(results))
    except (TypeError, KeyError, IndexError, AttributeError, ArithmeticError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        kinds = ", ".join(each.kind for each in results)
        raise ConfigError(f"the results ({kinds}) hold values that cannot be shown: {error!r}") from error


def write(path: Path, text: str) -> Path:
    """Write a file atomically; its folder is made if need be. A ConfigError says why it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as draft:
            draft.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def page(results: Sequence[Results]) -> str:
    """Return the report as HTML."""
    for each in results:
        each.require_keys(NEEDED[each.kind])
    seen, titles = methods_looks(results), headings(results)
    sections = [_section(each, titles[i], seen, f"s{i}") for i, each in enumerate(results)]
    links = "".join(f'<a href="#s{i}">{escaped(title)}</a>' for i, title in enumerate(titles))
    contents = f'<nav aria-label="Contents">{links}</nav>' if len(results) > 1 else ""
    return document("Grace benchmark report", sections, contents)


def document(title: str, sections: Sequence[str], contents: str = "") -> str:
    """Return a page in the look of all reports: the HTML of the contents, and then ``<section>`` elements."""
    template = string.Template(files("grace.bench.report").joinpath("report.html").read_text(encoding="utf-8"))
    text, styles = named("\n".join(sections))
    footer = f"Written by Grace {escaped(__version__)}. A click on the name of a table's column sorts it."
    return template.substitute(styles=styles, title=title, contents=contents, sections=text, footer=footer)


def methods_looks(results: Sequence[Results]) -> dict[str, Look]:
    """Return the look of every method and baseline of these results."""
    rows = [row for each in results for row in each.rows]
    baselines = [identity(row) for row in rows if row.get("kind") in ("baseline", "bound")]
    return looks([identity(row) for row in rows], baselines)


def headings(results: Sequence[Results]) -> list[str]:
    """Return a heading for each of the results, of what was measured; equal ones are numbered.

    >>> headings([Results("step", {"model": name}) for name in ("mlp", "gpt2", "mlp")])
    ['Step time: mlp (1)', 'Step time: gpt2', 'Step time: mlp (2)']
    >>> headings([Results("train", {"task": "digits"})])
    ['Training: digits']
    """
    found = []
    for each in results:
        subject = each.settings.get("model") or each.settings.get("task") or each.settings.get("device")
        found.append(HEADINGS[each.kind] + (f": {clean(subject)}" if subject else ""))
    return [
        f"{title} ({found[: i + 1].count(title)})" if found.count(title) > 1 else title for i, title in enumerate(found)
    ]


def _section(results: Results, title: str, seen: dict[str, Look], name: str) -> str:
    rows, settings = results.rows, results.settings
    shown: Sequence[Row] = rows
    if results.kind == "step":
        drawn, columns, shown = step_figures.figures(rows, seen, name), step_columns(rows), step_rows(rows)
    elif results.kind == "train":
        drawn, columns = train_figures.figures(rows, settings, seen, name), train_columns(settings)
    else:
        drawn, columns = kernels_figures.figures(rows, seen, name), KERNELS
    parts = [f'<section id="{name}"><h2>{escaped(title)}</h2>', f'<p class="about">{_about(results)}</p>']
    if not results.complete:
        parts.append('<p class="warn">Incomplete: interrupted. Only what was measured until then is here.</p>')
    parts += [_verdict(results), _facts(results), *map(figure_html, drawn)]
    if rows:
        parts.append(f"<h3>All figures as a table</h3>{table(shown, columns, seen, title)}")
    return "\n".join([*filter(None, parts), "</section>"])


def _about(results: Results) -> str:
    """Return a sentence about the benchmark's settings."""
    settings = results.settings
    phrases = [
        template.format(format_count(settings[key])) for key, template in SIZES.items() if number(settings.get(key))
    ]
    phrases += [template.format(clean(settings[key])) for key, template in NAMES.items() if settings.get(key)]
    ranks = settings.get("ranks")
    if ranks:
        counts = ranks if isinstance(ranks, list) else [ranks]
        phrases.append(" and ".join([*map(format_count, counts[:-1]), of_ranks(counts[-1])]))
    if number(settings.get("batch")):
        phrases.append(f"{format_count(settings['batch'])} samples per rank and step")
    for unit in ("epochs", "rounds", "threads", "repeats"):
        if number(settings.get(unit)):
            phrases.append(f"{format_count(settings[unit])} {unit.removesuffix('s') if settings[unit] == 1 else unit}")
    if settings.get("seeds"):
        seeds = settings["seeds"]
        phrases.append(f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}")
    if results.kind == "kernels" and number(settings.get("copy_gbps")):
        phrases.append(f"one copy at {digits(settings['copy_gbps'])} GB/s")
    if settings.get("bandwidths"):
        phrases.append(", ".join(of_rate(rate) for rate in settings["bandwidths"]))
    return escaped(", ".join(phrases)) + ("." if phrases else "")


def _verdict(results: Results) -> str:
    verdicts = verdict(results)
    lines = "".join(f"<dt>{escaped(_rate(key))}</dt><dd>{escaped(words)}</dd>" for key, words in verdicts.items())
    inside = escaped(verdicts[""]) if set(verdicts) == {""} else f"<dl>{lines}</dl>"
    return f'<div class="verdict">{inside}</div>' if verdicts else ""


def _rate(key: str) -> str:
    """Format a bandwidth as figures do; other texts are returned as they are."""
    try:
        return of_rate(parse_rate(key))
    except ConfigError:
        return key


def _facts(results: Results) -> str:
    machine, memory = results.machine, results.machine.get("memory_bytes")
    computer = [clean(machine.get("processor") or ""), f"{machine.get('cores', '?')} cores"]
    computer += [of_bytes(memory) if number(memory) else "", *map(clean, machine.get("gpus") or [])]
    facts = {
        "measured": f"{results.when.replace('T', ' ').replace('Z', ' UTC')}, took {of_seconds(results.seconds)}",
        "machine": ", ".join(filter(None, computer)),
        "system": str(machine.get("platform") or ""),
        "versions": ", ".join(f"{package} {version}" for package, version in results.versions.items()),
    }
    cells = "".join(f"<div><dt>{name}</dt><dd>{escaped(text)}</dd></div>" for name, text in facts.items() if text)
    if results.command:
        cells += f'<div class="wide"><dt>command</dt><dd><code>{escaped(results.command)}</code></dd></div>'
    return f'<dl class="facts">{cells}</dl>'


def figure_html(figure: Figure, wide: bool = False) -> str:
    """Return the HTML of a figure: heading, caption and panels; a wide one takes the page's whole width."""
    keys = "".join(f'<li><i class="{css}"></i>{escaped(name)}</li>' for name, css in figure.keys)
    panels = "".join(
        f'<div class="panel">{f"<h4>{escaped(panel.title)}</h4>" if panel.title else ""}<div class="drawing">'
        f"{panel.svg}</div></div>"
        for panel in figure.panels
    )
    return (
        f'<h3>{escaped(figure.title)}</h3><figure><figcaption class="caption">{escaped(figure.caption)}</figcaption>'
        + (f'<ul class="keys">{keys}</ul>' if keys else "")
        + f'<div class="panels{" wide" if wide else ""}">{panels}</div></figure>'
    )
