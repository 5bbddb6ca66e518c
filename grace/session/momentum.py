"""Momentum is applied once: by the optimizer, or by a memory or compressor that has its own."""

from collections.abc import Iterable
from typing import Any

from grace.core.component import Component
from grace.errors import ConfigError


def owners(communicators: Iterable[Component]) -> list[Any]:
    """The parts of communicators that apply momentum themselves.

    >>> from grace.communicators import Allgather
    >>> [part.spec for part in owners([Allgather("dgc(ratio=0.1)"), Allgather("signum"), Allgather("topk")])]
    ['dgc', 'signum']
    """
    parts = [part for communicator in communicators for part in communicator.named_components().values()]
    return [part for part in parts if getattr(part, "owns_momentum", False)]


def doubled(part: Any, where: str, momentum: Any, later: bool) -> ConfigError:
    """The error that momentum would be applied twice, to be raised by the caller.

    Args:
        part: a memory or compressor that applies it.
        where: what applies it as well: "the optimizer".
        momentum: how much of it.
        later: it had none when it was made distributed.
    """
    cause = ""
    if later:
        cause = " now (a scheduler may have set it: OneCycleLR and CyclicLR take cycle_momentum=False)"
    return ConfigError(
        f"the {part.kind} {part.spec} applies momentum itself, and {where} has momentum {momentum}{cause}: it would be "
        f"applied twice. Give the optimizer momentum 0, and the {part.kind} yours: "
        f"{part.kind}='{part.name}(momentum={momentum})'"
    )
