"""Base of the distributed optimizers' sessions: starts the exchanges of ``p.grad``, bucket by bucket, and writes the
means back into it."""

import contextlib
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from grace.core.backend import Backend
from grace.core.communicator import Communicator
from grace.core.context import Context
from grace.core.variable import Variable
from grace.core.weak_calls import WeakCall
from grace.errors import ConfigError, ExchangeError, PayloadError
from grace.exchange.bucket import Bucket, Outcome
from grace.exchange.header import digest
from grace.exchange.sparse_rows import Gradient, SparseRows, scaled
from grace.exchange.tracing import recorder
from grace.session import checkpoint
from grace.session.exchange_plan import ExchangePlan
from grace.session.hierarchy import advise_hierarchy
from grace.session.hyperparameters import hyperparameter_facts, momentum_owners
from grace.session.outer_rounds import OuterRounds
from grace.session.settings import Settings, check_integer
from grace.session.setup import build_step_runner
from grace.session.sharding import Shard
from grace.session.step_runner import StepRunner
from grace.session.switching import build_replacement, switch_plan
from grace.session.versions import public
from grace.strategy.choices import AutoRequest, Choices
from grace.strategy.execution import StrategyPlan
from grace.strategy.plan import Strategy
from grace.torch.auto import copies, driver_of
from grace.torch.fsdp_layout import ShardGroup, find_layouts
from grace.torch.gradient_uses import UnusedMeans
from grace.torch.gradients import dense_gradient, gradient_rows
from grace.torch.initial_sync import broadcast_parameters, initial_facts, initial_tensors
from grace.torch.lifecycle import check_not_distributed
from grace.torch.local_model import TorchModel
from grace.torch.parameters import (
    NamedParameters,
    check_momentum,
    check_optimizer,
    find_sparse_parameters,
    horovod_groups,
    hyperparameters,
    local_part,
    make_variables,
    named_trainable_parameters,
    scaler_enabled,
)
from grace.torch.step_hooks import ScalerHook, initializing
from grace.torch.wrappers import check_unwrapped

if TYPE_CHECKING:  # the planner is loaded only by who asks for it
    from grace.planner.driver import Driver

NOT_HYPERPARAMETERS = {"params", "param_names"}
"""Entries of a parameter group that are no hyperparameters."""
IMMUTABLE = {int, float, bool, str, type(None)}
OR_ANEW = "or call optimizer.close() and make the optimizer distributed anew"
CHANGED = "was changed after its exchange began (by clipping, unscaling or another backward pass)"
CHANGED_EARLY = "was changed before its exchange began (by clipping, unscaling or another backward pass)"


class Session:
    """The torch side of an optimizer's exchanges: it passes the gradients of each bucket to the runner, and writes the
    means back into ``p.grad``.

    Args:
        optimizer: the user's optimizer.
        parameters: ``named_parameters`` as the user gave them.
        choices: compressor, memory, communicator and strategy as the user gave them.
        backend: the engine.
        passes: backward passes per step.
        groups: parameters that may share a collective: how many such sets, or the sets; None for all.
        grad_scaler: the scaler whose scale memories follow.
        settings: the reduction, sizes of buckets, seed and switches, as ``DistributedOptimizer`` documents them.
    """

    ranks_load_alone = False
    """True if each rank loads states and sets hyperparameters alone; the first exchange then compares them."""
    in_graph: Collection[str] = ()
    """Names of parameters whose gradients came from a compiled graph in this step, which may replace ``p.grad``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: NamedParameters,
        choices: Choices,
        backend: Backend,
        *,
        passes: int,
        groups: int | Sequence[Sequence[torch.Tensor]] | None,
        grad_scaler: torch.amp.GradScaler | None,
        settings: Settings,
    ):
        # 1. What the user gave.
        self._optimizer = weakref.ref(optimizer)  # the optimizer refers to this session
        self.grad_scaler = grad_scaler
        self.settings = settings
        self.sparse_known = isinstance(parameters, torch.nn.Module)
        """True if the model tells which of its parameters have sparse gradients."""
        self.has_chosen_groups = groups is not None and groups != 0
        self.shard_group = _shard_group(optimizer, parameters, choices, backend)
        """The ranks that have the other parts of the parameters; None if this rank has whole ones."""
        lr = WeakCall(self._lr, otherwise=1.0)
        self.context = Context(seed=settings.seed, lr=lr, predivide=settings.reduction.predivide)
        self.hooks: list[RemovableHandle | ScalerHook] = []
        """Handles that remove this session's hooks; empty once the optimizer was closed."""
        self.finalizer: weakref.finalize[..., torch.optim.Optimizer] | None = None
        """Detaches this session when Python deletes the optimizer."""
        # 2. The optimizer as it is now, which later steps are compared with.
        self.optimizer_type = type(optimizer).__name__
        self.in_optimizer = parameters_in(optimizer)
        """All parameters that the optimizer's groups had at the beginning."""
        self.parameter_count = len(self.in_optimizer)
        """Number of those that they had at the last step."""
        self.hyperparameters = hyperparameters(optimizer)
        """Hyperparameters of the last step."""
        self.digest = digest(self.hyperparameters)
        self.hyperparameter_source = immutable_settings(optimizer)
        # 3. Its variables and their plan, found while the ranks agree on a runner.
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.frozen: dict[str, torch.Tensor] = {}
        """Parameters of the optimizer that require no gradients, by name."""
        self.not_float64: dict[str, torch.Tensor] = {}
        """Exchanged parameters whose dtype is narrower than float64, by name."""
        self.shapes: list[torch.Size] = []
        """Shapes of the parameters, in order, which buffers and fused codecs were made for."""
        self.plan: ExchangePlan | None = None
        self.auto_request: AutoRequest | None = None
        start: dict[str, torch.Tensor] = {}
        self.runner = self._agree_on_runner(optimizer, parameters, choices, backend, passes, groups, start)
        group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self.group_number = {name: group_of[id(p)] for name, p in self.parameters.items()}
        """Number of the optimizer's parameter group by parameter name."""
        # 4. Outer rounds, and tables of buckets.
        self.local_model = TorchModel(self, parameters)
        """Access of outer rounds to parameters, buffers and the optimizer's state."""
        self.outer_rounds: OuterRounds | None = None
        """The outer rounds of parameters that ranks train alone; None if there are none."""
        self.loaded_memories: tuple[object, str] | None = None
        """The last state that ``grace.torch.Memories`` loaded, and how, until the next step: torch's functions for
        state dicts may load one rank's parameters after it."""
        self._connect_rounds()
        self._index_buckets()
        # 5. The step in progress.
        self.checked = False
        self.cleared_since_step = False
        """True if gradients were cleared and the optimizer was not used since."""
        self.gradient_versions: dict[int, tuple[list[torch.Tensor | None], list[int]]] = {}
        """Gradients of each bucket whose exchange has begun, and their versions at that time."""
        self.buffer_versions: dict[int, int] = {}
        """Version of each tensor that gradients are views of when the last of them arrived, by the tensor's id."""
        self.output_views: dict[str, torch.Tensor] = {}
        """Views of gradients that aggregates are written into directly, by variable."""
        self.unused_means: UnusedMeans | None = None
        recorder.note(updates_follow=True)
        # 6. All ranks start with equal parameters.
        if settings.broadcast and not backend.elastic:  # elastic training broadcasts when ranks have gathered
            broadcast_parameters({name: local_part(tensor.detach()) for name, tensor in start.items()}, 0, backend)
        self.driver: Driver | None = None if self.auto_request is None else driver_of(self)

    def _agree_on_runner(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: NamedParameters,
        choices: Choices,
        backend: Backend,
        passes: int,
        groups: int | Sequence[Sequence[torch.Tensor]] | None,
        start: dict[str, torch.Tensor],
    ) -> StepRunner:
        """Return the runner of the variables and the plan, which all ranks have compared; or raise on all of them.

        Args:
            start: filled with the tensors that must start equal, by name.
        """
        compared = () if self.ranks_load_alone else self.hyperparameters
        facts = [
            ("torch", public(torch.__version__)),
            ("backward_passes_per_step", str(passes)),
            *self.settings.facts(),
            ("grad_scaler", "none" if self.grad_scaler is None else "given"),
            *hyperparameter_facts(self.optimizer_type, compared),
        ]
        runner = build_step_runner(
            partial(self._list_variables, optimizer, parameters, passes, start, facts),
            partial(self._choose_plan, choices, groups, facts),
            backend,
            self.context,
            facts,
            self._check_communicator,
            backend.elastic,
            self.settings.hierarchical,
            self.settings.compress_after,
        )
        try:
            if not backend.elastic:  # whose ranks have not met yet
                advise_hierarchy(runner)
            self._check_plan(runner)
            if self.shard_group is not None:
                self.shard_group.connect()
                runner.shard_label = self.shard_group.label
        except BaseException:
            runner.close()
            raise
        runner.callbacks.follows_scaler = partial(scaler_enabled, self.grad_scaler)
        runner.callbacks.hyperparameters = WeakCall(self.describe_hyperparameters, otherwise=())
        return runner

    def describe_hyperparameters(self) -> list[tuple[str, str]]:
        """Return the hyperparameters of the last step, as facts for the ranks to compare."""
        return hyperparameter_facts(self.optimizer_type, self.hyperparameters)

    def _list_variables(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: NamedParameters,
        passes: int,
        start: dict[str, torch.Tensor],
        facts: list[tuple[str, str]],
    ) -> list[Variable]:
        """Check the settings and list the variables to exchange.

        Args:
            start: filled with the tensors that must start equal, by name.
            facts: extended by the facts of these tensors that ranks compare.

        Raises:
            ConfigError: a setting or a parameter cannot work.
        """
        check_integer("backward_passes_per_step", passes)
        self.settings.check()
        if named_parameters is not None and not isinstance(named_parameters, torch.nn.Module):
            named_parameters = list(named_parameters)  # they may come from a generator, and are read several times
        own = self.parameters
        own.update(named_trainable_parameters(optimizer, named_parameters))
        check_unwrapped(own)
        check_not_distributed(own)
        sparse = () if self.settings.sparse_as_dense else find_sparse_parameters(named_parameters)
        sharded: Collection[str] = ()
        if self.shard_group is not None:
            sharded = self.shard_group.modules
            facts.append(("this rank's parts of parameters", self.shard_group.label))
            whole = [name for name in own if name not in sharded and not hasattr(own[name], "device_mesh")]
            if whole:
                raise ConfigError(
                    f"parameter {whole[0]!r} is whole beside sharded ones, and so no rank of the shard group gets the "
                    "others' gradients of it: call fully_shard on the whole model too"
                )
        variables = make_variables(own, sparse, sharded)
        start.update(initial_tensors(optimizer, named_parameters))
        untrained = parameters_in(optimizer) - set(own.values())
        self.not_float64 = {name: p for name, p in own.items() if p.dtype is not torch.float64}
        self.shapes = [p.shape for p in own.values()]
        self.frozen = {name: p for name, p in start.items() if p in untrained}
        if self.settings.broadcast:
            facts.extend(initial_facts(start, variables))
        return variables

    def _choose_plan(
        self, choices: Choices, groups: int | Sequence[Sequence[torch.Tensor]] | None, facts: list[tuple[str, str]]
    ) -> ExchangePlan:
        """Return the plan for the user's choices; with ``strategy="auto"``, the plan that planning starts from."""
        limits = self.settings.limits.for_sets if self.has_chosen_groups else self.settings.limits
        self.auto_request = choices.auto_request()
        if self.auto_request is not None:
            self.settings.check_auto()
            facts.append(("the strategy", self.auto_request.options.spec))
            choices = self.auto_request.starting_choices(choices)
        sets = partial(
            WeakCall(self._names_of_groups), groups
        )  # the plan keeps it, and must not keep the session alive
        self.plan = choices.plan(limits, sets, sparse_known=self.sparse_known)
        return self.plan

    def _names_of_groups(self, groups: int | Sequence[Sequence[torch.Tensor]] | None) -> list[list[str]] | None:
        """Return the names of the parameters that may share a collective; None if all may."""
        unbucketed = () if self.sparse_known else self.unbucketed(self.parameters)
        return horovod_groups(self.parameters, groups, unbucketed)

    @property
    def optimizer(self) -> Any:
        """The user's optimizer; None once it was deleted."""
        return self._optimizer()

    @property
    def strategy(self) -> Strategy | None:
        """The strategy that is executed; None without one."""
        return None if self.plan is None else self.plan.strategy

    def unbucketed(self, parameters: Mapping[str, torch.nn.Parameter]) -> Collection[str]:
        """Return the names of parameters that share no bucket, unless the user puts them into one."""
        return ()

    @property
    def in_progress(self) -> bool:
        """True if a step is in progress: exchanges were begun, or are about to be, that may still be dropped."""
        return self.runner.in_progress

    def _check_communicator(self, communicator: Communicator) -> None:
        """Refuse a communicator that does not go with the optimizer."""
        check_optimizer(communicator, self.optimizer)

    def check_unchanged_optimizer(self) -> None:
        """Check before the first collective of a step that the optimizer can still make this step.

        Raises:
            ConfigError: the optimizer, or a parameter, was changed since the optimizer was made distributed, and
                exchanges cannot follow.
        """
        for name, p in self.frozen.items():
            if p.requires_grad:
                raise ConfigError(
                    f"the parameter {name!r} requires gradients now, and did not when the optimizer was made "
                    "distributed: they would not be exchanged, and the ranks would drift apart. Let it require them "
                    f"before grace.DistributedOptimizer (you may freeze it afterwards), {OR_ANEW}"
                )
        for name, p in self.not_float64.items():
            if p.dtype is torch.float64:
                raise ConfigError(
                    f"the parameter {name!r} is float64 now, and was not when the optimizer was made distributed, "
                    "which settled what is exchanged. Call model.to(torch.float64) before grace.DistributedOptimizer, "
                    f"{OR_ANEW}"
                )
        # Kernels read as many numbers as the shape at the beginning says: of a smaller tensor, foreign memory.
        if [p.shape for p in self.parameters.values()] != self.shapes:
            each = zip(self.parameters.items(), self.shapes, strict=True)
            name, now, was = next((name, p.shape, shape) for (name, p), shape in each if p.shape != shape)
            raise ConfigError(
                f"the parameter {name!r} has the shape {tuple(now)} now, and had {tuple(was)} when the optimizer was "
                "made distributed, which settled what is exchanged. Resize it before grace.DistributedOptimizer, "
                f"{OR_ANEW}"
            )
        count = sum([len(group["params"]) for group in self.optimizer.param_groups])
        if count != self.parameter_count:
            self._check_appended()
            self.parameter_count = count
        if self.momenta:
            check_momentum(self.momenta, self.optimizer, later=True)
        self.checked = True

    def _check_appended(self) -> None:
        """Refuse parameters that were added to the optimizer's groups; those that were removed are trained no more."""
        for number, group in enumerate(self.optimizer.param_groups):
            for p in group["params"]:
                if p not in self.in_optimizer:
                    raise ConfigError(
                        f"a parameter of shape {tuple(p.shape)} was added to param_groups[{number}] after the "
                        "optimizer was made distributed: its gradients would not be exchanged, and the ranks would "
                        f"drift apart. Add it before grace.DistributedOptimizer, {OR_ANEW}"
                    )

    def check_unchanged_gradients(self) -> None:
        """Compare gradients whose exchange has begun with their identity and version at that time.

        Raises:
            ExchangeError: a gradient was changed after its exchange began.
        """
        unscaled = self.grad_scaler is not None and self.unscaled
        for index, (held, versions) in self.gradient_versions.items():
            for (_, name, p, _), gradient, version in zip(self.bucket_contents[index], held, versions, strict=True):
                if gradient is None:
                    continue
                same = gradient._version == version or self.changed_by_neighbours(gradient)
                unchanged = name in self.in_graph or (same and p.grad is gradient)
                if not unchanged or unscaled:
                    raise self._changed_gradient(name, CHANGED)

    def changed_by_neighbours(self, gradient: torch.Tensor) -> bool:
        """Return True if the last change of a gradient's version came with a gradient in the same buffer: all views of
        a tensor have one version counter, which each backward pass of one of them increases."""
        return gradient._version == self.buffer_versions.get(id(gradient._base))

    @property
    def unscaled(self) -> bool:
        """True if the user called the gradient scaler's ``unscale_()``, which does not increase ``_version``."""
        states = getattr(self.grad_scaler, "_per_optimizer_states", {})
        return getattr(states.get(id(self.optimizer), {}).get("stage"), "name", "") == "UNSCALED"

    def _changed_gradient(self, name: str, what: str) -> ExchangeError:
        """Return the error for a gradient that was changed when only its exchange may change it."""
        check_unwrapped(self.parameters)  # DDP may have wrapped the model since; that error says more
        return ExchangeError(
            f"the gradient of {name!r} {what}. Call optimizer.synchronize() after backward and before you change "
            "gradients; step() then uses them as they are"
        )

    def _lr(self, name: str) -> float:
        """Return the learning rate of a variable."""
        whole = self.runner.shards[name].whole.name
        return float(self.optimizer.param_groups[self.group_number[whole]]["lr"])

    def _index_buckets(self) -> None:
        """Compute the tables that are the same at every step: the contents of each bucket, and the buckets of each
        parameter."""
        shards = self.runner.shards
        buckets = self.runner.buckets
        self.bucket_contents: list[list[tuple[Shard, str, torch.nn.Parameter, bool]]] = []
        """For each bucket: shards, names of their parameters, the parameters, and True for a whole dense parameter."""
        self.buckets_of: dict[str, list[Bucket]] = {name: [] for name in self.parameters}
        self.bucket_parameters = [0] * len(buckets)
        """Number of parameters in each bucket."""
        for bucket in buckets:
            contents = []
            for variable in bucket.variables:
                shard = shards[variable.name]
                name = shard.whole.name
                dense = shard.axis is None and not variable.sparse
                contents.append((shard, name, self.parameters[name], dense))
            self.bucket_contents.append(contents)
            for name in dict.fromkeys(name for _, name, _, _ in contents):
                self.buckets_of[name].append(bucket)
                self.bucket_parameters[bucket.index] += 1
            # Buffers and programs are made now, and not in the first step; sizes of sparse gradients are not known,
            # and elastic ranks may change before it.
            if not (bucket.variables[0].sparse or self.runner.backend.elastic):
                self.runner.prepare(bucket, contents[0][2].detach())
        gradients = [c for c in self.runner.communicators if not self.runner.outer_rounds.exchanges_drifts_by(c)]
        self.momenta = momentum_owners(gradients)
        """Memories and compressors that apply momentum."""
        reduction = self.settings.reduction
        size = self.runner.backend.size
        self.factors = {id(c): reduction.factor(c.compressor.votes, size) for c in self.runner.communicators}
        """Factor that aggregates are multiplied with, by the communicator's id."""
        self.in_place = all(factor == 1.0 for factor in self.factors.values())
        """True if no aggregate is multiplied, so that one that was written into ``p.grad`` is complete."""
        rows = [(name, parts) for name, parts in self.runner.shards_of.items() if parts[0].whole.sparse]
        self.partly_exchanged = [
            name for name, parts in rows if 0 < sum(shard.outer is not None for shard in parts) < len(parts)
        ]
        """Names of sparse variables that have exchanged and unexchanged parts."""

    def _check_plan(self, runner: StepRunner) -> None:
        """Refuse a runner whose plan does not go with the settings, or with sharded parameters."""
        self.settings.check_sums(runner.communicators, bool(runner.outer_rounds))
        if self.shard_group is not None and runner.buckets:
            raise ConfigError(
                f"the strategy exchanges the gradient of {runner.buckets[0].names[0]!r} in every step, and the "
                "parameters are sharded: give outer, over ranks, to all variables, or exchange all gradients by "
                "grace.torch.register_fsdp_hook(model, mesh['replicate'], ...)"
            )
        in_step = [name for name, shard in runner.shards.items() if shard.outer is None]
        if self.grad_scaler is not None and runner.outer_rounds and in_step:
            raise ConfigError(
                f"the strategy keeps {in_step[0]!r} in step and lets ranks train other variables alone: their gradient "
                "scalers skip different steps, so its values would differ by rank. Give all variables outer, or train "
                "in bfloat16 without a scaler"
            )
        unbound = [name for name, shard in runner.shards.items() if not shard.communicator.sync]
        if unbound and scaler_enabled(self.grad_scaler):
            raise ConfigError(
                f"the means of {unbound[0]!r} are applied when they arrive (sync=False), in other steps on each rank: "
                "after an overflow the ranks' gradient scalers would skip different steps, and the weights would "
                "differ for good. Choose staleness=, or train in bfloat16 without a scaler"
            )

    def switch(self, plan: ExchangePlan) -> None:
        """Switch to another plan between two steps, on every rank; see :func:`switch_plan`, which may raise."""
        checkpoint.check_settled(self)
        self.commit_used_means()
        own, checks = self.parameters.__getitem__, (self._check_communicator, self._check_plan)
        self.switch_runner(switch_plan(self.runner, plan, own, self.flush, *checks), plan)

    def build_runner(self, strategy: Strategy) -> tuple[StepRunner, ExchangePlan]:
        """Return a runner for a strategy, into which a state is to be loaded, and its plan. Every rank must call it."""
        plan = StrategyPlan(strategy, self.sparse_known)
        return build_replacement(self.runner, plan, self._check_communicator), plan

    def switch_runner(self, runner: StepRunner, plan: ExchangePlan) -> None:
        """Replace the runner and its plan, between two steps."""
        self.runner = runner
        self.plan = plan
        self._index_buckets()
        self._connect_rounds()

    def copies(self) -> dict[str, torch.Tensor]:
        """Return copies of the dense gradients that exist."""
        return copies(self.parameters)

    # -- gradients in ----------------------------------------------------------------------------------

    @torch.no_grad()
    def start_bucket(self, bucket: Bucket) -> None:
        """Begin a bucket's exchange, with zeros where this rank has no gradient."""
        if self.unused_means is not None:
            self._commit_unused(self.unused_means.find_replaced())
        if self.grad_scaler is not None and not self.gradient_versions and self.grad_scaler.is_enabled():
            self.runner.rescale(self.grad_scaler.get_scale())  # once a step, at its first bucket
        gradients = list[Gradient]()
        held = list[torch.Tensor | None]()
        versions = list[int]()
        for shard, name, p, dense in self.bucket_contents[bucket.index]:
            gradient = p.grad
            plain = dense and gradient is not None and gradient.layout is torch.strided and not gradient.requires_grad
            # The usual case needs no copy. The memory of a lazily negated gradient holds other numbers.
            if plain and gradient.is_contiguous() and not gradient.is_neg():  # type: ignore[union-attr]
                gradients.append(gradient)
            else:
                sparse = shard.variable.sparse
                values = gradient_rows(name, p) if sparse else dense_gradient(name, p, self.settings.sparse_as_dense)
                gradients.append(shard.slice_of(values))
                gradient = p.grad  # dense_gradient may have replaced it by a dense one
            held.append(gradient)
            versions.append(0 if gradient is None else gradient._version)
        # To notice gradients that are changed before the means arrive.
        self.gradient_versions[bucket.index] = held, versions
        with self.aborting_on_error():
            self.runner.start_round_trip(bucket, gradients, [gradient is not None for gradient in held])

    @contextlib.contextmanager
    def aborting_on_error(self) -> Iterator[None]:
        """Abandon the exchanges in progress if the engine fails in this context, so that the state of the last good
        step can be saved."""
        try:
            yield
        except PayloadError:  # the engine works, and all ranks drop the step together
            raise
        except ExchangeError:
            self.abort()
            raise

    def abort(self) -> None:
        """Discard the exchanges in progress, which the engine has given up."""
        self.runner.abort()

    # -- means that no step has used yet ---------------------------------------------------------------
    #
    # After synchronize() the means stand in p.grad, and state waits in the runner (commit_waiting). It is committed, or
    # rolled back for the parameters that are named in brackets, by what the program does next:
    #     step()                                commit_used_means    (those whose gradient is None by now)
    #     zero_grad()                           on_zero_grad         (all)
    #     backward() and another exchange       start_bucket         (those whose gradient is another tensor by now)
    #     synchronize() again                   deferring_commit     (the same)

    @contextlib.contextmanager
    def deferring_commit(self) -> Iterator[None]:
        """Return a context in which means are exchanged that no ``step()`` uses yet; state is committed later."""
        if self.unused_means is not None:
            self._commit_unused(self.unused_means.find_replaced())
        waits = self.runner.stateful or self.runner.delayed
        self.runner.waits_for_step = waits
        try:
            yield
        except BaseException:
            self.runner.waits_for_step = False
            raise
        if waits:
            self.unused_means = UnusedMeans(self.parameters)

    def commit_used_means(self) -> None:
        """Commit the state that the unused means changed: a ``step()`` uses the gradients that exist now."""
        if self.unused_means is not None:
            self._commit_unused(self.unused_means.find_cleared())

    def _commit_unused(self, discarded: Iterable[str]) -> None:
        """Commit the state that the unused means changed; roll it back for parameters whose means were discarded."""
        self.runner.commit_waiting(discarded)
        self.unused_means = None

    # -- means out -------------------------------------------------------------------------------------

    @torch.no_grad()
    def wait_and_write_means(self) -> list[Outcome]:
        """Await the exchanges begun, and write their means into ``p.grad``."""
        self.check_unchanged_gradients()  # before the means overwrite them
        with self.aborting_on_error():
            outcomes = self.runner.finish_step(self.outs)
        rows = self._local_rows() if self.partly_exchanged else {}
        views = self.output_views
        for outcome in outcomes:
            value = outcome.value
            if self.in_place and value is not None and views.get(outcome.variable.name) is value:
                continue  # the aggregate was written into p.grad already
            shard = self.runner.shards[outcome.variable.name]
            p = self.parameters[shard.whole.name]
            if outcome.value is None:
                if outcome.pending:
                    self._clear_gradient(shard, p)
            elif isinstance(outcome.value, SparseRows):
                scaled_rows = scaled(outcome.value, self.factors[id(shard.communicator)])
                rows.setdefault(shard.whole.name, []).append(shard.to_whole(scaled_rows))
            else:
                self._write(shard, p, outcome.value)
        for name, parts in rows.items():
            p = self.parameters[name]
            numbers = torch.cat([slices.rows.to(p.device, torch.int64) for slices in parts])
            values = torch.cat([slices.values.to(p.dtype) for slices in parts])
            p.grad = torch.sparse_coo_tensor(numbers[None], values, p.shape, check_invariants=False)
        self.gradient_versions = {}
        self.buffer_versions = {}
        self.output_views = {}
        return outcomes

    def _local_rows(self) -> dict[str, list[SparseRows]]:
        """Return this rank's rows of unsynchronized parts of those sparse variables that have synchronized parts
        too."""
        rows = {}
        for name in self.partly_exchanged:
            own = [shard for shard in self.runner.shards_of[name] if shard.outer is not None]
            p = self.parameters[name]
            if p.grad is not None:
                rows[name] = [shard.to_whole(shard.slice_of(gradient_rows(name, p))) for shard in own]
        return rows

    def _write(self, shard: Shard, p: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Write a shard's mean into ``p.grad``, times its factor."""
        view = self.output_views.get(shard.variable.name)
        if value is not view:
            if p.grad is None:
                p.grad = torch.empty_like(p) if shard.axis is None else torch.zeros_like(p)
            view = shard.slice_of(p.grad)
            view.copy_(value)  # type: ignore[union-attr]
        factor = self.factors[id(shard.communicator)]
        if factor != 1.0:
            view.mul_(factor)

    def _clear_gradient(self, shard: Shard, p: torch.nn.Parameter) -> None:
        """Clear the gradient of a shard whose mean has not arrived yet: this rank's own gradient must not be used as
        the mean."""
        if shard.axis is None or p.grad is None or p.grad.layout is not torch.strided:
            # GradScaler raises if it finds no gradient at all
            p.grad = torch.zeros_like(p) if self.runner.callbacks.follows_scaler() else None
        else:
            shard.slice_of(p.grad).zero_()

    def count_step(self) -> None:
        """Update the counters and the digest of hyperparameters that the next exchange compares. Called after
        ``step()``."""
        self.cleared_since_step = False
        if self.grad_scaler is not None and self.outer_rounds is not None:
            return  # ranks that train alone skip different steps: iterations are compared, and not updates
        self.context.updates += 1
        source = immutable_settings(self.optimizer)
        if source is None or source != self.hyperparameter_source:  # reading and digesting them costs more than this
            self.hyperparameters = hyperparameters(self.optimizer)
            self.hyperparameter_source = source
            self.digest = digest(self.hyperparameters)
        self.context.hyperparameter_digest = self.digest

    def on_state_loaded(self) -> None:
        """Handle that a state was loaded. Subclasses override it."""

    def on_zero_grad(self) -> None:
        """Handle that gradients were cleared: roll back the changes of discarded means, and count steps that are left
        out."""
        if initializing():  # torch.distributed.checkpoint clears the zeros that it made the optimizer's state with
            return
        if self.unused_means is not None:
            self._commit_unused(self.parameters)  # a delayed mean may not have arrived, so that it has no gradient
        if self.cleared_since_step and self.context.updates:  # cleared twice without a step: this rank left a batch out
            self.context.cleared += 1
        self.cleared_since_step = True

    # -- parameters that ranks train alone -------------------------------------------------------------

    @torch.no_grad()
    def run_rounds(self) -> None:
        """Run the outer rounds that are due after this iteration."""
        if self.outer_rounds is not None and not self.in_progress:
            with self.aborting_on_error():
                self.outer_rounds.run_due()

    @torch.no_grad()
    def flush(self) -> None:
        """Run a last round, so that all ranks have equal parameters."""
        if self.outer_rounds is not None:
            with self.aborting_on_error():
                self.outer_rounds.flush()

    def at_anchor(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which parameters, and buffers, are those that all ranks share."""
        return self.runner.outer_rounds.at_anchor()

    @contextlib.contextmanager
    def keeping_own(self) -> Iterator[None]:
        """Return a context at whose end parameters that this rank trains alone, and buffers, are as before it."""
        held = self.runner.outer_rounds.has_anchors
        tensors = (*self.parameters.values(), *self.local_model.read_buffers().values()) if held else ()
        own = [tensor.detach() for tensor in tensors]
        before = [tensor.clone() for tensor in own]
        yield
        for tensor, value in zip(own, before, strict=True):
            tensor.copy_(value)

    def _connect_rounds(self) -> None:
        """Let outer rounds read and change the model."""
        self.outer_rounds = rounds = self.runner.outer_rounds or None
        if rounds is None:
            return
        rounds.model = self.local_model
        if self.grad_scaler is None:
            names = rounds.context.api_names
            advice = "(if a GradScaler skipped it, give grad_scaler=; if its data ended, give all ranks as much)"
            rounds.context.api_names = replace(names, step=f"{names.step} {advice}")
        elif not any(isinstance(hook, ScalerHook) for hook in self.hooks):
            # A rank whose scaler skips the step runs the rounds after the scaler's update.
            self.hooks.append(ScalerHook(self.grad_scaler, self.run_rounds))
        if self.runner.backend.rank == 0:
            self.local_model.warn_of_buffers()

    def before_update(self) -> None:
        """Take the parameters for anchors before the first update changes them. Called if there are rounds.

        Raises:
            ExchangeError: parameters are the anchors now.
        """
        rounds = self.outer_rounds
        assert rounds is not None
        self.loaded_memories = None
        if rounds.needs_anchors():
            rounds.take_anchors()

    def outs(self, bucket: Bucket) -> list[torch.Tensor | None]:
        """Return the gradients that aggregates may be written into directly: float32 or exact, contiguous ones of this
        rank; None for all others."""
        exact = bucket.communicator.compressor.traits.exact
        views = self.output_views
        outs: list[torch.Tensor | None] = []
        for shard, _, p, dense in self.bucket_contents[bucket.index]:
            view = p.grad
            if view is not None and (not dense or view.layout is not torch.strided):
                view = shard.slice_of(view) if view.layout is torch.strided else None
            if view is not None and view.is_contiguous() and (exact or view.dtype is torch.float32):
                outs.append(view)
                views[shard.variable.name] = view
            else:
                outs.append(None)
        return outs


def parameters_in(optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
    """Return the parameters in an optimizer's groups."""
    return {p for group in optimizer.param_groups for p in group["params"]}


def immutable_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, object]] | None:
    """Return the settings of all parameter groups, so that a later call shows whether one was replaced. Return None if
    a setting may change in place."""
    groups = [{k: v for k, v in group.items() if k not in NOT_HYPERPARAMETERS} for group in optimizer.param_groups]
    for group in groups:
        for value in group.values():
            kinds = map(type, value) if type(value) is tuple else (type(value),)
            if not IMMUTABLE.issuperset(kinds):
                return None
    return groups


def _shard_group(
    optimizer: torch.optim.Optimizer, model: object, choices: Choices, backend: Backend
) -> ShardGroup | None:
    """Return the ranks that have the other parts of an optimizer's parameters; None if this rank has whole ones, or if
    gradients are to be exchanged, which is refused where variables are listed.

    Raises:
        ConfigError: the model is not given, or not sharded by ``fully_shard``; or the backend's ranks share a copy.
    """
    sharded = any(hasattr(p, "device_mesh") for group in optimizer.param_groups for p in group["params"])
    if not sharded or (choices.outer is None and choices.strategy is None):
        return None
    group = ShardGroup(find_layouts(model, "grace.DistributedOptimizer of sharded parameters"))
    ranks = [backend.number_of(rank) for rank in range(backend.size)]
    group.meet_replicas(ranks, "process_group= (all ranks if left out)")
    return group
