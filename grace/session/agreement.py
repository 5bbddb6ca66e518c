"""Agreement: before anything is exchanged, the ranks compare what they are about to do."""

import hashlib
from collections.abc import Sequence
from typing import Any

from grace.core import version
from grace.core.backend import Backend
from grace.errors import RankError

DIFFERENT = "the ranks were set up differently; the first difference: "
DRIFTED = (
    "the ranks made a step with different hyperparameters; the first difference: ",
    "Let schedules and callbacks follow what is the same on every rank (a mean over ranks)",
)


def tell(
    backend: Backend, what: str, value: Any, error: BaseException | None = None, failed: str = "refused to start"
) -> list[Any]:
    """Every rank's small value of this kind; a rank that failed to set up passes its error instead.

    Every rank must call this the same number of times, failed ones too, so that nobody waits in vain. What travels
    is made of Python's own types and says first whose it is, so that a rank with another Grace can be told of it.

    Args:
        what: the kind: "a strategy" where a rank was given one, "none" where it was not, or what is compared else.
        failed: what a rank with an error did.

    Raises:
        RankError: on every rank but the failed one, if some rank failed, runs another Grace, or came with a value of
            another kind.

    >>> from grace.core.backend import LocalBackend
    >>> tell(LocalBackend(), "none", 3)
    [3]
    """
    mine = {"grace": version.__version__, "what": what, "value": value, "error": None if error is None else str(error)}
    answers = backend.allgather_object(mine)
    if error is not None:
        raise error
    for rank, answer in enumerate(answers):
        if not isinstance(answer, dict) or "grace" not in answer:
            raise RankError(
                f"rank {rank} runs a Grace that rank {backend.rank}'s ({mine['grace']}) does not understand. "
                "Install the same version on every rank"
            )
    for rank, answer in enumerate(answers):
        if answer["grace"] != answers[0]["grace"]:
            raise RankError(
                f"{DIFFERENT}rank 0 has Grace {answers[0]['grace']}, rank {rank} has Grace {answer['grace']}. "
                "Install the same version on every rank"
            )
    for rank, answer in enumerate(answers):
        if answer["error"] is not None:
            raise RankError(f"rank {rank} {failed}: {answer['error']}")
        if answer["what"] != what:
            raise RankError(
                f"rank {rank} was given {answer['what']}, rank {backend.rank} {what}: give all ranks the same"
            )
    return [answer["value"] for answer in answers]


def agree(
    backend: Backend, facts: Sequence[tuple[str, str]], error: BaseException | None = None, beside: Any = None
) -> list[Any]:
    """Compare (what, value) facts over all ranks; a rank that failed to set up passes its error instead.

    Every rank must call this the same number of times, failed ones too, so that nobody waits in vain.

    Args:
        beside: anything small that is not compared.

    Returns:
        what every rank gave as ``beside``.

    Raises:
        RankError: on every rank but the failed one, if some rank failed or the facts differ; the message
            names the first fact that differs and each side's value.

    >>> from grace.core.backend import LocalBackend
    >>> agree(LocalBackend(), [("variable w", "float32[3]")], beside="a word")
    ['a word']
    """
    digest = hashlib.sha256(repr(list(facts)).encode()).hexdigest()
    answers = tell(backend, "no strategy", (digest, beside), error)
    if any(other != digest for other, _ in answers):
        raise RankError(first_difference(backend.allgather_object(list(facts))))
    return [given for _, given in answers]


def first_difference(
    all_facts: list[Sequence[tuple[str, str]]],
    begin: str = DIFFERENT,
    end: str = "Run the same script with the same arguments on every rank",
) -> str:
    """What to say of facts that differ: the first that does, and each side's value."""
    mine = all_facts[0]
    for rank, theirs in enumerate(all_facts):
        for i in range(max(len(mine), len(theirs))):
            ours, other = (facts[i] if i < len(facts) else ("nothing more", "") for facts in (mine, theirs))
            if ours != other:
                return f"{begin}rank 0 has {' '.join(ours).strip()}, rank {rank} has {' '.join(other).strip()}. {end}"
    return "the ranks were set up differently"
