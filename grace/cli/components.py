"""``grace list`` and ``grace describe``: facts about components, read from the components themselves."""

import dataclasses
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from grace.bench.common.tables import Columns, table
from grace.cli.terminal import standard_output
from grace.communicators.choice import break_even
from grace.core import specs
from grace.core.communicator import Communicator
from grace.core.component import Component
from grace.core.composition import Composed
from grace.core.compressor import Compressor
from grace.core.memory import Memory
from grace.core.registry import KINDS, aliases, known, legal_communicators, make, noun, parameterless, unusable
from grace.core.schema_words import hint
from grace.errors import ConfigError
from grace.strategy.builder import Builder

SHAPE = (1000, 1000)
DESCRIBE_SHAPES = ((1000, 1000), (512, 64), (64, 3, 7, 7), (10, 512), (512,))
LEGEND = "p: bytes of payload; W: number of ranks"
SIZES: dict[str | bool | None, str] = {
    "by shape": "payload size by shape: the same on every rank and at every step",
    "by shape and step": "payload size by shape and step: the same on every rank, and another until the warm-up ends",
    "by data": "payload size by data: it differs by rank, so sizes travel first",
    None: "payload size unknown: ranks compare sizes at the first step",
}
CLOSE = 0.03
"""Relative loss beyond uncompressed training's up to which a method counts as close to it."""
TRAINED = "Held-out loss of a character GPT, against uncompressed training"
Section = tuple[str, list[str]]
"""Title and lines."""


# -- grace list -----------------------------------------------------------------------------------------------------


def list_components(
    long: Annotated[bool, typer.Option("--long", "-l", help="All traits, parameters and costs.")] = False,
) -> None:
    """List all compressors, memories, communicators, strategy builders and rules.

    Everything shown is read from the components' own traits, those of other installed packages included.
    """
    console = standard_output(1000)
    for kind in KINDS:
        _print_tables(kind, long, console)
        console.print()
    legend = "communicator: the default of a compressor"
    if long:
        shape = " x ".join(map(str, SHAPE))
        legend = (
            "size: what the size of a payload depends on; bits: on the wire, per element of a "
            f"{shape} tensor (float32 has 32); communicator, memory: the defaults; {LEGEND}"
        )
    console.print(legend, style="dim")
    wrong = [str(reason) for kind in KINDS for reason in unusable(kind).values()]
    if wrong:
        _print_section(console, "Not usable", wrong)
    console.print("More about one of them: grace describe NAME" + ("" if long else "; about all: grace list --long"))


def _print_tables(kind: str, long: bool, console: Console) -> None:
    """Print a table of a kind's components: what each is, or its traits."""
    classes: Mapping[str, Any] = known(kind)
    if long and kind == "compressor":
        console.print(table(_compressors(), TRAITS, list(TRAITS)))
        complete = parameterless(kind)
        for cls in (cls for name, cls in classes.items() if name not in complete):
            console.print(f"{_summary(cls)} To be used as {signature(cls)}.", markup=False)
        return
    columns: Columns[tuple[str, str]] = {kind: lambda row: signature(classes[row[0]]) if long else row[0]}
    if kind == "compressor":
        columns["communicator"] = lambda row: _default_communicator(row[0])
    if not long:
        columns["what it is"] = lambda row: row[1]
    elif kind == "communicator":
        columns["cost per rank"] = lambda row: classes[row[0]].cost or "?"
    rows = [(name, _summary(cls)) for name, cls in classes.items()]
    if kind == "compressor":
        rows += [(name, f"Short for {_text(spec)}.") for name, spec in aliases(kind).items()]
    console.print(table(rows, columns, list(columns)))


def _default_communicator(name: str) -> str:
    made = name in aliases("compressor") or name in parameterless("compressor")
    return make("compressor", name).traits.communicator if made else "?"


TRAITS: Columns[tuple[str, Compressor]] = {
    "compressor": lambda one: one[0],
    "category": lambda one: one[1].traits.category,
    "unbiased": lambda one: "yes" if one[1].traits.unbiased else "no",
    "size": lambda one: str(one[1].traits.fixed_size or "unknown"),
    "bits": lambda one: _format_bits(one[1].wire_bits(SHAPE)),
    "memory": lambda one: one[1].traits.memory,
    "communicator": lambda one: one[1].traits.communicator,
    "others": lambda one: ", ".join(default_first(one[1])[1:]),
}
"""Columns of a compressor and its name: its traits."""


# -- grace describe -------------------------------------------------------------------------------------------------


def describe(
    spec: Annotated[
        str,
        typer.Argument(
            help="A component of any kind: topk, 'topk(ratio=0.05)', 'topk | qsgd', residual, nesterov, parallax."
        ),
    ],
) -> None:
    """Explain one component: formula, parameters, traits, wire bits, legal communicators."""
    console = standard_output()
    if specs.split(spec):
        _print_component(console, make("compressor", spec))
        return
    name, parameters = specs.parse(spec)
    kinds = [kind for kind in KINDS if any(name in named(kind) for named in (known, aliases, unusable))]
    if not kinds:
        raise _unknown(name)
    found = []
    errors = []
    for kind in kinds:  # a name such as "none" may be of several kinds, with different parameters
        try:
            found.append(make(kind, {"name": name, **parameters}))
        except ConfigError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    for component in found:
        alias = aliases(component.kind).get(name)
        _print_component(console, component, f" ({name} is short for {_text(alias)})" if alias else "")


def _unknown(name: str) -> ConfigError:
    names = {kind: sorted([*known(kind), *aliases(kind)]) for kind in KINDS}
    near = hint(name, [n for group in names.values() for n in group])
    lists = "; ".join(f"{folder.split('.')[-1]}: {', '.join(names[kind])}" for kind, folder in KINDS.items())
    return ConfigError(f"nothing is called {name!r}{near}; {lists}")


def _print_component(console: Console, component: Component, note: str = "") -> None:
    cls = type(component)
    article = "an" if component.kind == "outer" else "a"
    console.print(f"[bold cyan]{escape(component.spec)}[/], {article} {noun(component.kind)}{note}\n")
    console.print(escape(_reflow(_doc(cls), console.width)) + "\n", soft_wrap=True)
    if cls.parameters() and cls is not Composed:
        _print_section(console, "Parameters", [_parameter(component, key) for key in cls.parameters()])
    for title, lines in SECTIONS.get(component.kind, lambda component: iter(()))(component):
        _print_section(console, title, lines)
    console.print("Text form: [bold]" + escape(component.spec) + "[/]")
    if component.kind != "communicator":
        console.print(f"Dict form: [bold]{escape(repr(component.to_dict()))}[/]\n")


def _print_section(console: Console, title: str, lines: Sequence[str]) -> None:
    console.print(title, style="bold")
    for line in lines:
        console.print(textwrap.fill(line, console.width, initial_indent="  ", subsequent_indent="    "), markup=False)
    console.print()


def _compressor_sections(compressor: Compressor) -> Iterator[Section]:
    default = compressor.traits.communicator
    taken = [f"communicator {default}, memory {compressor.traits.memory}"]
    least = break_even(compressor)
    if least is not None:
        taken.append(f"communicator scatter_reduce from {least} ranks on, where it sends less")
    if not compressor.traits.exact:
        taken.append("tensors that it would not shrink travel uncompressed, by allreduce")
    yield "Taken unless you choose others", taken
    yield "Traits", _trait_sentences(compressor)
    yield TRAINED, trained_lines(type(compressor))
    classes: Mapping[str, Any] = known("communicator")
    communicators = [
        f"{name}{' (default)' if name == default else ''}: {_cost(classes[name])}" for name in default_first(compressor)
    ]
    yield "Communicators, and what they cost each rank (p: bytes of payload; W: ranks)", communicators
    when = ", after the warm-up" if compressor.traits.fixed_size == "by shape and step" else ""
    yield f"Wire bits per element{when}", [_bits_line(compressor, shape) for shape in DESCRIBE_SHAPES]


def _builder_sections(builder: Builder) -> Iterator[Section]:
    if isinstance(builder.compressor, (str, dict, Compressor)):  # else rules, which choose for each variable
        compressor = make("compressor", builder.compressor)
        memory = builder.memory or compressor.traits.memory
        yield "Taken unless you choose others", [f"compressor {compressor.spec}, memory {memory}"]


def _memory_sections(memory: Memory) -> Iterator[Section]:
    keeps = "keeps state per variable, saved with the optimizer" if memory.stateful else "keeps nothing"
    users = [name for name, compressor in _compressors() if compressor.traits.memory == memory.name]
    yield "Traits", [keeps, f"the default of {', '.join(users)}" if users else "no compressor's default"]


def _communicator_sections(communicator: Communicator) -> Iterator[Section]:
    cls = type(communicator)
    carries = [name for name, compressor in _compressors() if cls.accepts(compressor) is None]
    sums = "the engine adds payloads up, so they must be summable" if cls.sums else "each payload is decoded"
    yield "Traits", [sums, f"costs each rank {_cost(cls)} ({LEGEND})", f"carries {', '.join(carries)}"]


SECTIONS: dict[str, Callable[[Any], Iterator[Section]]] = {
    "compressor": _compressor_sections,
    "builder": _builder_sections,
    "memory": _memory_sections,
    "communicator": _communicator_sections,
}
"""Sections about a component, by its kind."""


def _compressors() -> list[tuple[str, Compressor]]:
    """Return the compressors that need no parameters, and their names."""
    return [(name, make("compressor", name)) for name in parameterless("compressor")]


def _cost(communicator: type[Communicator]) -> str:
    """Return the cost of an exchange per rank, with a word on its growth with the number of ranks."""
    if not communicator.cost:
        return "?"
    grows = "which grows with" if "W" in communicator.cost else "whatever"
    return f"{communicator.cost}, {grows} the number of ranks"


def _bits_line(compressor: Compressor, shape: tuple[int, ...]) -> str:
    label = " x ".join(map(str, shape)).ljust(14)
    bits = compressor.wire_bits(shape)
    if bits is None:
        return f"{label} depends on the data"
    if compressor.traits.exact or bits >= 32:
        needed = "" if bits == 32 else f" (the method would need {_format_bits(bits)})"
        return f"{label} 32, uncompressed{needed}"
    payload = bits * math.prod(shape) / 8
    return f"{label} {_format_bits(bits)}, {32 / bits:.3g}x smaller than float32 ({payload:,.0f} bytes)"


def _trait_sentences(compressor: Compressor) -> list[str]:
    t = compressor.traits
    sentences = {
        f"category: {t.category}": True,
        "exact: C(x) = x, and the gradient keeps its dtype": t.exact,
        "unbiased: E[C(x)] = x": t.unbiased and not t.exact,
        "biased: E[C(x)] differs from x": not t.unbiased and not t.exact,
        "contraction: the error is smaller than x, so error feedback converges": t.contraction and not t.exact,
        "no contraction: the error can be larger than x, so error feedback on it may diverge": not t.contraction
        and not t.exact,
        f"payloads {'can' if t.summable else 'cannot'} be summed by the engine": True,
        f"a NaN or Inf {'travels in' if t.carries_nonfinite else 'is flagged beside'} the payload": True,
        SIZES[t.fixed_size]: True,
        f"takes {t.rounds} dependent reductions per exchange": t.rounds > 1,
        "keeps state per variable between steps, saved with the optimizer": compressor.stateful,
        "needs error feedback: without a memory it is refused": t.needs_memory,
    }
    return [sentence for sentence, holds in sentences.items() if holds]


def trained_lines(cls: type) -> list[str]:
    """Return a line for each optimizer: the relative loss of training with a method beyond uncompressed training's.

    >>> trained_lines(type("Mine", (), {"measured_loss": {"mine(a=1)": {"sgd": 1.002}, "mine(a=9)": {"sgd": 1.2}}}))
    ['sgd: mine(a=1) +0.2 %, close; mine(a=9) +20.0 %, behind', 'adamw: not measured']
    """
    lines = []
    measured = vars(cls).get("measured_loss", {})  # a class that inherits it was not measured
    for optimizer in ("sgd", "adamw"):
        beyond = {spec: losses[optimizer] - 1 for spec, losses in measured.items() if optimizer in losses}
        found = [f"{spec} {100 * x:+.1f} %, {'close' if x <= CLOSE else 'behind'}" for spec, x in beyond.items()]
        lines.append(f"{optimizer}: {'; '.join(found) or 'not measured'}")
    return lines


# -- text -----------------------------------------------------------------------------------------------------------


def _doc(cls: type) -> str:
    return (inspect.getdoc(cls) or "No documentation.").replace("``", "")


def _summary(cls: type) -> str:
    return _doc(cls).split("\n\n")[0].replace("\n", " ")


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


def default_first(compressor: Compressor) -> list[str]:
    """Return the communicators that may carry a compressor, its default before the others."""
    return sorted(legal_communicators(compressor), key=lambda name: name != compressor.traits.communicator)


def signature(cls: type[Component]) -> str:
    """Return a component's name and parameters, with their defaults."""
    parameters = cls.parameters().items()
    inside = ", ".join(k if default is dataclasses.MISSING else f"{k}={default!r}" for k, default in parameters)
    return f"{cls.name}({inside})" if inside else cls.name


def _text(spec: dict[str, Any]) -> str:
    inside = ", ".join(f"{key}={value}" for key, value in spec.items() if key != "name")
    return f"{spec['name']}({inside})" if inside else spec["name"]


def _parameter(component: Component, key: str) -> str:
    default = component.parameters()[key]
    value = getattr(component, key)
    if default is dataclasses.MISSING:
        return f"{key} = {value!r} (no default)"
    return f"{key} = {value!r}" + ("" if value == default else f" (default {default!r})")


def _format_bits(bits: float | None) -> str:
    return "varies" if bits is None else f"{bits:.4g}"
