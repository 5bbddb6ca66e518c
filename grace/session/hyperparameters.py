"""An optimizer's hyperparameters, which all ranks must have the same of: its numbers, as they are called."""

from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

from grace.core.api_names import TORCH

WITHOUT_EFFECT = {"foreach", "fused", "differentiable", "capturable", "jit_compile"}
"""How an optimizer computes, not what."""

Numbers = tuple[tuple[str, Any], ...]


def numbers(settings: Mapping[str, Any]) -> Numbers:
    """Those settings that are numbers, or made of numbers; in the order of their names.

    >>> numbers({"lr": 1, "betas": (0.9, 0.999), "nesterov": False, "fused": True, "params": [], "clipnorm": None})
    (('betas', (0.9, 0.999)), ('clipnorm', None), ('lr', 1.0), ('nesterov', False))
    """
    return tuple(_found(settings))


def _found(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in sorted(settings):
        value = settings[name]
        if name in WITHOUT_EFFECT:
            continue
        if isinstance(value, Mapping):  # a schedule's
            yield from _found(value, f"{prefix}{name}.")
        elif isinstance(value, (tuple, list)):
            if value and all(_is_number(item) for item in value):
                yield prefix + name, tuple(map(_plain, value))
        elif _is_number(value):
            yield prefix + name, _plain(value)


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, Real)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool) else float(value)


def facts(kind: str, groups: Sequence[Numbers], group: str = TORCH.group) -> list[tuple[str, str]]:
    """For :func:`grace.session.agreement.agree`; ``group`` is what each dict is called, by its number.

    >>> facts("SGD", [(("lr", 0.1),)])
    [('optimizer SGD', ''), ('optimizer SGD, param group 0, lr', '0.1')]
    """
    each = [(f"optimizer {kind}, {group.format(i)}{name}", repr(n)) for i, g in enumerate(groups) for name, n in g]
    return [(f"optimizer {kind}", ""), *each]
