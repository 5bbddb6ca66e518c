"""Hyperparameters of an optimizer, which must be equal on all ranks: its numeric settings, by name."""

from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import TypeGuard

from grace.core.api_names import TORCH

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
    for name in sorted(settings):
        value = settings[name]
        if name in WITHOUT_EFFECT:
            continue
        if isinstance(value, Mapping):  # the settings of a schedule
            yield from _iterate_numbers(value, f"{prefix}{name}.")
        elif isinstance(value, (tuple, list)):
            if value and all(_is_number(item) for item in value):
                yield prefix + name, tuple(map(_plain, value))
        elif _is_number(value):
            yield prefix + name, _plain(value)


def _is_number(value: object) -> TypeGuard[Number]:
    return value is None or isinstance(value, Real)


def _plain(value: Number) -> Number:
    return value if value is None or isinstance(value, bool) else float(value)


def facts(kind: str, groups: Sequence[Numbers], group: str = TORCH.group) -> list[tuple[str, str]]:
    """Return the facts of hyperparameters that :func:`grace.session.agreement.compare_facts` compares.

    Args:
        kind: the optimizer's class.
        groups: the numeric settings of each parameter group.
        group: name of a parameter group, with a place for its number.

    >>> facts("SGD", [(("lr", 0.1),)])
    [('optimizer SGD', ''), ('optimizer SGD, param group 0, lr', '0.1')]
    """
    each = [(f"optimizer {kind}, {group.format(i)}{name}", repr(n)) for i, g in enumerate(groups) for name, n in g]
    return [(f"optimizer {kind}", ""), *each]
