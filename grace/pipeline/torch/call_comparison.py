"""Comparison of the ranks' calls: every call of a pipeline begins with it.

Stages get activations from each other, and everything else (the batch, its targets, the mode) from their own program.
If a rank's program left out a call, the rank would compute one batch's activations with another batch's targets; if a
rank had a shorter batch, it would wait for messages of another size. Each rank therefore sends a few numbers to all
others before anything is computed or sent, so that a refusal leaves no message behind.

Ranks compare a sample of each tensor of the batch. Tensors that were equal once must stay equal, unless one of them is
one number all over. If all tensors of the first batch differ, the ranks read their data in another order. If some do, a
warning says so once: they may be dummies (targets where no loss is computed, inputs that a later stage does not read).
"""

import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np
import torch

from grace.errors import StepError, warn
from grace.exchange.header import ADVICE, describe_ranks
from grace.pipeline.torch.mesh import Mesh
from grace.pipeline.torch.stage_gradients import Gradients
from grace.session.agreement import gather_or_raise

SAMPLE = 1024
"""Number of elements of a tensor that are compared."""
SPREAD = 2654435761
"""A prime: the positions i SPREAD mod n spread over a tensor of n elements, whatever its strides are."""
MODES = "evaluates", "accumulates (no_sync)", "trains"
FAILED, MODE, BATCHES, UPDATES, SHAPES, RATES, BATCH = range(7)
"""Positions of the numbers that a rank sends; -1 stands for a missing number. The last ones are the checksums of the
batch's tensors, which are odd if all elements of a tensor are the same."""
W = TypeVar("W")
TENSORS = 8
"""Number of tensors of a batch that are compared."""


def checksums(values: Sequence[object]) -> list[int]:
    """Return for each tensor twice the CRC-32 of a sample of its numbers; plus 1 if all of them are the same number.

    >>> x = torch.arange(6.0)
    >>> checksums([x]) == checksums([x.clone(), 3.0]), checksums([x]) == checksums([x + 1]), checksums([x[:1]])[0] % 2
    (True, False, 1)
    """
    sums = [-1] * TENSORS
    for i, one in enumerate(values[:TENSORS]):
        if isinstance(one, torch.Tensor) and one.layout == torch.strided and not one.is_meta and one.numel():
            numbers = _sample(one.detach()).cpu().contiguous()
            constant = bool((numbers == numbers[0]).all())
            sums[i] = 2 * zlib.crc32(numbers.view(torch.uint8).numpy().data) + constant
    return sums


def _describe(values: Sequence[object]) -> str:
    """Return a description of a batch, for messages."""
    return ", ".join(
        f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" if isinstance(one, torch.Tensor) else repr(one)
        for one in values
    )


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sample of a tensor's numbers."""
    count = tensor.numel()
    if count <= SAMPLE:
        return tensor.reshape(-1)
    index = torch.arange(SAMPLE, device=tensor.device) * SPREAD % count
    return tensor[torch.unravel_index(index, tensor.shape)]  # reshape(-1) would copy a tensor that is not contiguous


class CallComparison:
    """The comparison of the ranks' calls, and its record of former calls. With ``by_replica`` each replica's ranks have
    a batch of their own; else all ranks have the same batch."""

    def __init__(self, mesh: Mesh, by_replica: bool):
        self.mesh = mesh
        self.backend = mesh.backend
        rows = list(zip(*mesh.ranks, strict=True)) if by_replica else [tuple(range(mesh.backend.size))]
        self.same_batch_groups = [sorted(ranks) for ranks in rows]
        """Sets of ranks that are given the same batch."""
        self.same_so_far: dict[tuple[int, int], set[int]] = {}
        """Positions of the tensors that were the same so far, by mode and number of the set of ranks."""
        self.rates: list[float] = []
        """Learning rates of this rank's optimizer."""
        self.warned_rates = False
        self.calls = 0

    def compare(
        self, prepare: Callable[[], tuple[W, Hashable, Sequence[object]]], mode: int, gradients: Gradients
    ) -> W:
        """Prepare a call, and compare it with the other ranks' calls. Every rank must call it.

        Args:
            prepare: a function that returns this rank's work, the shapes that messages depend on, and the call's
                values. It may raise if the call cannot work.
            mode: see :data:`MODES`.
            gradients: this rank's gradients.

        Returns:
            this rank's work.

        Raises:
            RankError: another rank refused its batch.
            StepError: the ranks are not at the same step, or have different batches.
        """
        channel = self.mesh.channel
        if channel is None:  # there is no other rank
            return prepare()[0]
        error: Exception | None = None
        shapes, batch = -1, [-1] * TENSORS
        values: Sequence[object] = []
        try:
            work, key, values = prepare()
            shapes = zlib.crc32(repr(key).encode())
            batch = checksums(values)
        except Exception as raised:  # this rank still takes part in the all-gather, for which the others wait
            error = raised
        has_optimizer = gradients.has_optimizer  # the dummy's counts and rates are not compared
        groups = gradients.optimizer.param_groups if has_optimizer else []
        self.rates = sorted({float(group["lr"]) for group in groups if "lr" in group})
        counts = gradients.batches, gradients.updates if has_optimizer else -1
        rates = zlib.crc32(repr(self.rates).encode()) if has_optimizer else -1
        stamp = [int(error is not None), mode, *counts, shapes, rates, *batch]
        received = [part.tolist() for part in channel.allgather(channel.tensor_of(np.array(stamp))).wait()]
        if any(one[FAILED] for one in received):
            gather_or_raise(self.backend, "a batch", None, error, "refused its batch")  # raises on every rank
        self._compare(received, values)
        self.calls += 1
        return work

    def _compare(self, received: list[list[int]], values: Sequence[object]) -> None:
        """Compare the numbers of all ranks."""
        mode = received[0][MODE]
        modes = {rank: MODES[one[MODE]] for rank, one in enumerate(received)}
        # the mode first, since counts and shapes differ too where the modes do
        if len(set(modes.values())) > 1:
            words = "; ".join(f"{describe_ranks([rank])} {word}" for rank, word in modes.items())
            raise StepError(f"in call {self.calls} of the pipeline {words}. {ADVICE}")
        self._compare_counts(received, BATCHES, "batches' gradients", "loss.backward()")
        self._compare_counts(received, UPDATES, "updates", "optimizer.step()")
        # every rank compares all groups, so that all raise, and none waits in the next collective
        for ranks in self.same_batch_groups:
            first = ranks[0]
            if any(received[rank][SHAPES] != received[first][SHAPES] for rank in ranks):
                given = self.backend.allgather_object(_describe(values))
                other = next(rank for rank in ranks if received[rank][SHAPES] != received[first][SHAPES])
                raise StepError(
                    f"in call {self.calls} of the pipeline rank {other} was given a batch of {given[other]}, and rank "
                    f"{first} of {given[first]}, which must be the same. A rank left out a step, or its data ended "
                    f"before that of the others. {ADVICE}"
                )
        for number, ranks in enumerate(self.same_batch_groups):
            self._compare_batches(received, mode, number, ranks)
        self._compare_rates(received)

    def _compare_counts(self, received: list[list[int]], field: int, what: str, missing: str) -> None:
        """Compare the ranks' counts of batches or updates."""
        counts = {rank: one[field] for rank, one in enumerate(received) if one[field] >= 0}
        most = max(counts.values(), default=0)
        late = [rank for rank, count in counts.items() if count < most]
        if late:
            raise StepError(
                f"in call {self.calls} of the pipeline {describe_ranks(late)} made {counts[late[0]]} {what}, others "
                f"{most}: {describe_ranks(late)} left out {missing}. {ADVICE}"
            )

    def _compare_batches(self, received: list[list[int]], mode: int, number: int, ranks: Sequence[int]) -> None:
        """Compare the samples of the batches of ranks that must have the same batch."""
        known = self.same_so_far.get((mode, number))
        same = set(range(TENSORS)) if known is None else set(known)
        for rank in ranks[1:]:
            pairs = list(zip(received[ranks[0]][BATCH:], received[rank][BATCH:], strict=True))
            compared = {i for i, pair in enumerate(pairs) if min(pair) >= 0}
            differ = {i for i in compared if pairs[i][0] != pairs[i][1]}
            # odd checksums are of tensors of one number, which programs pass where nothing reads them
            unlike = {i for i in differ if pairs[i][0] % 2 == pairs[i][1] % 2}
            other_batch = unlike & same if known is not None else mode > 0 and unlike == compared
            if unlike and other_batch:
                raise StepError(
                    f"in call {self.calls} of the pipeline rank {rank} was given another batch than rank {ranks[0]}: a "
                    "rank left out a step, or takes its data in another order. Let all ranks of a replica read the "
                    f"same rows, by a sampler of the same seed. {ADVICE}"
                )
            same -= differ
        if same != known and len(same) < TENSORS:
            warn(
                f"{describe_ranks(ranks)} of a pipeline were given different tensors for some of their batch. Where no "
                "stage of a rank reads them this does no harm, and they are not compared from now on"
            )
        self.same_so_far[mode, number] = same

    def _compare_rates(self, received: list[list[int]]) -> None:
        """Warn once if stages have different learning rates, which may be intended."""
        if self.warned_rates or len({one[RATES] for one in received if one[RATES] >= 0}) < 2:
            return
        self.warned_rates = True
        rates = self.backend.allgather_object(self.rates)
        words = [f"{describe_ranks([rank])} has lr {', '.join(map(str, own))}" for rank, own in enumerate(rates) if own]
        warn(
            f"stages of the pipeline train at different learning rates: {'; '.join(words)}. If that is not meant so, "
            "give all ranks' optimizers the same"
        )
