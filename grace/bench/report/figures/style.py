"""Common style of a report's figures: one look for each method, panels of one size, and their SVG."""

import dataclasses
import html
import io
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from grace.bench.common.text import clean, digits, short
from grace.errors import missing_extra

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Drawing
    from matplotlib.text import Text
    from matplotlib.ticker import LogLocator, NullLocator
except ImportError as error:
    raise missing_extra("matplotlib", "bench") from error

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#C8B900")
"""Okabe and Ito's colours, which colour-blind readers can tell apart; their yellow is darker here, for white paper."""
GREYS = ("#57606A", "#818B98", "#A2ABB5")
"""Colours of baselines."""
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES: Sequence[Any] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
DASHED = (0, (4, 2))
"""Line style of what others are compared with."""
INK, MUTED, GRID, PAPER = "#1F2328", "#59636E", "#DDE1E6", "#FFFFFF"
"""Colours of text and axes."""
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--card", PALETTE[0]: "--blue"}
VARIABLES |= {grey: f"--grey{i}" for i, grey in enumerate(GREYS)}
"""Colours that the style sheet replaces in dark mode."""
REPLACED = re.compile(f"({'|'.join(VARIABLES)})(?![0-9a-f])", re.IGNORECASE)
WIDTH = 400
"""Width of a panel, in CSS pixels."""
LABEL = 70
"""Characters of the longest label of an axis."""
SMALLEST = 0.85
"""Factor below which a figure is not scaled down, so that its letters stay readable; on a narrow screen it scrolls."""
LEGEND_ROW = 16
"""CSS pixels of a row of a legend."""
STYLE: dict[Any, Any] = {"axes.grid": True, "axes.axisbelow": True, "axes.facecolor": "none", "axes.edgecolor": GRID}
STYLE |= {"axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False, "grid.color": GRID}
STYLE |= {"font.sans-serif": ["DejaVu Sans"], "svg.fonttype": "none", "figure.facecolor": "none"}
"""Differences to matplotlib's own style."""
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@dataclasses.dataclass(frozen=True)
class Look:
    """Look of one method, everywhere in a report."""

    color: str
    marker: str = "o"
    dash: Any = "-"


@dataclasses.dataclass(frozen=True)
class Panel:
    """Drawing of a figure: its title, which may be empty, its ``<svg>`` element, and its words for screen readers."""

    title: str
    svg: str
    about: str

    @classmethod
    def of(cls, title: str, drawing: Drawing, name: str, about: str) -> "Panel":
        """Return the panel of a drawing; its ids are made from ``name``."""
        return cls(title, svg(drawing, name, about), about)


@dataclasses.dataclass(frozen=True)
class Figure:
    """Panels under one heading, how to read them, and the legend of shades or lines: (name, CSS class of a swatch)."""

    title: str
    caption: str
    panels: list[Panel]
    keys: tuple[tuple[str, str], ...] = ()


def looks(methods: Iterable[str], baselines: Iterable[str] = ()) -> dict[str, Look]:
    """Return one look for each name: a colour, and where there are more names than colours, another marker and dash.

    >>> found = looks(["none", "topk", "qsgd"], ["DDP"])
    >>> [found[name].color for name in ("none", "topk", "qsgd", "DDP")]
    ['#1F2328', '#0072B2', '#D55E00', '#57606A']
    >>> many = looks(f"method {i}" for i in range(20))
    >>> len(set(many.values()))
    20
    """
    found: dict[str, Look] = {}
    for colors, names in ((GREYS, baselines), (PALETTE, methods)):
        names = [name for name in dict.fromkeys(names) if name not in found]
        if "none" in names:
            found["none"] = Look(INK)
            names.remove("none")
        for i, name in enumerate(names):
            turn = i // len(colors)
            found[name] = Look(colors[i % len(colors)], MARKERS[turn % len(MARKERS)], DASHES[turn % len(DASHES)])
    return found


def panel(height: int = 360, width: int = WIDTH, names: int = 0) -> tuple[Drawing, Axes]:
    """Return an empty figure of so many CSS pixels, higher by the rows of a legend of ``names``, and its axes."""
    height += LEGEND_ROW * (1 + -(-names // 2)) if names else 0  # and its margins
    with rc_context(STYLE):
        drawing = Drawing(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
        axes = drawing.subplots()
    axes.tick_params(which="both", colors=MUTED, labelsize=11, length=0, pad=5)
    return drawing, axes


def set_margins(drawing: Drawing, axes: Axes, left: float, right: float, top: float, bottom: float) -> None:
    """Set the axes' distances from the edges, in CSS pixels; otherwise the layout leaves room for all texts."""
    width, height = 72 * drawing.get_size_inches()
    axes.set_position((left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height))


def label_axes(axes: Axes, x: str, y: str = "") -> None:
    """Write the labels of the axes, units included; that of y is above the axis, where it is read without turning the
    head."""
    axes.set_xlabel(short(x, LABEL), fontsize=11.5, color=INK, labelpad=7)
    if y:
        axes.set_title(short(y, LABEL), loc="left", fontsize=11.5, color=INK)


def legend(drawing: Drawing, axes: Axes, place: Any = "outside lower left") -> None:
    """Write the labels of lines and points outside the axes, in two columns."""
    handles, labels = axes.get_legend_handles_labels()
    drawing.legend(handles, labels, loc=place, ncols=2, fontsize=11, labelcolor=INK, frameon=False)


def plain_ticks(axes: Axes) -> None:
    """Write few ticks of a linear x axis, as plain numbers."""
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")


def log_scale(axes: Axes, which: str, low: float, high: float, show: Callable[[float], str] | None = None) -> None:
    """Make the axis ``which`` logarithmic from ``low`` to ``high``, and write its ticks by ``show``."""
    axes.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
    axis = axes.xaxis if which == "x" else axes.yaxis
    # In few decades their beginnings are too few ticks.
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 50 * low else (1.0,), numticks=12))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: show(value) if show else digits(value, 1))


def write(axes: Axes, text: str, at: Any, offset: Any = None, size: float = 11, color: str = INK, **more: Any) -> None:
    """Write a text that may be outside the axes; ``more`` is passed to ``axes.annotate``."""
    axes.annotate(clean(text), at, offset, fontsize=size, color=color, annotation_clip=False, **more)


def svg(drawing: Drawing, name: str, about: str) -> str:
    """Return the figure as an element for HTML: text stays text, ids depend on ``name``, the page names colours."""
    for text in drawing.findobj(Text):
        text.set_parse_math(False)  # names of methods are never formulas
    file = io.StringIO()
    with rc_context({**STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
        # Browsers have fonts with the letters that matplotlib's own one lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        # Not savefig, which draws twice: first to lay out.
        FigureCanvasSVG(drawing).print_svg(file, metadata=NO_METADATA)
    body = file.getvalue().partition("<svg")[2].partition(">")[2]
    width, height = 72 * drawing.get_size_inches()
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" style="min-width: {SMALLEST * width:.0f}px"'
    head = f'<svg {size} role="img" aria-label="{escaped(about)}">'
    return head + re.sub(r"<[^>]*>", _tag_for_page, body)


def _tag_for_page(tag: re.Match[str]) -> str:
    """Return an SVG tag for a page: no ids that all figures have, the page's colours, fewer digits."""
    text = re.sub(r'<g id="[^"]*"', "<g", tag[0]).replace("xlink:href", "href").replace("\n", "")
    text = re.sub(r"(\d+\.\d\d)\d+", r"\1", text)
    return REPLACED.sub(lambda color: f"var({VARIABLES[color[0].upper()]})", text)


def named(page: str) -> tuple[str, str]:
    """Return the page, which becomes much shorter, with a class instead of each ``style``, and these classes' style
    sheet.

    >>> named('<p style="fill:none">a style="b"</p><i style="fill:none" />')
    ('<p class="k0">a style="b"</p><i class="k0" />', '.k0{fill:none}')
    """
    names: dict[str, str] = {}

    def change(tag: re.Match[str]) -> str:
        return re.sub(r' style="([^"]*)"', lambda style: f' class="{name(style[1])}"', tag[0])

    def name(style: str) -> str:
        return names.setdefault(style, f"k{len(names)}")

    page = re.sub(r"<[^>]*>", change, page)
    return page, "\n".join(f".{name}{{{style}}}" for style, name in names.items())


def themed(color: str) -> str:
    """Return the colour for a style sheet.

    >>> themed(INK), themed(PALETTE[1])
    ('var(--ink)', '#D55E00')
    """
    return f"var({VARIABLES[color]})" if color in VARIABLES else color


def escaped(text: str) -> str:
    """Return a text for HTML, also for attributes."""
    return html.escape(clean(text), quote=True)
