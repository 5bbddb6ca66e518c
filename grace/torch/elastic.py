"""Horovod elastic: training continues when ranks come and go.

Rules for Grace's state when the number of ranks changes:

- residuals and other memories of a rank stay with it as long as it lives. Memories of a rank that ended are lost,
  and a new rank starts with none. A warning says so.
- a new rank gets the shared state (PowerSGD's factors, the step counter, the loss scale) from rank 0.
- ScatterReduce's memory of the second compression belongs to shards, which change: it starts anew.

Where ranks train alone between outer rounds:

- a rank that goes on keeps its parameters, its optimizer's state and its place in the period. What ranks that ended had
  trained since the last round is lost.
- a new rank starts from the anchor, with the outer optimizer's state that all ranks share, and with the state of rank
  0's optimizer. Its first drift is that of fewer iterations.
"""

import contextlib
import copy
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry

from grace.backends.runtime import current
from grace.errors import warn
from grace.session import checkpoint, state_schema
from grace.torch.horovod_patches import unnamed_counts
from grace.torch.initial_sync import broadcast_optimizer_state
from grace.torch.state_dict import StateMixin, load_state, rank_state


class OptimizerState(StateHandler):
    """Horovod's handler that commits, restores and synchronizes one distributed optimizer, with its memories and
    counters."""

    def __init__(self, optimizer: Any):
        super().__init__(optimizer)
        self.size = optimizer._grace.context.size
        self.joins = False
        """True if this rank trains alone between rounds, and took the others' state in the last synchronization."""
        self.save()

    def save(self) -> None:
        """Commit the current state."""
        self.saved = copy.deepcopy(rank_state(self.value))

    def restore(self) -> None:
        """Restore the last commit."""
        session = self.value._grace
        session.abort()  # exchanges in progress belong to the step that failed
        saved = self.saved["grace"]
        context = session.context
        # The commit is of this process, so its memories fit, whatever number its rank has now.
        moved = (saved["rank"], saved["size"]) != (context.rank, context.size)
        saved = state_schema.seal({**saved, "rank": context.rank, "size": context.size})
        load_state(self.value, {**self.saved, "grace": saved}, "keep" if moved else "strict", alone=True)

    def rejoin(self) -> None:
        """Adapt to other ranks, and warn of lost memories. The warning is given here because Horovod does not
        synchronize when ranks have only left."""
        former = self.size
        context = self.value._grace.context
        self.value._grace.rejoin()
        self._warn_lost_memories(former, context.size)
        self.size = context.size

    def sync(self) -> None:
        """Give every rank the state of rank 0, by the rules above."""
        runner = self.value._grace.runner
        place = runner.run_id, runner.context.step
        runner.agree()
        if runner.outer_rounds:
            places = runner.backend.allgather_object(place)
            fresh = [not run or (run, step) != places[0] for run, step in places]
            self.joins = fresh[runner.backend.rank]
            if any(fresh):
                own = torch.optim.Optimizer.state_dict(self.value)
                broadcast_optimizer_state(self.value, 0, runner.backend)
                if not self.joins:
                    torch.optim.Optimizer.load_state_dict(self.value, own)
        else:
            broadcast_optimizer_state(self.value, 0, runner.backend)
        runner.broadcast_state(0)

    def _warn_lost_memories(self, former: int, now: int) -> None:
        """Warn, on rank 0, if the number of ranks changed and what they keep depends on it."""
        session = self.value._grace
        if former == now or session.context.rank != 0:
            return
        changed = f"the number of ranks changed from {former} to {now} at step {session.context.step}"
        kept = {c.memory.spec for c in session.runner.communicators if c.memory.stateful}
        if kept:
            warn(
                f"{changed}: ranks that went on keep their memories ({', '.join(sorted(kept))}); those of ranks that "
                "ended are lost, and new ranks start with none"
            )
        if session.runner.outer_rounds:
            warn(
                f"{changed}: ranks that went on keep what they have trained since the last round; that of ranks that "
                "ended is lost, and new ranks start from the anchor"
            )


# Horovod chooses the first handler whose type fits, so Grace's must precede the one for torch's optimizers
set_handler_registry([(StateMixin, OptimizerState), *get_handler_registry()])

TorchState = hvd.elastic.TorchState
"""Horovod's own, which knows optimizers made by :func:`grace.DistributedOptimizer` since this module was imported (the
first of them imports it).

``commit()`` keeps a copy of every optimizer's memories and step counter on this rank, ``restore()`` goes back to it,
and when the ranks change the rules at the top of this module hold::

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)

    @hvd.elastic.run
    def train(state): ...
"""


def _own_handlers(state: hvd.elastic.TorchState) -> list[OptimizerState]:
    """Return the handlers of the distributed optimizers in a TorchState."""
    return [handler for handler in state._handlers.values() if isinstance(handler, OptimizerState)]


def on_reset(self: hvd.elastic.TorchState) -> None:
    """Rejoin all distributed optimizers after the ranks changed. Replaces ``TorchState.on_reset``."""
    own = _own_handlers(self)
    if own:
        backend: Any = current()
        backend.rejoin()
    unnamed_counts.clear()  # a new rank counts from 0, so all others must
    for handler in own:
        handler.rejoin()
    super(TorchState, self).on_reset()


def save(self: hvd.elastic.TorchState) -> None:
    """Commit all parts, or none in the middle of an optimizer's step. Replaces ``TorchState.save``.

    Raises:
        ExchangeError: an exchange is under way, or no ``step()`` has used its means yet.
    """
    for handler in _own_handlers(self):
        checkpoint.check_settled(handler.value._grace.runner)
    save_parts(self)


def sync(self: hvd.elastic.TorchState) -> None:
    """Synchronize all parts, and commit the result. Replaces ``TorchState.sync``, whose handlers of models give all
    ranks rank 0's parameters, also where ranks train alone."""
    own = _own_handlers(self)
    with contextlib.ExitStack() as stack:
        for handler in own:
            stack.enter_context(handler.value._grace.keeping_own())
        synchronize_parts(self)
    for handler in own:
        if handler.joins:
            handler.value._grace.runner.outer_rounds.restore()
    for handler in self._handlers.values():
        handler.save()


save_parts = TorchState.save
synchronize_parts = TorchState.sync
TorchState.save = save
TorchState.sync = sync
TorchState.on_reset = on_reset
