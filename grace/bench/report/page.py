"""Results as one HTML file: facts of the machine, the command's own tables, and figures; it opens without a network."""

import html
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from grace.bench.common.results import Results
from grace.bench.common.text import clean, of_bytes, of_seconds
from grace.bench.report.figures import Figure, Look, figures, looks_of
from grace.bench.report.rows import identity
from grace.bench.report.tables import SHOW
from grace.core.atomic_files import atomic_write
from grace.core.version import __version__
from grace.errors import ConfigError

HEADINGS = {
    "step": "Step time",
    "train": "Training",
    "kernels": "Compressors alone",
}
WIDTH = 150
"""Characters of a line of tables."""
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>
body {{ max-width: 1280px; margin: 0 auto; padding: 16px; font: 16px/1.5 sans-serif; overflow-wrap: break-word; }}
pre {{ overflow-x: auto; font: 13px/1.3 monospace; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 4px 16px; }}
dd, figure {{ margin: 0; min-width: 0; }}
figure {{ overflow-x: auto; }}
figcaption {{ max-width: 90ch; }}
footer, dt {{ color: #59636e; }}
</style>
</head>
<body>
<h1>{title}</h1>
{sections}
<footer>Written by Grace {version}.</footer>
</body>
</html>
"""


def write_report(path: Path, results: Sequence[Results]) -> Path:
    """Write one self-contained HTML file. Each of the results, at least one, becomes a section."""
    if not results:
        raise ConfigError("a report needs results of at least one benchmark")
    return write_page(path, "Grace benchmark report", report_sections(results))


def report_sections(results: Sequence[Results]) -> list[str]:
    """Return the section of each of the results; a method has the same colour in all of them."""
    looks = methods_looks(results)
    return [_section(each, looks) for each in results]


def methods_looks(results: Sequence[Results]) -> dict[str, Look]:
    """Return the look of every method and baseline of these results."""
    rows = [row for each in results for row in each.rows]
    return looks_of(map(identity, rows), [identity(row) for row in rows if row.get("kind") in ("baseline", "bound")])


def _section(results: Results, looks: Mapping[str, Look]) -> str:
    settings, machine = results.settings, results.machine
    subject = settings.get("model") or settings.get("task") or settings.get("device")
    title = HEADINGS[results.kind] + (f": {subject}" if subject else "")
    computer = [machine.get("processor"), f"{machine.get('cores', '?')} cores", *(machine.get("gpus") or [])]
    computer += [of_bytes(machine["memory_bytes"])] if machine.get("memory_bytes") else []
    incomplete = "" if results.complete else "; incomplete: interrupted"
    facts = {
        "measured": f"{results.when}, took {of_seconds(results.seconds)}{incomplete}",
        "machine": ", ".join(str(part) for part in computer if part),
        "system": str(machine.get("platform") or ""),
        "versions": ", ".join(f"{package} {version}" for package, version in results.versions.items()),
        "settings": ", ".join(f"{key} {value}" for key, value in settings.items() if _simple(value)),
        "command": results.command,
    }
    return section(
        title, facts, recorded(lambda console: SHOW[results.kind](console, results)), figures(results, looks)
    )


def _simple(value: object) -> bool:
    """Return True if a setting says something in a few words."""
    return value not in (None, "", [], {}) and isinstance(value, str | int | float | list) and len(str(value)) < 100


def recorded(show: Callable[[Console], None]) -> str:
    """Return what a function prints on a console, as HTML."""
    console = Console(record=True, file=io.StringIO(), width=WIDTH, highlight=False)
    show(console)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def section(title: str, facts: Mapping[str, str], output: str, drawn: Sequence[Figure] = ()) -> str:
    """Return a section of a page: a heading, facts, tables in HTML, and figures."""
    told = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(clean(text))}</dd>" for name, text in facts.items() if text
    )
    shown = "\n".join(figure.html() for figure in drawn)
    return f"<section><h2>{html.escape(clean(title))}</h2>\n<dl>{told}</dl>\n{output}\n{shown}</section>"


def write_page(path: Path, title: str, sections: Sequence[str]) -> Path:
    """Write a page of sections atomically; its folder is made. A ConfigError says why it cannot be written."""
    text = PAGE.format(title=html.escape(title), sections="\n".join(sections), version=html.escape(__version__))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as draft:
            # surrogates of a results file are no UTF-8, and control characters no HTML
            draft.write_text("".join(c for c in text if c.isprintable() or c == "\n"), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    return path
