"""Every call of a pipeline begins with a comparison of what its ranks are about to do.

Stages get activations from each other, and everything else (which batch it is, its targets, whether to train) from
their own program. So a rank whose program left something out would compute one batch's activations with another's
targets, and one with a shorter batch would wait for messages of another size. Each rank therefore tells all others a
few numbers. The all-gather starts before the first stage computes, and is awaited before the first message between two
stages is sent or awaited, so that it takes no time of its own, and a refusal leaves no message behind.

Whether ranks have the same batch is known by a sample of each of its tensors. Tensors that were the same once must stay
so. Where some differ from the beginning it is said once: they may stand in (targets where no loss is computed, inputs
that a later stage does not read). Of these it is an error if one rank has what another had a step before, or if all of
a batch differs and changes from step to step: that is data in another order.
"""

import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from grace.errors import StepError
from grace.exchange.step_stamp import ADVICE, describe_ranks
from grace.session.agreement import gather_or_raise
from grace.torch.pipeline.exchange import Gradients
from grace.torch.pipeline.places import Places

SAMPLE = 1024
"""Numbers of a tensor that are compared."""
SPREAD = 2654435761
"""A prime: positions i SPREAD mod n lie all over a tensor of n elements, in no step of its shape."""
MODES = "evaluates", "accumulates (no_sync)", "trains"
FAILED, MODE, HANDED, UPDATES, SHAPES, RATES, BATCH = range(7)
"""What a rank tells, in order; -1 for what it has none of. The last ones are of the batch's tensors, odd where a tensor
is one number all over."""
TENSORS = 8
"""So many tensors of a batch are compared."""


def checksums(values: Sequence[Any]) -> list[int]:
    """Return for each tensor a CRC-32 of a sample of its numbers, times 2; plus 1 if they are all the same.

    >>> x = torch.arange(6.0)
    >>> checksums([x]) == checksums([x.clone(), 3.0]), checksums([x]) == checksums([x + 1]), checksums([x[:1]])[0] % 2
    (True, False, 1)
    """
    found = [-1] * TENSORS
    for i, one in enumerate(values[:TENSORS]):
        if isinstance(one, torch.Tensor) and one.layout == torch.strided and not one.is_meta and one.numel():
            numbers = _sample(one.detach()).cpu().contiguous()
            constant = bool((numbers == numbers[0]).all())
            found[i] = 2 * zlib.crc32(numbers.view(torch.uint8).numpy().data) + constant
    return found


def _in_words(values: Sequence[Any]) -> str:
    return ", ".join(
        f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" if isinstance(one, torch.Tensor) else repr(one)
        for one in values
    )


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    count = tensor.numel()
    if count <= SAMPLE:
        return tensor.reshape(-1)
    index = torch.arange(SAMPLE, device=tensor.device) * SPREAD % count
    return tensor[torch.unravel_index(index, tensor.shape)]  # reshape(-1) would copy what is not contiguous


class Meeting:
    """The comparison at the beginning of each call.

    Args:
        places: of this rank.
        by_replica: True if each replica's ranks have a batch of their own; else all ranks have the same.
    """

    def __init__(self, places: Places, by_replica: bool):
        self.places, self.backend = places, places.backend
        columns = list(dict.fromkeys(places.ranks))
        rows = list(zip(*columns, strict=True)) if by_replica else [tuple(range(places.backend.size))]
        self.together = [sorted(ranks) for ranks in rows]
        """The ranks that are given the same batch."""
        self.alike: dict[tuple[int, int], set[int]] = {}
        """By mode and number of the ranks, the tensors that were the same so far."""
        self.before: dict[int, list[list[int]]] = {}
        """By mode, what all ranks told in the last call."""
        self.rates: list[float] = []
        """Of this rank's optimizer."""
        self.told_rates = False
        self.calls = 0
        self._begun: Any = None

    def begin(self, prepare: Callable[[], tuple[Any, Any, Sequence[Any]]], mode: int, gradients: Gradients) -> Any:
        """Start to compare a call; ranks that do not have the first stage, which have to wait anyway, await it.

        Args:
            prepare: returns what this rank is about to run, the shapes that messages depend on, and the call's values;
                it may raise why it cannot.
            mode: see :data:`MODES`.
            gradients: of this rank.

        Returns:
            What this rank is about to run.

        Raises:
            RankError, StepError: see :meth:`end`.
        """
        made, error, sums, batch = None, None, -1, [-1] * TENSORS
        values: Sequence[Any] = []
        try:
            made, shapes, values = prepare()
            sums, batch = zlib.crc32(repr(shapes).encode()), checksums(values)
        except Exception as raised:
            error = raised
        channel = self.places.channel
        if channel is None:
            if error is not None:
                raise error
            return made
        known = gradients.steps  # others' optimizer stands in
        self.rates = _rates(gradients.optimizer) if known else []
        counts = gradients.handed, gradients.updates if known else -1
        rates = zlib.crc32(repr(self.rates).encode()) if known else -1
        stamp = [int(error is not None), mode, *counts, sums, rates, *batch]
        self._begun = channel.allgather(channel.tensor_of(stamp)), values, error
        if error is not None or 0 not in self.places.stages:
            self.end()
        return made

    def end(self) -> None:
        """Await the comparison, if it was not yet.

        Raises:
            RankError: another rank refused its batch.
            StepError: the ranks are not at the same step, or have different batches.
        """
        if self._begun is None:
            return
        (handle, values, error), self._begun = self._begun, None
        told = [part.tolist() for part in handle.wait()]
        if any(one[FAILED] for one in told):
            gather_or_raise(self.backend, "a batch", None, error, "refused its batch")
        self._compare(told, values)
        self.calls += 1
        self.before[told[0][MODE]] = told

    def _compare(self, told: list[list[int]], values: Sequence[Any]) -> None:
        mode = told[0][MODE]
        modes = {rank: MODES[one[MODE]] for rank, one in enumerate(told)}
        if len(set(modes.values())) > 1:
            words = "; ".join(f"{describe_ranks([rank])} {word}" for rank, word in modes.items())
            raise StepError(f"in call {self.calls} of the pipeline {words}. {ADVICE}")
        self._compare_counts(told, HANDED, "batches' gradients", "loss.backward()")
        self._compare_counts(told, UPDATES, "updates", "optimizer.step()")
        for ranks in self.together:
            first = ranks[0]
            if any(told[rank][SHAPES] != told[first][SHAPES] for rank in ranks):
                given = self.backend.allgather_object(_in_words(values))
                other = next(rank for rank in ranks if told[rank][SHAPES] != told[first][SHAPES])
                raise StepError(
                    f"in call {self.calls} of the pipeline rank {other} was given a batch of {given[other]}, and rank "
                    f"{first} of {given[first]}, which must be the same. A rank left out a step, or its data ended "
                    f"before that of the others. {ADVICE}"
                )
        for number, ranks in enumerate(self.together):
            self._compare_batches(told, mode, number, ranks)
        self._compare_rates(told)

    def _compare_counts(self, told: list[list[int]], field: int, what: str, missing: str) -> None:
        counts = {rank: one[field] for rank, one in enumerate(told) if one[field] >= 0}
        most = max(counts.values(), default=0)
        if late := [rank for rank, count in counts.items() if count < most]:
            raise StepError(
                f"in call {self.calls} of the pipeline {describe_ranks(late)} made {counts[late[0]]} {what}, others "
                f"{most}: {describe_ranks(late)} left out {missing}. {ADVICE}"
            )

    def _compare_batches(self, told: list[list[int]], mode: int, number: int, ranks: Sequence[int]) -> None:
        first, known = ranks[0], self.alike.get((mode, number))
        alike, before = set(range(TENSORS)) if known is None else set(known), self.before.get(mode)
        for rank in ranks[1:]:
            now = list(zip(told[first][BATCH:], told[rank][BATCH:], strict=True))
            then = None if before is None else list(zip(before[first][BATCH:], before[rank][BATCH:], strict=True))
            apart = {i for i, (a, b) in enumerate(now) if a != b and a >= 0 and b >= 0}
            astray = False
            if known is not None and then is not None:
                changed = {i for i in apart if now[i][0] != then[i][0] and now[i][1] != then[i][1]}
                shifted = {i for i in changed if now[i][0] == then[i][1] or now[i][1] == then[i][0]}
                stands_in = {
                    i for i in apart - changed if any(a % 2 and a == b for a, b in zip(now[i], then[i], strict=True))
                }
                compared = {i for i, (a, b) in enumerate(now) if a >= 0 and b >= 0}
                reordered = mode > 0 and len(changed) > 1 and changed == compared  # inputs and targets alike
                astray = bool((apart & known) - stands_in or shifted or reordered)
            if astray:
                raise StepError(
                    f"in call {self.calls} of the pipeline rank {rank} was given another batch than rank {first}: a "
                    "rank left out a step, or takes its data in another order. Let all ranks of a replica read the "
                    f"same rows, by a sampler of the same seed. {ADVICE}"
                )
            alike -= apart
        if alike != known and len(alike) < TENSORS:
            warnings.warn(
                f"{describe_ranks(ranks)} of a pipeline were given different tensors for some of their batch. Where no "
                "stage of a rank reads them this does no harm, and they are hardly compared from now on",
                stacklevel=2,
            )
        self.alike[mode, number] = alike

    def _compare_rates(self, told: list[list[int]]) -> None:
        """Say once that stages have other learning rates, which may be meant so."""
        if self.told_rates or len({one[RATES] for one in told if one[RATES] >= 0}) < 2:
            return
        self.told_rates = True
        rates = self.backend.allgather_object(self.rates)
        words = [f"{describe_ranks([rank])} has lr {', '.join(map(str, own))}" for rank, own in enumerate(rates) if own]
        warnings.warn(
            f"stages of the pipeline train at different learning rates: {'; '.join(words)}. If that is not meant so, "
            "give all ranks' optimizers the same",
            stacklevel=2,
        )


def _rates(optimizer: Any) -> list[float]:
    """Return an optimizer's learning rates, in order."""
    return sorted({float(group["lr"]) for group in optimizer.param_groups if "lr" in group})
