"""Common style of a report's figures: one look for each method, panels of one size, and their SVG."""

import contextlib
import dataclasses
import html
import io
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from xml.etree import ElementTree

from grace.bench.common.text import clean
from grace.errors import missing_extra

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#C8B900")
"""Okabe and Ito's colours, which colour-blind readers can tell apart; their yellow is darker here, for white paper."""
GREYS = ("#57606A", "#818B98", "#A2ABB5")
"""Colours of baselines."""
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES: Sequence[Any] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
INK, MUTED, GRID, PAPER = "#1F2328", "#59636E", "#DDE1E6", "#FFFFFF"
"""Colours of text and axes."""
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--card", PALETTE[0]: "--blue"}
VARIABLES |= {grey: f"--grey{i}" for i, grey in enumerate(GREYS)}
"""Colours that the style sheet replaces in dark mode."""
SIZE = 10.5
"""Default size of letters, in CSS pixels."""
WIDTH = 464
"""Width of a panel, in CSS pixels."""


@dataclasses.dataclass(frozen=True)
class Look:
    """Look of one method, everywhere in a report."""

    color: str
    marker: str = "o"
    dash: Any = "-"


@dataclasses.dataclass(frozen=True)
class Panel:
    """Drawing of a figure.

    Attributes:
        title: the difference to its neighbours, such as the bandwidth; may be empty.
        svg: an ``<svg>`` element.
        about: a description for screen readers.
    """

    title: str
    svg: str
    about: str


@dataclasses.dataclass(frozen=True)
class Figure:
    """Panels under one heading.

    Attributes:
        title: the heading, plain text.
        caption: how to read it, plain text.
        panels: at least one.
        keys: the legend of shades or lines: (name, CSS class of the swatch).
    """

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


def panel(height: int = 360, width: int = WIDTH) -> tuple[Any, Any]:
    """Return an empty figure of so many CSS pixels, and its axes.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Drawing
    except ImportError as error:
        raise missing_extra("matplotlib", "bench") from error
    drawing = Drawing(figsize=(width / 72, height / 72), dpi=72)
    FigureCanvasAgg(drawing)
    axes = drawing.add_axes((0.12, 0.15, 0.83, 0.8))
    axes.set_facecolor("none")
    axes.grid(True, which="major", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=MUTED, labelsize=11, length=0, pad=5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    return drawing, axes


def set_margins(drawing: Any, axes: Any, left: float, right: float, top: float, bottom: float) -> None:
    """Set the axes' distances from the edges, in CSS pixels."""
    width, height = 72 * drawing.get_size_inches()
    axes.set_position((left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height))


def label_axes(axes: Any, x: str, y: str = "") -> None:
    """Write the labels of the axes, units included; that of y is above the axis, where it can be read without turning
    the head."""
    axes.set_xlabel(clean(x), fontsize=11.5, color=INK, labelpad=7, parse_math=False)
    if y:
        write(axes, y, (0, 1), (4, -8), size=11.5, xycoords="figure fraction", textcoords="offset points", va="top")


def write(axes: Any, text: str, at: Any, offset: Any = None, size: float = SIZE, color: str = INK, **more: Any) -> None:
    """Write a text, never a formula, that may be outside the axes; ``more`` is passed to ``axes.annotate``."""
    axes.annotate(clean(text), at, offset, fontsize=size, color=color, parse_math=False, annotation_clip=False, **more)


@contextlib.contextmanager
def any_text() -> Iterator[None]:
    """Return a context without warnings of letters that matplotlib's own font lacks: browsers have other fonts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        yield


def svg(drawing: Any, name: str, about: str) -> str:
    """Return the figure as an element for HTML: text stays text, ids begin with ``name``, the page names colours."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}), any_text():
        drawing.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(text.getvalue())
    width, height = (round(float(size)) for size in 72 * drawing.get_size_inches())
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {
            key.rpartition("}")[2]: _shorter(value, name)
            for key, value in element.attrib.items()
            if not (key == "id" and element.tag in ("g", "svg")) and not value.startswith("rotate(-0 ")
        }
        if element.text is not None and element.tag != "text":
            element.text = None
        element.tail = None
    _unwrap(root)
    root.attrib = {"viewBox": f"0 0 {width} {height}", "role": "img", "aria-label": clean(about)}
    return ElementTree.tostring(root, encoding="unicode").replace("<g>", "\n<g>")


def _shorter(value: str, name: str) -> str:
    """Return an attribute for a page with other figures: unique ids, the page's fonts and colours, fewer digits."""
    value = re.sub(r"^(#?)((?:p|m|h|image)[0-9a-f]{8,})$", rf"\1{name}-\2", value)
    value = value.replace("url(#", f"url(#{name}-")
    value = re.sub(r" ?font-family: [^;]*;", "", value)
    value = re.sub(r"(\d+\.\d\d)\d+", r"\1", value).replace("\n", "").replace(": ", ":").replace("; ", ";")
    for color, variable in VARIABLES.items():
        value = re.sub(f"{color}(?![0-9a-f])", f"var({variable})", value, flags=re.IGNORECASE)
    return value


def _unwrap(element: Any) -> None:
    """Replace groups without attributes by their children, and remove elements that draw nothing."""
    children: list[Any] = []
    for child in element:
        _unwrap(child)
        if child.tag == "g" and not child.attrib:
            children += child
        elif child.tag not in ("metadata", "style") and (len(child) or child.tag not in ("g", "defs")):
            children.append(child)
    element[:] = children


def named(page: str) -> tuple[str, str]:
    """Return the page with a class instead of each ``style`` attribute, and the style sheet of these classes.

    The page becomes much shorter.

    >>> named('<p style="fill:none">a style="b"</p><i style="fill:none" />')
    ('<p class="k0">a style="b"</p><i class="k0" />', '.k0{fill:none}')
    """
    names: dict[str, str] = {}

    def change(tag: re.Match) -> str:
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
