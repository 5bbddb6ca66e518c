"""Agreement: before anything is exchanged, the ranks compare what they are about to do."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from grace.backend import Backend
from grace.errors import RankError


def agree(backend: Backend, facts: Sequence[tuple[str, str]], error: BaseException | None = None) -> None:
    """Compare (what, value) facts over all ranks; a rank that failed to set up passes its error instead.

    Every rank must call this the same number of times, failed ones too, so that nobody waits in vain.

    Raises:
        RankError: on every rank but the failed one, if some rank failed or the facts differ; the message
            names the first fact that differs and each side's value.

    >>> from grace.local import LocalBackend
    >>> agree(LocalBackend(), [("variable w", "float32[3]")])
    """
    digest = hashlib.sha256(repr(list(facts)).encode()).hexdigest()
    answers = backend.allgather_object((digest, None if error is None else str(error)))
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(answers):
        if failure is not None:
            raise RankError(f"rank {rank} refused to start: {failure}")
        if not isinstance(answers[rank][0], str):
            raise RankError(f"rank {rank} was given a strategy, rank {backend.rank} none: give all ranks the same")
    if all(other == answers[0][0] for other, _ in answers):
        return
    raise RankError(_first_difference(backend.allgather_object(list(facts))))


def _first_difference(all_facts: list[Sequence[tuple[str, str]]]) -> str:
    mine = all_facts[0]
    for rank, theirs in enumerate(all_facts):
        for i in range(max(len(mine), len(theirs))):
            ours, other = (facts[i] if i < len(facts) else ("nothing more", "") for facts in (mine, theirs))
            if ours != other:
                return (
                    "the ranks were set up differently; the first difference: "
                    f"rank 0 has {' '.join(ours).strip()}, rank {rank} has {' '.join(other).strip()}. "
                    "Run the same script with the same arguments on every rank"
                )
    return "the ranks were set up differently"
