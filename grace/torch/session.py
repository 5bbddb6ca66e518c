"""What every distributed optimizer needs: its parameters' runner, and the way of gradients in and out of it."""

import contextlib
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from grace.core.backend import Backend
from grace.core.communicator import Communicator
from grace.core.context import Context
from grace.errors import ConfigError, ExchangeError, PayloadError
from grace.exchange.bucket import Bucket, Outcome
from grace.exchange.sparse_rows import SparseRows, scaled
from grace.exchange.step_stamp import digest
from grace.exchange.tracing import recorder
from grace.planner.asked import Asked, asked, started
from grace.planner.driver import Driver
from grace.session import checkpoint
from grace.session.hyperparameters import facts as in_words
from grace.session.momentum import momentum_owners
from grace.session.plan import ExchangePlan
from grace.session.settings import Settings, check_integer
from grace.session.setup import build_step_runner
from grace.session.sharding import Shard
from grace.session.step_runner import StepRunner
from grace.session.switching import build_replacement, switch_plan
from grace.session.versions import public
from grace.strategy.choices import Choices
from grace.strategy.execution import StrategyPlan
from grace.torch.auto import copies, driver_of
from grace.torch.gradients import check_as_made, check_untouched, dense_of, rows_of
from grace.torch.initial_sync import start_facts, starting
from grace.torch.lifecycle import check_free
from grace.torch.parameters import (
    broadcast_parameters,
    check_momentum,
    check_optimizer,
    horovod_groups,
    hyperparameters,
    named,
    simple_settings,
    sparse_of,
    variables,
)
from grace.torch.uses import UnusedMeans
from grace.torch.wrappers import check_unwrapped


class Session:
    """The parameters of an optimizer, their runner, and the gradients that are on their way.

    Args:
        optimizer: the user's.
        parameters: ``named_parameters`` as the user gave them.
        choices: compressor, memory, communicator and strategy, likewise.
        backend: the engine.
        passes: backward passes per step.
        reduction: what the result is.
        groups: parameters that may share a collective: how many such sets, or the sets; None for all.
        group_bytes: bytes of gradient that are exchanged in one collective.
        seed: of the stochastic methods.
        grad_scaler: the scaler whose scale memories follow.
        sparse_as_dense: exchange sparse gradients as dense ones.
        broadcast: start from rank 0's parameters and buffers.
        hierarchical: the ranks of a node reduce among themselves first.
    """

    by_itself = False
    """Whether a rank loads, and sets hyperparameters, without the others: the first exchange compares them."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Any,
        choices: Choices,
        backend: Backend,
        *,
        passes: int,
        groups: int | Sequence[Sequence[torch.Tensor]] | None,
        grad_scaler: Any,
        settings: Settings,
    ):
        self._optimizer = weakref.ref(optimizer)  # which holds this
        self.grad_scaler, self.settings = grad_scaler, settings
        self.hooks: list[Any] = []
        """What takes hooks off again; none once the optimizer was closed."""
        self.finalizer: Any = None
        self.parameters = own = dict[str, torch.nn.Parameter]()
        self.frozen: dict[str, torch.Tensor] = {}
        """The optimizer's parameters that require no gradients."""
        self.narrow: dict[str, torch.Tensor] = {}
        """Those that are exchanged in less than float64."""
        start: dict[str, torch.Tensor] = {}

        def list_variables():
            check_integer("backward_passes_per_step", passes)
            settings.check()
            of_model = parameters is None or isinstance(parameters, torch.nn.Module)
            given = parameters if of_model else list(parameters)
            own.update(named(optimizer, given))
            check_unwrapped(own)
            check_free(own)
            found = variables(own, () if settings.sparse_as_dense else sparse_of(given))
            start.update(starting(optimizer, given))
            held = {p for group in optimizer.param_groups for p in group["params"]}
            held -= set(own.values())
            self.narrow = {name: p for name, p in own.items() if p.dtype is not torch.float64}
            self.frozen = {name: p for name, p in start.items() if p in held}
            if settings.broadcast:
                facts.extend(start_facts(start, found))
            return found

        me = weakref.ref(self)  # no cycle, so that all ends when the optimizer does
        lr = lambda name: 1.0 if (session := me()) is None else session._lr(name)  # noqa: E731
        self.context = Context(seed=settings.seed, lr=lr, predivide=settings.reduction.predivide)
        facts = [
            ("torch", public(torch.__version__)),
            ("backward_passes_per_step", str(passes)),
            *settings.facts(),
            ("grad_scaler", "none" if grad_scaler is None else "given"),
            *in_words(type(optimizer).__name__, () if self.by_itself else hyperparameters(optimizer)),
        ]

        self.plan: ExchangePlan | None = None
        self.asked: Asked | None = None
        self.chosen_sets = chosen = groups is not None and groups != 0

        def choose():
            self.sparse_known = known = isinstance(parameters, torch.nn.Module)
            limits = settings.limits.for_sets if chosen else settings.limits
            apart = lambda: me().apart(own) if not known else ()  # type: ignore[union-attr]  # noqa: E731
            together = lambda: horovod_groups(own, groups, apart())  # noqa: E731
            if wanted := asked(choices):
                settings.check_auto()
                facts.append(("the strategy", wanted.options.spec))
            self.asked = wanted
            self.plan = (started(choices) if wanted else choices).plan(limits, together, sparse_known=known)
            return self.plan

        self.runner = build_step_runner(
            list_variables,
            choose,
            backend,
            self.context,
            facts,
            self._check,
            backend.elastic,
            settings.hierarchical,
            settings.compress_after,
        )
        self._check_plan(self.runner)
        self.runner.follows_scaler = lambda: grad_scaler is not None and grad_scaler.is_enabled()
        recorder.note(updates_follow=True)
        self._lay_out()
        self.param_group = {
            name: index
            for index, group in enumerate(optimizer.param_groups)
            for name, p in self.parameters.items()
            if any(p is other for other in group["params"])
        }
        self.checked = False
        self.idle = False
        """Whether gradients were cleared, and nothing was done with the optimizer since."""
        self.hyperparameters = hyperparameters(optimizer)
        """Those that the last step was made with."""
        kind = type(optimizer).__name__
        made_with = lambda: [] if (session := me()) is None else in_words(kind, session.hyperparameters)  # noqa: E731
        self.runner.hyperparameters = made_with
        self.digest, self.made_of = digest(self.hyperparameters), simple_settings(optimizer)
        self.versions: dict[int, tuple[list[Any], list[int]]] = {}
        self.written: dict[str, torch.Tensor] = {}
        self.unused: UnusedMeans | None = None
        if settings.broadcast and not backend.elastic:
            broadcast_parameters(start, 0, backend)
        self.auto: Driver | None = None if self.asked is None else driver_of(self, self.asked)

    @property
    def optimizer(self) -> Any:
        """The user's; None when it is gone."""
        return self._optimizer()

    @property
    def strategy(self) -> Any:
        """The strategy that is executed, if there is one."""
        return None if self.plan is None else self.plan.strategy

    def apart(self, parameters: Mapping[str, torch.nn.Parameter]) -> Collection[str]:
        """The names of parameters that share no bucket, unless the user puts them into one."""
        return ()

    @property
    def begun(self) -> bool:
        """Whether a step is under way: exchanges were begun, or are about to be, that may still be dropped."""
        return self.runner.begun

    def _check(self, communicator: Communicator) -> None:
        check_optimizer(communicator, self.optimizer)

    def check(self) -> None:
        """Whether a step can be made as the optimizer is now; asked before its first collective.

        Raises:
            ConfigError: something was changed since it was made distributed, which exchanges cannot follow.
        """
        check_as_made(self.frozen, self.narrow)
        if self.momenta:
            check_momentum(self.momenta, self.optimizer, later=True)
        self.checked = True

    def _lr(self, name: str) -> float:
        whole = self.runner.shards[name].whole.name
        return float(self.optimizer.param_groups[self.param_group[whole]]["lr"])

    def _lay_out(self) -> None:
        """What is the same at every step: what travels in each bucket, and in which buckets each parameter does."""
        shards, buckets = self.runner.shards, self.runner.buckets
        self.loads: list[list[tuple[Shard, str, torch.nn.Parameter, bool]]] = []
        self.buckets_of: dict[str, list[Bucket]] = {name: [] for name in self.parameters}
        self.waits = [0] * len(buckets)
        for bucket in buckets:
            load = [(shard, shard.whole.name) for shard in (shards[v.name] for v in bucket.variables)]
            dense = [shard.axis is None and not shard.variable.sparse for shard, _ in load]
            self.loads.append([(s, name, self.parameters[name], d) for (s, name), d in zip(load, dense, strict=True)])
            for name in dict.fromkeys(name for _, name in load):
                self.buckets_of[name].append(bucket)
                self.waits[bucket.index] += 1
            if not (bucket.variables[0].sparse or self.runner.backend.elastic):
                self.runner.prepare(bucket, self.loads[-1][0][2].detach())
        self.momenta = momentum_owners(self.runner.communicators)
        reduction, size = self.settings.reduction, self.runner.backend.size
        self.factors = {id(c): reduction.factor(c.compressor.votes, size) for c in self.runner.communicators}
        """By communicator, what its aggregates are multiplied with."""
        rows = [(name, parts) for name, parts in self.runner.shards_of.items() if parts[0].variable.sparse]
        self.mixed = [name for name, parts in rows if 0 < sum(shard.period > 0 for shard in parts) < len(parts)]
        """Sparse variables some of whose parts are not exchanged."""

    def _check_plan(self, runner: StepRunner) -> None:
        self.settings.check_votes(runner.communicators)
        if self.grad_scaler is not None and runner.averages:
            raise ConfigError(
                "sync none(period): ranks that train on their own would skip different steps with a grad_scaler. "
                "Leave it out, or synchronize every step"
            )

    def switch(self, plan: ExchangePlan) -> None:
        """Switch to another plan between two steps, on every rank; see :func:`switch_plan`."""
        checkpoint.check_settled(self)
        self.means_used()
        own = self.parameters.__getitem__
        self.take(switch_plan(self.runner, plan, own, self._check, self._check_plan), plan)

    def beside(self, strategy: Any) -> tuple[StepRunner, ExchangePlan]:
        """A runner of this strategy, for a state to be loaded into, and its plan; every rank must call it."""
        plan = StrategyPlan(strategy, self.sparse_known)
        return build_replacement(self.runner, plan, self._check), plan

    def take(self, runner: StepRunner, plan: ExchangePlan) -> None:
        """Go on by this runner, which is of another plan, between two steps."""
        self.runner, self.plan = runner, plan
        self._lay_out()

    def copies(self) -> dict[str, torch.Tensor]:
        """Of the dense gradients that there are."""
        return copies(self.parameters)

    # -- gradients in ----------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, bucket: Bucket) -> None:
        """Begin a bucket's exchange, with zeros where this rank has no gradient."""
        if self.unused is not None:
            self._settle_unused(self.unused.replaced())
        if not self.versions and self.runner.follows_scaler():
            self.runner.rescale(self.grad_scaler.get_scale())
        gradients, held, versions = list[Any](), list[Any](), list[int]()
        for shard, name, p, dense in self.loads[bucket.index]:
            gradient = p.grad
            plain = dense and gradient is not None and gradient.layout is torch.strided and not gradient.requires_grad
            if plain and gradient.is_contiguous():  # type: ignore[union-attr]
                gradients.append(gradient)
            else:
                sparse = shard.variable.sparse
                given = rows_of(name, p) if sparse else dense_of(name, p, self.settings.sparse_as_dense)
                gradients.append(shard.slice_of(given))
                gradient = p.grad  # which may be a dense one now
            held.append(gradient)
            versions.append(0 if gradient is None else gradient._version)
        self.versions[bucket.index] = held, versions
        with self.giving_up():
            self.runner.start(bucket, gradients, [gradient is not None for gradient in held])

    @contextlib.contextmanager
    def giving_up(self) -> Iterator[None]:
        """What the engine failed in is forgotten, so that the state of the last good step can be saved."""
        try:
            yield
        except PayloadError:  # the engine works: the step is dropped by all ranks together
            raise
        except ExchangeError:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Forget what was under way, which the engine has given up."""
        self.runner.abandon()

    # -- means that no step has used yet ---------------------------------------------------------------

    @contextlib.contextmanager
    def leaving_unused(self) -> Iterator[None]:
        """Exchange, in this context, means that no ``step()`` uses yet."""
        if self.unused is not None:
            self._settle_unused(self.unused.replaced())
        self.runner.waits_for_step = self.runner.stateful
        try:
            yield
        except BaseException:
            self.runner.waits_for_step = False
            raise
        if self.runner.stateful:
            self.unused = UnusedMeans(self.parameters)

    def means_used(self) -> None:
        """Commit what the unused means changed: a ``step()`` uses the gradients that are there."""
        if self.unused is not None:
            self._settle_unused(self.unused.cleared())

    def _settle_unused(self, thrown: Iterable[str]) -> None:
        """Commit what the unused means changed, and roll back what those of parameters that were thrown away did."""
        runner = self.runner
        for component in runner._stepping():
            for name in thrown:
                for shard in runner.shards_of[name]:
                    component.state.rollback(shard.variable.name)
            component.state.commit()
        runner.waits_for_step = False
        self.unused = None

    # -- means out -------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self) -> list[Outcome]:
        """Await the exchanges begun and write what they brought into ``p.grad``."""
        check_untouched(self)
        with self.giving_up():
            outcomes = self.runner.finish_step(self._outs)
        rows = self._own_rows() if self.mixed else {}
        written, in_place = self.written, all(factor == 1.0 for factor in self.factors.values())
        for outcome in outcomes:
            value = outcome.value
            if in_place and value is not None and written.get(outcome.variable.name) is value:
                continue
            shard = self.runner.shards[outcome.variable.name]
            p = self.parameters[shard.whole.name]
            if outcome.value is None:
                if outcome.pending:
                    self._wipe(shard, p)
            elif isinstance(outcome.value, SparseRows):
                found = scaled(outcome.value, self.factors[id(shard.communicator)])
                rows.setdefault(shard.whole.name, []).append(shard.to_whole(found))
            else:
                self._write(shard, p, outcome.value)
        for name, parts in rows.items():
            p = self.parameters[name]
            numbers = torch.cat([slices.rows.to(p.device, torch.int64) for slices in parts])
            values = torch.cat([slices.values.to(p.dtype) for slices in parts])
            p.grad = torch.sparse_coo_tensor(numbers[None], values, p.shape, check_invariants=False)
        self.versions, self.written = {}, {}
        return outcomes

    def _own_rows(self) -> dict[str, list[SparseRows]]:
        """This rank's rows of parts that are not synchronized, of sparse variables that are in other parts."""
        rows = {}
        for name in self.mixed:
            own, p = [shard for shard in self.runner.shards_of[name] if shard.period], self.parameters[name]
            if p.grad is not None:
                rows[name] = [shard.to_whole(shard.slice_of(rows_of(name, p))) for shard in own]
        return rows

    def _write(self, shard: Shard, p: torch.nn.Parameter, value: torch.Tensor) -> None:
        view = self.written.get(shard.variable.name)
        if value is not view:
            if p.grad is None:
                p.grad = torch.empty_like(p) if shard.axis is None else torch.zeros_like(p)
            view = shard.slice_of(p.grad)
            view.copy_(value)  # type: ignore[union-attr]
        factor = self.factors[id(shard.communicator)]
        if factor != 1.0:
            view.mul_(factor)

    def _wipe(self, shard: Shard, p: torch.nn.Parameter) -> None:
        """Nothing has come for a shard yet: this rank's own gradient must not be taken for the mean."""
        if shard.axis is None or p.grad is None or p.grad.layout is not torch.strided:
            # a GradScaler refuses to step where it finds no gradient at all
            p.grad = torch.zeros_like(p) if self.runner.follows_scaler() else None
        else:
            shard.slice_of(p.grad).zero_()

    def after_step(self) -> None:
        """The optimizer has stepped: what the next exchange tells of it."""
        self.idle = False
        self.context.updates += 1
        made_of = simple_settings(self.optimizer)
        if made_of is None or made_of != self.made_of:
            self.hyperparameters, self.made_of = hyperparameters(self.optimizer), made_of
            self.digest = digest(self.hyperparameters)
        self.context.settings = self.digest

    def loaded(self) -> None:
        """A state was loaded."""

    def gradients_cleared(self) -> None:
        """Gradients were cleared."""
        if self.unused is not None:
            self._settle_unused(self.unused.means)
        if self.idle and self.context.updates:
            self.context.left_out += 1
        self.idle = True

    @torch.no_grad()
    def average(self) -> None:
        """After the optimizer's step: average what ranks train on their own, if it is time to."""
        for bucket in self.runner.due_averages():
            views = self.runner.views(bucket, lambda name: self.parameters[name].data)
            for view, mean in zip(views, self.runner.mean(bucket, views), strict=True):
                view.copy_(mean)

    def _outs(self, bucket: Bucket) -> list[torch.Tensor | None]:
        """Where aggregates may be written directly: float32 or exact gradients, contiguous, of this rank."""
        exact, written = bucket.communicator.compressor.traits.exact, self.written
        outs: list[torch.Tensor | None] = []
        for shard, _, p, dense in self.loads[bucket.index]:
            view = p.grad
            if view is not None and (not dense or view.layout is not torch.strided):
                view = shard.slice_of(view) if view.layout is torch.strided else None
            if view is not None and view.is_contiguous() and (exact or view.dtype is torch.float32):
                outs.append(view)
                written[shard.variable.name] = view
            else:
                outs.append(None)
        return outs
