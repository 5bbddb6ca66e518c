"""Agreement: before gradients are exchanged, the ranks compare their versions, settings and variables."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from grace.core import version
from grace.core.backend import Backend
from grace.errors import RankError, said_of

DIFFERENT = "the ranks were set up differently; the first difference: "
DRIFTED = (
    "the ranks made a step with different hyperparameters; the first difference: ",
    "Let schedules and callbacks follow what is the same on every rank (a mean over ranks)",
)
ESTIMATED = (
    "An optimizer that estimates it from gradients (Prodigy, D-Adaptation) needs those of all ranks in every step: "
    "leave outer out, or choose another optimizer"
)
"""Advice that ranks which train alone get besides."""


def gather_or_raise(
    backend: Backend, what: str, value: object, error: BaseException | None = None, failed: str = "refused to start"
) -> list[Any]:
    """Return every rank's value of one kind, which must be small. A rank that failed passes its error instead.

    Every rank must call this the same number of times, failed ones too, so that no rank waits in vain. The message
    holds built-in types only, and Grace's version, so that ranks with another version can report the difference.

    Args:
        backend: the ranks.
        what: the kind, which must be equal on all ranks, such as "a strategy", or "none" without one.
        value: this rank's value.
        error: the error of this rank, if it failed.
        failed: phrase for messages that says in which operation a rank with an error failed.

    Raises:
        RankError: on every rank but the failed one, if some rank failed, runs another Grace, or came with a value of
            another kind.

    >>> from grace.core.backend import LocalBackend
    >>> gather_or_raise(LocalBackend(), "none", 3)
    [3]
    """
    said = None if error is None else said_of(error)
    mine = {"grace": version.__version__, "what": what, "value": value, "error": said}
    answers = backend.allgather_object(mine)
    number = backend.number_of
    if error is not None:
        raise error  # after the collective: the other ranks wait in it, and have received the error
    for rank, answer in enumerate(answers):
        if not isinstance(answer, dict) or "grace" not in answer:  # from a version with another message
            raise RankError(
                f"rank {number(rank)} runs a Grace that rank {number(backend.rank)}'s ({mine['grace']}) does not "
                "understand. Install the same version on every rank"
            )
    for rank, answer in enumerate(answers):
        # Versions before all else: in another version the other entries may mean something else.
        if answer["grace"] != answers[0]["grace"]:
            raise RankError(
                f"{DIFFERENT}rank {number(0)} has Grace {answers[0]['grace']}, rank {number(rank)} has Grace "
                f"{answer['grace']}. Install the same version on every rank"
            )
    # Errors before differences: a rank that failed knows no value to compare.
    for rank, answer in enumerate(answers):
        if answer["error"] is not None:
            raise RankError(f"rank {number(rank)} {failed}: {answer['error']}")
        if answer["what"] != what:
            raise RankError(
                f"rank {number(rank)} was given {answer['what']}, rank {number(backend.rank)} {what}: give all ranks "
                "the same"
            )
    return [answer["value"] for answer in answers]


@contextlib.contextmanager
def failing_together(backend: Backend, what: str, failed: str = "refused to start") -> Iterator[None]:
    """Return a context in which an error on one rank is raised on all of them. Every rank must enter it.

    Args:
        backend: the ranks.
        what: the thing that the context makes, reads or writes, for messages.
        failed: phrase for messages that says in which operation a rank failed.

    Raises:
        RankError: another rank failed.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    gather_or_raise(backend, what, None, error, failed)


def compare_facts(
    backend: Backend, facts: Sequence[tuple[str, str]], error: BaseException | None = None, extra: Any = None
) -> list[Any]:
    """Compare (what, value) facts over all ranks; a rank that failed to set up passes its error instead.

    Every rank must call this the same number of times, failed ones too, so that no rank waits in vain.

    Args:
        extra: a small object that is gathered, but not compared.

    Returns:
        every rank's ``extra``.

    Raises:
        RankError: on every rank but the failed one, if some rank failed or the facts differ; the message
            names the first fact that differs and each side's value.

    >>> from grace.core.backend import LocalBackend
    >>> compare_facts(LocalBackend(), [("variable w", "float32[3]")], extra="a word")
    ['a word']
    """
    # Ranks exchange digests, and the facts themselves, which are large, only if the digests differ. All ranks see that,
    # so all run the second collective.
    digest = hashlib.sha256(repr(list(facts)).encode()).hexdigest()
    answers = gather_or_raise(backend, "no strategy", (digest, extra), error)
    if any(other != digest for other, _ in answers):
        raise RankError(first_difference(backend.allgather_object(list(facts)), number_of=backend.number_of))
    return [given for _, given in answers]


def first_difference(
    all_facts: list[Sequence[tuple[str, str]]],
    begin: str = DIFFERENT,
    end: str = "Run the same script with the same arguments on every rank",
    number_of: Callable[[int], int] = int,
) -> str:
    """Return a description of the first fact that differs between the first rank and another one, with both values.

    Args:
        all_facts: the facts of all ranks.
        begin, end: the text around it.
        number_of: returns a rank's number in the run.
    """
    mine = all_facts[0]
    for rank, theirs in enumerate(all_facts):
        for i in range(max(len(mine), len(theirs))):
            ours, other = (facts[i] if i < len(facts) else ("nothing more", "") for facts in (mine, theirs))
            if ours != other:
                said = " ".join(ours).strip(), " ".join(other).strip()
                return f"{begin}rank {number_of(0)} has {said[0]}, rank {number_of(rank)} has {said[1]}. {end}"
    return "the ranks were set up differently"
