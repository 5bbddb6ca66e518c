"""The page of methods, made from traits and docstrings. ``make docs`` writes it to docs/methods.md."""

import inspect
import re
from typing import Any

from grace.cli.components import TRAINED, default_first, signature, trained_lines
from grace.communicators.choice import SCATTER, break_even
from grace.core.composition import Composed
from grace.core.registry import known

HEAD = """# Methods

This page has the formula, parameters, source and cost of every method. `make docs` makes it from the code.
[Choosing a method](choosing.md) compares the methods.

A spec is text, `topk(ratio=0.01)`, or a dict, `{"name": "topk", "ratio": 0.01}`. A sparsifier and a value compressor
compose: `topk(ratio=0.01) | qsgd(levels=7)`.

- "Size" says what the size of a payload depends on. If it depends on the data, ranks send their sizes first. In a
  warm-up, `topk(warmup_steps=1000)`, it is "by shape and step", which all ranks know.
- "Bits" are bits on the wire per element of a 1000 x 1000 gradient.
- If a number of ranks is given, `scatter_reduce` is the default from that number on, because it then sends less than
  `allgather`. `communicator=` chooses another.
"""
SHAPE = (1000, 1000)


def methods_page() -> str:
    """The whole page, in Markdown.

    >>> "### topk" in methods_page()
    True
    """
    parts = [HEAD, _table()]
    for kind, title in (("compressor", "Compressors"), ("memory", "Memories"), ("communicator", "Communicators")):
        parts.append(f"## {title}\n")
        parts += [_section(kind, name, cls) for name, cls in _own(kind).items()]
    parts += ["## Composition\n", markdown(Composed)]
    return "\n".join(parts)


def _own(kind: str) -> dict[str, Any]:
    """Grace's own components: what else is registered here is none of the page's business."""
    return {name: cls for name, cls in known(kind).items() if cls.__module__.startswith("grace.")}


def _table() -> str:
    rows = [
        "| compressor | category | size | bits | unbiased | communicators (default first) | memory |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, cls in _own("compressor").items():
        compressor: Any = cls()
        traits = compressor.traits
        bits = compressor.wire_bits(SHAPE)
        legal = default_first(compressor)
        least = break_even(compressor)
        if least is not None:
            legal = [f"{name} (from {least} ranks on)" if name == SCATTER else name for name in legal]
        memory = f"{traits.memory} (required)" if traits.needs_memory else traits.memory
        rows.append(
            f"| [`{name}`](#{name}) | {traits.category} | {traits.fixed_size} "
            f"| {'' if bits is None else f'{bits:.4g}'} | {'yes' if traits.unbiased else 'no'} "
            f"| {', '.join(legal)} | {memory} |"
        )
    return "\n".join(rows) + "\n"


def _section(kind: str, name: str, cls: Any) -> str:
    lines = [f"### {name}\n", f"    {signature(cls)}\n"]
    if kind == "compressor":
        lines += [f"{TRAINED}:\n", *(f"- {line}" for line in trained_lines(cls)), ""]
    if kind == "communicator":
        lines.append(f"Cost per rank and exchange, for a payload of p bytes and W ranks: {cls.cost}\n")
    return "\n".join(lines) + "\n" + markdown(cls) + "\n"


def markdown(cls: Any) -> str:
    """A docstring in Markdown: parameters as a list, the example fenced."""
    out: list[str] = []
    section, fenced = "", False
    for line in (inspect.getdoc(cls) or "").splitlines():
        stripped = line.strip()
        if stripped in ("Args:", "Raises:"):
            section = stripped
            out += [f"**{'Parameters' if section == 'Args:' else 'Raises'}**", ""]
            continue
        if stripped.startswith(">>>") and not fenced:
            section, fenced = "", True
            out.append("```python")
        if not line.startswith(" ") and stripped and not fenced:
            section = ""
        if section and stripped:
            is_item = line.startswith("    ") and not line.startswith("     ")
            out.append(f"- {stripped}" if is_item else f"  {stripped}")
        else:
            out.append(line)
    if fenced:
        out.append("```")
    return re.sub(r"(?<!`)``(?!`)", "`", "\n".join(out)) + "\n"


if __name__ == "__main__":
    print(methods_page(), end="")
