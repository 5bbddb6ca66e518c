"""Checks that momentum is applied once: by the optimizer, or by a memory or compressor."""

from collections.abc import Iterable

from grace.core.component import Component
from grace.errors import ConfigError


def momentum_owners(communicators: Iterable[Component]) -> list[Component]:
    """Return the parts of communicators that apply momentum themselves.

    >>> from grace.communicators import Allgather
    >>> [part.spec for part in momentum_owners([Allgather("dgc(ratio=0.1)"), Allgather("signum"), Allgather("topk")])]
    ['dgc', 'signum']
    """
    parts = [part for communicator in communicators for part in communicator.named_components().values()]
    # Not every part is a memory or a compressor: the dicts of a user's part are parts, too.
    return [part for part in parts if getattr(part, "owns_momentum", False)]


def double_momentum_error(part: Component, where: str, momentum: object, later: bool) -> ConfigError:
    """Return the error for momentum that would be applied twice, which the caller raises.

    Args:
        part: a memory or compressor that applies momentum.
        where: name of the other part that applies it, such as "the optimizer".
        momentum: its momentum.
        later: True if its momentum was 0 when it was made distributed.
    """
    cause = ""
    if later:
        cause = " now (a scheduler may have set it: OneCycleLR and CyclicLR take cycle_momentum=False)"
    return ConfigError(
        f"the {part.kind} {part.spec} applies momentum itself, and {where} has momentum {momentum}{cause}: it would be "
        f"applied twice. Give the optimizer momentum 0, and the {part.kind} yours: "
        f"{part.kind}='{part.name}(momentum={momentum})'"
    )
