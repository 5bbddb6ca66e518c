"""``grace list`` and ``grace describe``: what there is, read from the components themselves."""

import dataclasses
import inspect
import math
import textwrap
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from grace.communicators.choice import break_even
from grace.core import specs
from grace.core.composition import Composed
from grace.core.registry import KINDS, aliases, known, legal_communicators, make, unusable
from grace.core.schema_words import hint
from grace.errors import ConfigError

LIST_SHAPE = (1000, 1000)
DESCRIBE_SHAPES = ((1000, 1000), (512, 64), (64, 3, 7, 7), (10, 512), (512,))
SIZES = {
    "by shape": "payload size by shape: the same on every rank and at every step",
    "by shape and step": "payload size by shape and step: the same on every rank, and another until the warm-up ends",
    "by data": "payload size by data: it differs by rank, so sizes travel first",
    None: "payload size unknown: ranks compare sizes at the first step",
}
CLOSE = 0.03
"""The relative loss beyond uncompressed training's up to which a method counts as close to it."""
TRAINED = "Held-out loss of a character GPT, against uncompressed training"
Row = tuple[list[str], str]
"""Cells of a table, and the explanation below them."""


def list_components(
    long: Annotated[bool, typer.Option("--long", "-l", help="All traits, parameters and costs.")] = False,
) -> None:
    """List all compressors, memories, communicators, strategy builders and rules.

    Everything shown is read from the components' own traits, those of other installed packages included.
    """
    console = Console(highlight=False)
    if long:
        _list_all(console)
    else:
        _list_short(console)
    wrong = [str(why) for kind in KINDS for why in unusable(kind).values()]
    if wrong:
        _section(console, "Not usable", wrong)
    console.print("More about one of them: grace describe NAME" + ("" if long else "; about all: grace list --long"))


def _list_short(console: Console) -> None:
    """Print a table for each kind, a line for each component; on a terminal what does not fit goes on below."""
    usual = {name: "?" if _needs_parameters(name) else _default(name) for name in known("compressor")}
    for kind in KINDS:
        rows = [(name, usual.get(name, "")) if kind == "compressor" else (name,) for name in known(kind)]
        notes = [_summary(cls) for cls in known(kind).values()]
        if kind == "compressor":
            for alias, spec in aliases(kind).items():
                rows.append((alias, _default(alias)))
                notes.append(f"Short for {_text(spec)}.")
        header = (kind, "communicator")[: len(rows[0])]
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        console.print("  ".join([*map(str.ljust, header, widths), "what it is"]), style="bold underline")
        for cells, note in zip(rows, notes, strict=True):
            start = "  ".join(map(str.ljust, cells, widths)) + "  "
            line = start + note
            if console.is_terminal:
                line = textwrap.fill(line, console.width, subsequent_indent=" " * len(start), drop_whitespace=True)
            console.print(Text(line), soft_wrap=True)
        console.print()
    console.print("communicator: the default of a compressor", style="dim")


def _list_all(console: Console) -> None:
    header = ("compressor", "category", "unbiased", "size", "bits", "communicator", "memory")
    _rows(console, header, [_compressor_row(name) for name in known("compressor")])
    shape = " x ".join(map(str, LIST_SHAPE))
    console.print("\nsize: what the size of a payload depends on", style="dim")
    console.print(f"bits: on the wire, per element of a {shape} tensor (float32 has 32)", style="dim")
    console.print("communicator, memory: the defaults", style="dim")
    short = "; ".join(f"{alias} = {_text(spec)}" for alias, spec in aliases("compressor").items())
    console.print(f"short names: {short}\n", style="dim")
    memories: Any = known("memory")
    _rows(console, ("memory",), [([signature(cls)], _summary(cls)) for cls in memories.values()])
    console.print()
    communicators: Any = known("communicator")
    rows = [([name, cls.cost or "?"], _summary(cls)) for name, cls in communicators.items()]
    _rows(console, ("communicator", "cost per rank"), rows)
    console.print("p: bytes of payload; W: number of ranks\n", style="dim")
    builders: Any = known("builder")
    _rows(console, ("strategy builder",), [([name], _summary(cls)) for name, cls in builders.items()])
    console.print()
    rules: Any = known("rule")
    _rows(console, ("rule of strategies",), [([signature(cls)], _summary(cls)) for cls in rules.values()])
    console.print()


def _compressor_row(name: str) -> Row:
    cls = known("compressor")[name]
    if dataclasses.MISSING in cls.parameters().values():
        return [name, *["?"] * 6], f"{_summary(cls)} To be used as {signature(cls)}."
    compressor = make("compressor", name)
    traits = compressor.traits
    row = [
        name,
        traits.category,
        "yes" if traits.unbiased else "no",
        traits.fixed_size or "unknown",
        _bits(compressor.wire_bits(LIST_SHAPE)),
        traits.communicator,
        traits.memory,
    ]
    others = ", ".join(default_first(compressor)[1:])
    return row, _summary(cls) + (f" Also with {others}." if others else "")


def _rows(console: Console, header: Sequence[str], rows: list[Row]) -> None:
    """A table whose rows each have a line of explanation below, so that it fits 80 columns."""
    widths = [max(map(len, column)) for column in zip(header, *(cells for cells, _ in rows), strict=True)]
    console.print("  ".join(map(str.ljust, header, widths)).rstrip(), style="bold underline")
    for cells, note in rows:
        line = Text("  ".join(map(str.ljust, cells, widths)).rstrip())
        line.stylize("bold cyan", 0, len(cells[0]))
        console.print(line, soft_wrap=True)
        console.print(escape(textwrap.indent(textwrap.fill(note, console.width - 2), "  ")), style="dim")


def describe(
    spec: Annotated[
        str,
        typer.Argument(
            help="A compressor, memory, communicator, builder or rule: topk, 'topk(ratio=0.05)', 'topk | qsgd'."
        ),
    ],
) -> None:
    """Explain one component: formula, parameters, traits, wire bits, legal communicators."""
    console = Console(highlight=False)
    if specs.split(spec):
        _introduce(console, make("compressor", spec))
        return
    name, parameters = specs.parse(spec)
    kinds = [kind for kind in KINDS if any(name in named(kind) for named in (known, aliases, unusable))]
    if not kinds:
        raise _unknown(name)
    found, errors = [], []
    for kind in kinds:  # a name such as "none" may be of several kinds, with different parameters
        try:
            found.append(make(kind, {"name": name, **parameters}))
        except ConfigError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    for component in found:
        short = aliases(component.kind).get(name)
        _introduce(console, component, f" ({name} is short for {_text(short)})" if short else "")


def _introduce(console: Console, component: Any, note: str = "") -> None:
    console.print(f"[bold cyan]{escape(component.spec)}[/], a {component.kind}{note}\n")
    _describe(console, component)


def _unknown(name: str) -> ConfigError:
    names = {kind: sorted([*known(kind), *aliases(kind)]) for kind in KINDS}
    near = hint(name, [n for group in names.values() for n in group])
    lists = "; ".join(f"{folder.split('.')[-1]}: {', '.join(names[kind])}" for kind, folder in KINDS.items())
    return ConfigError(f"nothing is called {name!r}{near}; {lists}")


def _describe(console: Console, component: Any) -> None:
    cls = type(component)
    console.print(escape(_reflow(_doc(cls), console.width)) + "\n", soft_wrap=True)
    if cls.parameters() and cls is not Composed:
        _section(console, "Parameters", [_parameter(component, key) for key in cls.parameters()])
    if component.kind == "compressor":
        _describe_compressor(console, component)
    elif component.kind == "builder" and not isinstance(component.compressor, (list, tuple)):
        chosen = make("compressor", component.compressor)
        memory = component.memory or chosen.traits.memory
        _section(console, "Taken unless you choose others", [f"compressor {chosen.spec}, memory {memory}"])
    elif component.kind == "memory":
        keeps = "keeps state per variable, saved with the optimizer" if cls.stateful else "keeps nothing"
        users = [n for n in known("compressor") if _traits_memory(n) == component.name]
        default = f"the default of {', '.join(users)}" if users else "no compressor's default"
        _section(console, "Traits", [keeps, default])
    elif component.kind == "communicator":
        carries = [n for n in known("compressor") if not _needs_parameters(n) and _carries(cls, n)]
        sums = "the engine adds payloads up, so they must be summable" if cls.sums else "each payload is decoded"
        cost = f"costs each rank {_cost(cls)} (p: bytes of payload; W: number of ranks)"
        _section(console, "Traits", [sums, cost, f"carries {', '.join(carries)}"])
    console.print("Text form: [bold]" + escape(component.spec) + "[/]")
    if component.kind != "communicator":
        console.print(f"Dict form: [bold]{escape(repr(component.to_dict()))}[/]\n")


def _describe_compressor(console: Console, compressor: Any) -> None:
    taken = f"communicator {compressor.traits.communicator}, memory {compressor.traits.memory}"
    small = "tensors that it would not shrink travel uncompressed, by allreduce"
    least = break_even(compressor)
    many = [] if least is None else [f"communicator scatter_reduce from {least} ranks on, where it sends less"]
    small_too = [] if compressor.traits.exact else [small]
    _section(console, "Taken unless you choose others", [taken, *many, *small_too])
    _section(console, "Traits", _trait_words(compressor))
    _section(console, TRAINED, trained_lines(type(compressor)))
    classes: Any = known("communicator")
    default = compressor.traits.communicator
    lines = [
        f"{name}{' (default)' if name == default else ''}: {_cost(classes[name])}" for name in default_first(compressor)
    ]
    _section(console, "Communicators, and what they cost each rank (p: bytes of payload; W: ranks)", lines)
    when = ", after the warm-up" if compressor.traits.fixed_size == "by shape and step" else ""
    _section(console, f"Wire bits per element{when}", [_bits_line(compressor, shape) for shape in DESCRIBE_SHAPES])


def _cost(communicator: Any) -> str:
    """Return the cost of an exchange per rank, with a word on its growth with the number of ranks.

    >>> classes = known("communicator")
    >>> _cost(classes["allgather"]), _cost(classes["scatter_reduce"])
    ('(W-1)p, which grows with the number of ranks', '~2p, whatever the number of ranks')
    """
    if not communicator.cost:
        return "?"
    grows = "which grows with" if "W" in communicator.cost else "whatever"
    return f"{communicator.cost}, {grows} the number of ranks"


def _bits_line(compressor: Any, shape: tuple[int, ...]) -> str:
    label = " x ".join(map(str, shape)).ljust(14)
    bits = compressor.wire_bits(shape)
    if bits is None:
        return f"{label} depends on the data"
    if compressor.traits.exact or bits >= 32:
        return f"{label} 32, uncompressed" + ("" if bits == 32 else f" (the method would need {_bits(bits)})")
    payload = bits * math.prod(shape) / 8
    return f"{label} {_bits(bits)}, {32 / bits:.3g}x smaller than float32 ({payload:,.0f} bytes)"


def _trait_words(compressor: Any) -> list[str]:
    """The traits as sentences.

    >>> _trait_words(make("compressor", "topk"))[:2]
    ['category: sparsification', 'biased: E[C(x)] differs from x']
    """
    t = compressor.traits
    exact = "exact: C(x) = x, and the gradient keeps its dtype"
    bias = "unbiased: E[C(x)] = x" if t.unbiased else "biased: E[C(x)] differs from x"
    shrinks = "contraction: the error is smaller than x, so error feedback converges"
    grows = "no contraction: the error can be larger than x, so error feedback on it may diverge"
    words = [
        f"category: {t.category}",
        exact if t.exact else bias,
        *([] if t.exact else [shrinks if t.contraction else grows]),
        "payloads can be summed by the engine" if t.summable else "payloads cannot be summed by the engine",
        "a NaN or Inf travels in the payload" if t.carries_nonfinite else "a NaN or Inf is flagged beside the payload",
        SIZES[t.fixed_size],
    ]
    if t.rounds > 1:
        words.append(f"takes {t.rounds} dependent reductions per exchange")
    if compressor.stateful:
        words.append("keeps state per variable between steps, saved with the optimizer")
    if t.needs_memory:
        words.append("needs error feedback: without a memory it is refused")
    return words


def trained_lines(cls: Any) -> list[str]:
    """Return a line for each optimizer: how far training with a method was behind uncompressed training.

    >>> trained_lines(type("Mine", (), {"trained": {"mine(a=1)": {"sgd": 1.002}, "mine(a=9)": {"sgd": 1.2}}}))
    ['sgd: mine(a=1) +0.2 %, close; mine(a=9) +20.0 %, behind', 'adamw: not measured']
    """
    found, rows = [], vars(cls).get("trained", {})  # a class that inherits rows was not measured
    for optimizer in ("sgd", "adamw"):
        more = {spec: losses[optimizer] - 1 for spec, losses in rows.items() if optimizer in losses}
        said = [f"{spec} {100 * x:+.1f} %, {'close' if x <= CLOSE else 'behind'}" for spec, x in more.items()]
        found.append(f"{optimizer}: {'; '.join(said) or 'not measured'}")
    return found


def _section(console: Console, title: str, lines: Sequence[str]) -> None:
    console.print(title, style="bold")
    for line in lines:
        console.print(textwrap.fill(line, console.width, initial_indent="  ", subsequent_indent="    "), markup=False)
    console.print()


def _summary(cls: type) -> str:
    return _doc(cls).split("\n\n")[0].replace("\n", " ")


def _doc(cls: type) -> str:
    return (inspect.getdoc(cls) or "No documentation.").replace("``", "")


def _reflow(text: str, width: int) -> str:
    """Fill paragraphs to the width; indented lines (formulas, parameters) and examples stay as they are.

    >>> print(_reflow("one\\ntwo\\n\\nArgs:\\n    x: y", width=40))
    one two
    <BLANKLINE>
    Args:
        x: y
    """
    paragraphs = text.split("\n\n")
    fixed = [p.startswith(">>>") or any(line.startswith(" ") for line in p.split("\n")) for p in paragraphs]
    return "\n\n".join(p if keep else textwrap.fill(p, width) for p, keep in zip(paragraphs, fixed, strict=True))


def default_first(compressor: Any) -> list[str]:
    """The communicators that may carry it, its default before the others."""
    return sorted(legal_communicators(compressor), key=lambda name: name != compressor.traits.communicator)


def _bits(bits: float | None) -> str:
    return "varies" if bits is None else f"{bits:.4g}"


def _parameter(component: Any, key: str) -> str:
    default, value = component.parameters()[key], getattr(component, key)
    if default is dataclasses.MISSING:
        return f"{key} = {value!r} (no default)"
    return f"{key} = {value!r}" + ("" if value == default else f" (default {default!r})")


def signature(cls: Any) -> str:
    """A component's name and parameters, with their defaults."""
    parameters = cls.parameters().items()
    inside = ", ".join(k if default is dataclasses.MISSING else f"{k}={default!r}" for k, default in parameters)
    return f"{cls.name}({inside})" if inside else cls.name


def _text(spec: dict[str, Any]) -> str:
    inside = ", ".join(f"{key}={value}" for key, value in spec.items() if key != "name")
    return f"{spec['name']}({inside})" if inside else spec["name"]


def _default(name: str) -> str:
    return make("compressor", name).traits.communicator


def _needs_parameters(name: str) -> bool:
    return dataclasses.MISSING in known("compressor")[name].parameters().values()


def _traits_memory(name: str) -> str | None:
    return None if _needs_parameters(name) else make("compressor", name).traits.memory


def _carries(communicator: Any, name: str) -> bool:
    return communicator.accepts(make("compressor", name)) is None
