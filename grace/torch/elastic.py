"""Horovod elastic: training that goes on when ranks come and go.

What becomes of what Grace remembers when the number of ranks changes:

- residuals and other memories of a rank stay with it as long as it lives; those of a rank that ended are lost,
  and a new rank starts with none. A warning says so.
- what all ranks share (PowerSGD's factors, the step counter, the loss scale) a new rank gets from rank 0.
- ScatterReduce's memory of the second compression belongs to shards, which change: it starts anew.
"""

import copy
import warnings
from typing import Any

import horovod.torch as hvd
from horovod.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry

from grace.backends.runtime import current
from grace.session import state_schema
from grace.torch.horovod_patches import unnamed
from grace.torch.parameters import broadcast_optimizer_state
from grace.torch.state_dict import StateMixin, load_state, rank_state


class OptimizerState(StateHandler):
    """Commits, restores and synchronizes one distributed optimizer, memories and counters included."""

    def __init__(self, optimizer: Any):
        super().__init__(optimizer)
        self.size = optimizer._grace.context.size
        self.save()

    def save(self) -> None:
        """Commit."""
        self.saved = copy.deepcopy(rank_state(self.value))

    def restore(self) -> None:
        """Back to the last commit."""
        session = self.value._grace
        session.abandon()
        saved, context = self.saved["grace"], session.context
        moved = (saved["rank"], saved["size"]) != (context.rank, context.size)  # the memories are this rank's own
        saved = state_schema.seal({**saved, "rank": context.rank, "size": context.size})
        load_state(self.value, {**self.saved, "grace": saved}, "keep" if moved else "strict", alone=True)

    def rejoin(self) -> None:
        """The ranks are others now. Said here: Horovod does not synchronize when ranks have only gone."""
        former, context = self.size, self.value._grace.context
        self.value._grace.rejoin()
        self._say(former, context.size)
        self.size = context.size

    def sync(self) -> None:
        """Bring every rank to rank 0's state, by the rules above."""
        session = self.value._grace
        session.runner.agree()
        broadcast_optimizer_state(self.value, 0, session.runner.backend)
        session.runner.broadcast_state(0)
        self.save()

    def _say(self, former: int, now: int) -> None:
        session = self.value._grace
        kept = {c.memory.spec for c in session.runner.communicators if c.memory.stateful}
        if former != now and session.context.rank == 0 and kept:
            what = ", ".join(sorted(kept))
            warnings.warn(
                f"the number of ranks changed from {former} to {now} at step {session.context.step}: ranks that went "
                f"on keep their memories ({what}); those of ranks that ended are lost, and new ranks start with none",
                stacklevel=2,
            )


# Horovod looks here for how to keep a value in step
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


def on_reset(self: Any) -> None:
    """The ranks are others now."""
    own = [handler for handler in self._handlers.values() if isinstance(handler, OptimizerState)]
    if own:
        backend: Any = current()
        backend.rejoin()
    unnamed.clear()  # a new rank counts from 0
    for handler in own:
        handler.rejoin()
    super(TorchState, self).on_reset()


TorchState.on_reset = on_reset
