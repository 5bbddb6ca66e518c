"""Hyperparameters of an optimizer: numeric settings, which must be equal on all ranks, and momentum, which must be
applied once: by the optimizer, or by a memory or compressor."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import TypeGuard

from grace.core.api_names import TORCH
from grace.core.component import Component
from grace.errors import ConfigError

WITHOUT_EFFECT = {"foreach", "fused", "differentiable", "capturable", "jit_compile"}
"""Settings that change how an optimizer computes, but not its result."""

Number = float | bool | None
Numbers = tuple[tuple[str, Number | tuple[Number, ...]], ...]
"""Settings that are numbers, or tuples of numbers, by name."""


def numeric_settings(settings: Mapping[str, object]) -> Numbers:
    """Return the settings that are numbers, or tuples of numbers, sorted by name.

    >>> settings = {"lr": 1, "betas": (0.9, 0.999), "nesterov": False, "fused": True, "params": [], "clipnorm": None}
    >>> numeric_settings(settings)
    (('betas', (0.9, 0.999)), ('clipnorm', None), ('lr', 1.0), ('nesterov', False))
    """
    return tuple(_iterate_numbers(settings))


def _iterate_numbers(
    settings: Mapping[str, object], prefix: str = ""
) -> Iterator[tuple[str, Number | tuple[Number, ...]]]:
    # A schedule's names may be numbers of steps. Keys of other kinds are parameters, whose state a group may hold.
    for name in sorted((name for name in settings if isinstance(name, (str, Real))), key=str):
        value = settings[name]
        if name in WITHOUT_EFFECT:
            continue
        if isinstance(value, Mapping):  # the settings of a schedule
            yield from _iterate_numbers(value, f"{prefix}{name}.")
        elif isinstance(value, (tuple, list)):
            if value and all(_is_number(item) for item in value):
                yield f"{prefix}{name}", tuple(map(_plain, value))
        elif _is_number(value):
            yield f"{prefix}{name}", _plain(value)


def _is_number(value: object) -> TypeGuard[Number]:
    return value is None or isinstance(value, Real)


def _plain(value: Number) -> Number:
    return value if value is None or isinstance(value, bool) else float(value)


def hyperparameter_facts(kind: str, groups: Sequence[Numbers], group: str = TORCH.group) -> list[tuple[str, str]]:
    """Return the facts of hyperparameters that :func:`grace.session.agreement.compare_facts` compares.

    Args:
        kind: the optimizer's class.
        groups: the numeric settings of each parameter group.
        group: name of a parameter group, with a place for its number.

    >>> hyperparameter_facts("SGD", [(("lr", 0.1),)])
    [('optimizer SGD', ''), ('optimizer SGD, param group 0, lr', '0.1')]
    """
    # repr() tells floats apart that differ in the last bit.
    each = [(f"optimizer {kind}, {group.format(i)}{name}", repr(n)) for i, g in enumerate(groups) for name, n in g]
    return [(f"optimizer {kind}", ""), *each]


def momentum_owners(communicators: Iterable[Component]) -> list[Component]:
    """Return the parts of communicators that apply momentum themselves.

    >>> from grace.communicators import Allgather
    >>> [part.spec for part in momentum_owners([Allgather("dgc(ratio=0.1)"), Allgather("signum"), Allgather("topk")])]
    ['dgc', 'signum']
    """
    parts = [part for communicator in communicators for part in communicator.named_components().values()]
    # Not every part is a memory or a compressor: the dicts of a user's part are parts, too.
    return [part for part in parts if getattr(part, "owns_momentum", False)]


def double_momentum_error(part: Component, where: str, setting: str, momentum: object, cause: str = "") -> ConfigError:
    """Return the error for momentum that would be applied twice, which the caller raises.

    Args:
        part: a memory or compressor that applies momentum.
        where: name of the other part that applies it, such as "the optimizer".
        setting: its framework's name of momentum, such as "beta_1".
        momentum: its momentum.
        cause: text on when and how it got momentum, if it had none when it was made distributed.
    """
    return ConfigError(
        f"the {part.kind} {part.spec} applies momentum itself, and {where} has {setting} {momentum}{cause}: it would "
        f"be applied twice. Give the optimizer {setting} 0, and the {part.kind} yours: "
        f"{part.kind}='{part.name}(momentum={momentum})'"
    )
