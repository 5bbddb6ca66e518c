"""Command lines of ``grace bench``: options that are fields of the settings' dataclasses, and their parsing."""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer

from grace.core.quantities import parse_quantity, parse_rate
from grace.core.registry import aliases, parameterless
from grace.errors import ConfigError

Folder = Annotated[Path, typer.Option("--out", "-o", help="Folder for results.json, results.csv and report.html.")]
MOST_SEEDS = 10_000
Given = dict[str, Any]
"""Fields of settings that the user has set, for ``Settings(**given)``; their values are of the fields' types."""
OPTION = "option"
"""Key of an :class:`Option` in a field's metadata."""


class Option(NamedTuple):
    """Command-line option of a field of settings; see :func:`option`."""

    info: Any
    parse: Callable[[Any], object] | None
    text: str | None
    repeated: bool


def option(
    default: object,
    help: str,
    *flags: str,
    parse: Callable[[Any], object] | None = None,
    text: str | None = None,
    repeated: bool = False,
    **more: Any,
) -> Any:
    """Return a settings field that is an option of the command line, too.

    Args:
        default: the field's default.
        help: the option's help.
        flags: names of the option; the field's name if there are none.
        parse: function that makes the field's value of what the user writes; None where typer does.
        text: the default of a parsed option, as a user would write it; None for the field's own default.
        repeated: True if the option may be repeated.
        more: arguments of ``typer.Option``. If ``show_default`` is text, the field is set only if the user gives the
            option.
    """
    metadata = {OPTION: Option(typer.Option(*flags, help=help, **more), parse, text, repeated)}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=functools.partial(copy.copy, default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _parameter(field: dataclasses.Field, kind: Any) -> inspect.Parameter:
    """Return the parameter of which typer makes the option of a field of a type."""
    one: Option = field.metadata[OPTION]
    default = field.default
    if one.repeated:
        kind, default = list[str] | None, None
    elif one.parse is not None:
        kind, default = str | None, one.text
    elif isinstance(one.info.show_default, str):  # it depends on other options
        kind, default = kind | None, None
    annotation = Annotated[kind, one.info]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_options(settings: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the options of a settings' dataclass to a command.

    The command's first parameter takes the fields that the user has set, parsed, in place of the options.

    >>> @dataclasses.dataclass
    ... class Settings:
    ...     ranks: list[int] = option([2], "Numbers of processes.", parse=lambda text: integers(text, "--ranks"))
    >>> @with_options(Settings)
    ... def command(given: Given, quick: bool = False) -> None:
    ...     print(Settings(**given), quick)
    >>> command(ranks="2,4")
    Settings(ranks=[2, 4]) False
    >>> command(ranks=None, quick=True)
    Settings(ranks=[2]) True
    """
    kinds = get_type_hints(settings)
    fields = {field.name: field for field in dataclasses.fields(settings) if OPTION in field.metadata}
    options: dict[str, Option] = {name: field.metadata[OPTION] for name, field in fields.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**arguments: object) -> None:
            given = {}
            for name, one in options.items():
                value = arguments.pop(name, None)
                # typer gives [] for a repeated option that was not given
                if value is not None and value != []:
                    given[name] = one.parse(value) if one.parse else value
            command(given, **arguments)

        parameters = [_parameter(field, kinds[name]) for name, field in fields.items()]
        for parameter in list(inspect.signature(command).parameters.values())[1:]:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        parameters.sort(key=lambda parameter: parameter.default is not inspect.Parameter.empty)  # what must be given
        # typer reads the parameters of the signature, and their types in the annotations
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def split(text: str) -> list[str]:
    """Split a list of specs at its commas; those inside parentheses belong to a spec.

    >>> split("none, qsgd(levels=7, norm=l2),topk")
    ['none', 'qsgd(levels=7, norm=l2)', 'topk']
    """
    parts, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def methods(text: str) -> list[str]:
    """Return compressor specs, or all for ``all``, in the order given and each once; empty text means none, where that
    is allowed.

    >>> methods("topk, qsgd,topk"), len(methods("all")) > 20
    (['topk', 'qsgd'], True)
    """
    found = list(dict.fromkeys(every_method() if text.strip() == "all" else split(text)))
    if not found and text.strip():
        raise ConfigError(f"no method is named in {text!r}; write some, separated by commas, or all")
    return found


def integers(text: str, what: str) -> list[int]:
    """Parse whole numbers separated by commas.

    >>> integers("0,1,2", "seeds")
    [0, 1, 2]
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{what} are whole numbers separated by commas, as in 0,1,2, not {text!r}") from None


def seeds(text: str) -> list[int]:
    """Parse a number of seeds, from 0 on, or the seeds themselves.

    >>> seeds("3"), seeds("0,7"), seeds("5,")
    ([0, 1, 2], [0, 7], [5])
    """
    found = integers(text.rstrip(","), "seeds")
    if "," in text or len(found) > 1:
        return found
    if found[0] < 1:
        raise ConfigError(f"--seeds must be at least 1, or seeds separated by commas, not {text}")
    if found[0] > MOST_SEEDS:
        raise ConfigError(f"--seeds must be at most {MOST_SEEDS}, not {text}; each is a run of its own")
    return list(range(found[0]))


def bandwidths(text: str) -> list[float | None]:
    """Parse bits per second, separated by commas; ``none`` or ``loopback`` is a network without an emulated link.

    >>> bandwidths("1gbit, loopback")
    [1000000000.0, None]
    """
    parts = [part.strip() for part in text.split(",")]
    return [None if part in ("none", "loopback") else parse_rate(part) for part in parts]


def bandwidth_option(show_default: str = "loopback") -> Any:
    """Return the option of emulated links; the loopback is the default."""
    words = "Rates of emulated links, as in 1gbit,100mbit (Linux, root); none is the loopback."
    return option([None], words, "--bandwidth", parse=bandwidths, show_default=show_default)


def size(text: str) -> int:
    """Parse a number of elements; a ConfigError says that it is not a whole number above 0.

    >>> size("25M"), size("4096"), size("1e6"), size("2.5M")
    (25000000, 4096, 1000000, 2500000)
    """
    form = "a size is a number of elements, as in 4096, 1e6, 2.5M or 25M"
    count = parse_quantity(text, {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}, form)
    if count < 1 or not count.is_integer():
        raise ConfigError(f"{form}, not {text!r}")
    return int(count)


COMPOSITIONS = ("topk | efsignsgd", "topk | qsgd(levels=7, bucket_size=64)")


def every_method() -> list[str]:
    """Return all compressors that can be built without parameters, the casts by their short names, and two
    compositions.

    >>> every_method()[:4], every_method()[-1]
    (['none', 'adaptive', 'bf16', 'block'], 'topk | qsgd(levels=7, bucket_size=64)')
    """
    short = [name for name, spec in aliases("compressor").items() if spec["name"] == "cast"]
    rest = sorted({*parameterless("compressor"), *short} - {"cast", "none"})
    return ["none", *rest, *COMPOSITIONS]
