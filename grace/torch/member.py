"""Methods of a distributed optimizer, besides those of its state: on a rank that exchanges, and on a rank outside its
process set, where every rank runs the same script."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch

from grace.errors import ConfigError, warn
from grace.exchange.bucket import Traffic
from grace.session import checkpoint
from grace.session.metrics import metrics
from grace.session.state_schema import SavedState
from grace.session.switching import returns_to_step
from grace.strategy.execution import StrategyArg, StrategyPlan
from grace.strategy.plan import Strategy
from grace.strategy.resources import ResourcesArg
from grace.torch.initial_sync import broadcast_optimizer_state
from grace.torch.state_dict import StateMixin

if TYPE_CHECKING:  # the planner is loaded only by who asks for it
    from grace.planner.explain import Plan


class MemberMixin(StateMixin):
    """Strategy, anchors, traffic and state of a distributed optimizer on a rank that exchanges."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a further parameter group: the groups of the exchange are fixed when the optimizer is made
        distributed."""
        raise ConfigError(
            "add the parameter group to the optimizer before grace.DistributedOptimizer, which fixes what is "
            "exchanged together; or call optimizer.close() on all ranks, add the group, and make the optimizer "
            "distributed again"
        )

    @property
    def strategy(self) -> Strategy | None:
        """The :class:`~grace.strategy.plan.Strategy` that is executed; None if there is one method for all
        variables."""
        return self._grace.strategy

    @property
    def plan(self) -> "Plan | None":
        """Explanation of the choice that ``strategy="auto"`` made; prints as a table. None as long as it measures, and
        if the user chose."""
        driver = self._grace.driver
        return None if driver is None else driver.explanation

    def use_strategy(self, strategy: StrategyArg, resources: ResourcesArg | None = None) -> None:
        """Switch to another strategy. Memories go along; a residual for which the new strategy has no memory is
        applied, as its mean over ranks, at the next step. Outer rounds end with a last one; if their variables are
        exchanged in every step from now on, all ranks continue with the state of rank 0's optimizer (its momenta).
        Every rank must call it, between two steps; rank 0's strategy counts. Planning (``strategy="auto"``) ends.

        Args:
            strategy, resources: as ``DistributedOptimizer`` takes them: ``"uniform(compressor=powersgd(rank=2))"``.

        Raises:
            ConfigError: the strategy does not suit this model or run; the former one stays.
            ExchangeError: a step is in progress.
            RankError: another rank refuses it.
        """
        alone = list(self._grace.runner.outer_rounds.fragment_of)
        self._grace.switch(StrategyPlan(strategy, self._grace.sparse_known, resources))
        if returns_to_step(alone, self._grace.runner):
            broadcast_optimizer_state(cast(torch.optim.Optimizer, self), 0, self._grace.runner.backend)
        if self._grace.driver is not None:
            self._grace.driver.stop()

    @contextlib.contextmanager
    def anchor(self) -> Iterator[None]:
        """Return a context in which the model has the parameters that all ranks share: the anchors of the last round.
        Evaluate and save in it; changes of parameters in it are undone, with a warning. Without outer rounds it changes
        nothing. No collective.

        Raises:
            ExchangeError: a step is in progress.
        """
        checkpoint.check_settled(self._grace)
        rounds = self._grace.runner.outer_rounds
        outermost = not rounds.anchored
        with self._grace.at_anchor():
            yield
            changed = rounds.changed_at_anchor() if outermost else ()
        if changed:
            warn(
                f"{changed[0]!r} was changed under `with optimizer.anchor():`, whose end has undone it: load or set "
                "parameters outside of it. A state that the optimizer loads in it stays"
            )

    def flush(self) -> None:
        """Run a last outer round, after which all ranks have equal parameters. Every rank must call it, after as many
        iterations. Without outer rounds it does nothing.

        Raises:
            ExchangeError: a step is in progress.
            StepError: ranks have made other numbers of iterations.
        """
        checkpoint.check_settled(self._grace)
        self._grace.flush()

    @property
    def traffic(self) -> Traffic:
        """The traffic counted so far."""
        return self._grace.runner.traffic

    def metrics(self) -> dict[str, float]:
        """Return numbers of this rank for a logger, since the last call; see :mod:`grace.session.metrics`. No
        collective."""
        return metrics(self._grace.runner, self.traffic)


class NonMemberMixin:
    """Methods of a distributed optimizer on a rank that exchanges nothing and keeps no state."""

    strategy = None
    plan = None

    @property
    def traffic(self) -> Traffic:
        """The traffic of this rank: none."""
        return Traffic()

    def metrics(self) -> dict[str, float]:
        """Return numbers for a logger, all of whose counts are 0."""
        return metrics(None, self.traffic)

    def full_state_dict(self, packed: bool = False) -> SavedState:
        """Return the user's optimizer's state. This rank has no memories."""
        return self.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any], memory: str = "strict") -> None:
        """Restore the user's optimizer's state. Memories belong to the ranks in the set."""
        own = {key: value for key, value in state_dict.items() if key != "grace"}
        super().load_state_dict(own)  # type: ignore[misc]

    def use_strategy(self, strategy: StrategyArg, resources: ResourcesArg | None = None) -> None:
        """Do nothing: only the ranks in the set switch to the strategy."""

    def anchor(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that changes nothing: this rank's parameters are its own."""
        return contextlib.nullcontext()

    def flush(self) -> None:
        """Do nothing: only the ranks in the set run a last round."""
