"""The gradients of a rank's stage, from the end of a schedule to the optimizer's step."""

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from grace.backends.object_collectives import from_root
from grace.core.backend import Backend
from grace.core.subclassing import with_mixins
from grace.errors import ConfigError
from grace.exchange.bucket import Traffic
from grace.pipeline.planning.exchange_prediction import strategy_document, strategy_of_stage
from grace.pipeline.torch.mesh import Mesh
from grace.pipeline.torch.plan_search import MakeOptimizer
from grace.planner.uniform_plans import Baseline
from grace.session.agreement import failing_together
from grace.session.metrics import metrics
from grace.strategy.choices import STRATEGY
from grace.strategy.execution import StrategyArg
from grace.torch.optimizer import DistributedOptimizer, HookedSession
from grace.torch.step_hooks import around_steps

OPTIONS = (
    *("op", "gradient_predivide_factor", "seed", "bucket_bytes", "group_bytes", "hierarchical", "sparse_as_dense"),
    "compress_after",
)
"""Options of a distributed optimizer that a pipeline passes on."""
INSTEAD = {
    "backward_passes_per_step": "accumulate under `with engine.no_sync():`",
    "resources": "builders of strategies get the replicas of each stage, and the nodes that they are on",
}


MEAN_OF_LOSSES = (
    "a pipeline averages losses over micro-batches and replicas, so it would change with their numbers: return the "
    "mean over rows (reduction='mean'), and choose the learning rate for it"
)


def check_mean(loss_fn: object) -> None:
    """Raise ConfigError for a loss function of torch with ``reduction="sum"``, which sums over rows."""
    keywords = loss_fn.keywords if isinstance(loss_fn, functools.partial) else {}
    if "sum" in (getattr(loss_fn, "reduction", None), keywords.get("reduction")):
        raise ConfigError(f"loss_fn sums over rows, and {MEAN_OF_LOSSES}")


def check_options(options: Mapping[str, object], model: torch.nn.Module) -> None:
    """Raise ConfigError for an option that is not passed on to the distributed optimizer, and for a layer with sparse
    gradients without ``sparse_as_dense``."""
    odd = [name for name in options if name not in OPTIONS]
    if odd:
        why = INSTEAD.get(odd[0], f"of a distributed optimizer's it takes {', '.join(OPTIONS)}")
        raise ConfigError(f"a pipeline has no option {odd[0]!r}: {why}")
    for name, module in model.named_modules() if not options.get("sparse_as_dense") else ():
        is_table = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        if is_table and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"the layer {name!r} has sparse gradients, which a pipeline does not exchange: give "
                "Pipeline(..., sparse_as_dense=True), or leave sparse=True out of the layer"
            )


@dataclass
class ComputedGradients:
    """Gradients of one schedule, by the parameter's name, until they are added to ``p.grad``, which is done once."""

    by_name: dict[str, torch.Tensor] = field(default_factory=dict)
    added: bool = False


class Gradients:
    """The parameters of this rank's stage, and their exchange over the stage's replicas, with the options of
    :func:`grace.DistributedOptimizer`. Every rank must make one. ``holders`` has the numbers of the stages that have
    each parameter of the model."""

    def __init__(
        self,
        holders: Mapping[str, tuple[int, ...]],
        parameters: Mapping[str, torch.nn.Parameter],
        make_optimizer: MakeOptimizer,
        mesh: Mesh,
        scaler: torch.amp.GradScaler | None,
        options: Mapping[str, Any],
    ):
        self.parameters = dict(parameters)
        self.mesh = mesh
        self.scaler = scaler
        self.sums = options.get("op", "average") == "sum"
        """True if the exchange adds up gradients of replicas instead of averaging them."""
        self.has_strategy = False
        scaled = scaler is not None and scaler.is_enabled()  # a GradScaler refuses an optimizer without gradients
        self.has_optimizer = any(p.requires_grad or not scaled for p in self.parameters.values())
        """True if this rank has the user's optimizer; False if it has one of a dummy parameter."""
        self.holders = holders
        self.tied = self._tied_parameters()
        self.ready = False
        """True if gradients were computed that are not exchanged."""
        self.exchanged = False
        """True if ``p.grad`` holds what an exchange left there, which further gradients may be added to."""
        self.batches = 0
        """Number of batches whose gradients were added to ``p.grad``; the same on all ranks."""
        self.updates = 0
        """Number of steps of the optimizer; the same on all ranks."""
        self.optimizer: Any = None
        """Optimizer of torch; where ``has_optimizer``, with the methods of a distributed one."""
        self.stand_in = torch.nn.Parameter(torch.zeros(1))
        with failing_together(mesh.backend, "a pipeline"):
            self._make_user_optimizer(make_optimizer)
        strategy = chosen_strategy(options)
        document = from_root(lambda: strategy_document(strategy, self.holders))  # the file is on rank 0's host
        with failing_together(mesh.backend, "a pipeline"):
            self._distribute(options, document or strategy)
        with torch.no_grad():
            for p, group, first in self.tied:  # copies start equal
                value = p.detach().contiguous()
                group.broadcast(value, first).wait()
                p.copy_(value)

    def _make_user_optimizer(self, make_optimizer: MakeOptimizer) -> None:
        """Make the user's optimizer, or one of a dummy parameter on a rank without trained parameters."""
        own = list(self.parameters.values())
        made = None
        try:
            made = make_optimizer(own) if self.has_optimizer else None
        except ValueError:  # torch refuses an empty list, which a filter for trained parameters may leave
            if any(p.requires_grad for p in own):
                raise
            self.has_optimizer = False
        if not self.has_optimizer:  # a GradScaler must update here too
            self.optimizer = torch.optim.SGD([self.stand_in], lr=0.0)
            self.optimizer.register_step_pre_hook(self._before_step)
            self._exchange_before_unscaling()
        else:
            self.optimizer = made
            if not isinstance(self.optimizer, torch.optim.Optimizer):
                raise ConfigError(
                    f"optimizer= must make a torch optimizer of a list of parameters, and made a "
                    f"{type(self.optimizer).__name__}: optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
                )
            held = {p for group in self.optimizer.param_groups for p in group["params"]}
            left = [name for name, p in self.parameters.items() if p.requires_grad and p not in held]
            if left:
                raise ConfigError(f"optimizer= left out {left[0]!r}: freeze it before the pipeline is made, or take it")
            around_steps(self.optimizer, self._before_step, None)

    def _distribute(self, options: Mapping[str, Any], strategy: StrategyArg | None) -> None:
        """Make the optimizer distributed over the replicas of this rank's stage."""
        if not self.has_optimizer:
            return
        chosen = dict(options)
        if strategy is not None:
            self.has_strategy = True
            chosen["strategy"] = strategy_of_stage(strategy, self.parameters)
        # A stage of one replica exchanges nothing (_skip_exchange), but counts steps and saves a state like others.
        if self.mesh.stage_backend.size == 1:
            chosen = {"op": options.get("op", "average"), "seed": options.get("seed", 0)}
            if strategy is not None:
                chosen["strategy"] = Baseline()
        self.optimizer = DistributedOptimizer(
            self.optimizer,
            list(self.parameters.items()),
            backend=self.mesh.stage_backend,
            grad_scaler=self.scaler,
            **chosen,
        )
        # hooks would exchange the gradients of single micro-batches, before they are scaled
        self._session.in_no_sync = True
        self._exchange_before_unscaling()

    def _exchange_before_unscaling(self) -> None:
        """Make the optimizer exchange before a GradScaler unscales."""
        # a property has to be in the class, whose name stays the user's in messages
        self.optimizer.__class__ = with_mixins(type(self.optimizer), _ExchangingOptimizer)
        self.optimizer._pipeline = self

    @property
    def _session(self) -> HookedSession:
        """Session of the distributed optimizer."""
        return self.optimizer._grace

    def _tied_parameters(self) -> list[tuple[torch.nn.Parameter, Backend, int]]:
        """Return this rank's parameters that other stages have too, each with the group of ranks with copies, and the
        group's rank that has the first stage. The group is a replica's stages, or all ranks if stages have different
        numbers of replicas."""
        by_stages: dict[tuple[int, ...], list[str]] = {}
        for name, stages in self.holders.items():
            if len(stages) > 1:
                by_stages.setdefault(stages, []).append(name)
        tied = []
        for stages, names in by_stages.items():
            columns = [self.mesh.ranks[stage] for stage in stages]
            rows = list(zip(*columns, strict=True)) if self.mesh.equal_replicas else [sum(columns, ())]
            for members in rows:
                group = self.mesh.split(tuple(sorted(members)))  # a collective: all ranks make all groups
                if group is not None:
                    tied += [(self.parameters[name], group, sorted(members).index(members[0])) for name in names]
        return tied

    # -- from the schedule --------------------------------------------------------------------------------

    def start_loss_scale(self, device: torch.device) -> None:
        """Set the scale of the losses of the next schedule: the GradScaler's, or 1."""
        self.loss_scale = 1.0
        if self.scaler is not None and self.scaler.is_enabled():
            self.scaler.scale(torch.zeros((), device=device))  # a GradScaler makes its scale at its first loss
            self.loss_scale = float(self.scaler.get_scale())

    @contextlib.contextmanager
    def computing(self) -> Iterator[ComputedGradients]:
        """Return a context for a schedule, in which ``p.grad`` is empty: the schedule scales its own gradients there.
        The context's value gets them at its end, and ``p.grad`` holds the former ones again."""
        former = {name: p.grad for name, p in self.parameters.items()}
        for p in self.parameters.values():
            p.grad = None
        computed = ComputedGradients()
        try:
            yield computed
            found = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
            computed.by_name = {name: g.to_dense() if g.is_sparse else g for name, g in found.items()}
        finally:
            for name, p in self.parameters.items():
                p.grad = former[name]

    @torch.no_grad()
    def add(self, computed: ComputedGradients, factor: float = 1.0) -> None:
        """Add a schedule's gradients, times a factor, to ``p.grad``. Refuse ones that were added before."""
        if computed.added:
            raise ConfigError("loss.backward() was called before: a pipeline's loss can be differentiated once")
        if self.exchanged:
            self._keep_tied_sums_once()
        for name, gradient in computed.by_name.items():
            p = self.parameters[name]
            scaled = gradient if factor == 1.0 else gradient * factor
            p.grad = scaled if p.grad is None else p.grad.add_(scaled)
        computed.by_name = {}  # a loss that the program keeps must not keep them
        computed.added = True
        self.ready = True
        self.batches += 1

    def _keep_tied_sums_once(self) -> None:
        """Clear the sums that copies of tied parameters got in the last exchange, but for those of the first stage, so
        that the next one does not add them up again."""
        self.exchanged = False
        for name, p in self.parameters.items():
            if self.holders[name][0] != self.mesh.stage:
                p.grad = None

    def factor(self, microbatches: int) -> float:
        """Return the factor that turns the sum over micro-batches into the input of the exchange over replicas."""
        mesh = self.mesh
        if self.sums:  # the same multiple of the mean in all stages: as many times as the last one has replicas
            return 1 / microbatches
        # losses are means over the rows of one replica of the last stage; the exchange divides by this stage's replicas
        return mesh.replicas[mesh.stage] / mesh.replicas[-1] / microbatches

    @torch.no_grad()
    def reduce_copies(self) -> None:
        """Sum the gradients of copies of tied parameters, and spread an overflow to all ranks, so that all memories
        roll back. Called before the exchange."""
        for p, group, _ in self.tied:
            if not p.requires_grad:  # with a gradient of zeros, weight decay would change it
                continue
            if p.grad is None:  # a collective: all ranks with copies start it
                p.grad = torch.zeros_like(p)
            # With unequal replicas the group has all of them, and the exchange averages or adds up over the stage's.
            share = 1 if self.mesh.equal_replicas else self.mesh.stage_backend.size
            total = p.grad.contiguous().div(1 if self.sums else share)
            group.allreduce(total).wait()
            p.grad.copy_(total.div_(share) if self.sums else total)
        if self.scaler is not None and self.scaler.is_enabled():
            own = [p.grad for p in self.parameters.values() if p.grad is not None]
            bad = not all(bool(torch.isfinite(gradient).all()) for gradient in own)
            self.stand_in.grad = torch.zeros(1)  # of a rank without gradients, whose scaler must find the overflow too
            if self.mesh.all_reduce_sum(float(bad)):
                [*own, self.stand_in.grad][0].fill_(float("inf"))

    def exchange(self) -> None:
        """Exchange the gradients that were computed since the last exchange. Every rank must call it."""
        if not self.ready:
            return
        self.ready = False
        self.exchanged = True
        self.reduce_copies()
        if self.has_optimizer and self.mesh.stage_backend.size == 1:
            self._skip_exchange()
        elif self.has_optimizer:
            self._start_timing()
            self.optimizer.synchronize()
        if self.has_strategy:
            self._broadcast_tied_means()

    def _skip_exchange(self) -> None:
        """Use the gradients as the means of a single replica. A wire for them would be as large as they are."""
        self._session.runner.commit_or_roll_back([])  # counts the step: saves of different steps must differ
        self._session.synchronized = True

    def _start_timing(self) -> None:
        """Start the planner's timing, for ``strategy="auto"``. It times only the exchange, which no computation hides;
        timing whole steps would include the exchanges of other stages."""
        driver = self._session.driver
        if driver is not None and driver.steps_left > 0:
            # wait for the other ranks' schedules, which must not count as exchange
            self.mesh.stage_backend.allgather_object(None)
            driver.timer.begin()
            for name, p in self.parameters.items():
                if p.grad is not None:
                    driver.ready(name)

    @torch.no_grad()
    def _broadcast_tied_means(self) -> None:
        """Broadcast the means of tied parameters from their first stage, since a strategy may exchange the copies on
        two stages differently."""
        for p, group, first in self.tied:
            if not p.requires_grad:
                continue
            has_mean = group.tensor_of(np.array([p.grad is not None], np.float32))
            group.broadcast(has_mean, first).wait()
            if not float(has_mean):  # a delayed mean has not arrived yet
                p.grad = None
                continue
            mean = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
            group.broadcast(mean, first).wait()
            p.grad = mean

    def _before_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object, inner: bool = False) -> None:
        """Count the update and exchange. Called before the optimizer's step."""
        self.updates += not inner  # step() may call its parent's step()
        self.exchange()

    def metrics(self) -> dict[str, float]:
        """Return numbers for a logger; see :mod:`grace.session.metrics`. On a rank without an optimizer all are 0."""
        return self.optimizer.metrics() if self.has_optimizer else metrics(None, Traffic())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear this rank's gradients."""
        self.ready = self.exchanged = False
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        """Exchange, and update."""
        self.exchange()
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
        else:
            self.optimizer.step()

    @torch.no_grad()
    def clip_norm(self, most: float, kind: float) -> torch.Tensor:
        """Scale all gradients so that their norm, over all stages, is at most ``most``. Return the norm before."""
        first = {name for name, stages in self.holders.items() if stages[0] == self.mesh.stage}
        own = [p.grad for name, p in self.parameters.items() if p.grad is not None and name in first]
        norms = [_norm(gradient, kind) for gradient in own]
        # of one replica of each stage: the others have the same gradients
        received = self.mesh.backend.allgather_object([] if self.mesh.replica else norms)
        every = [norm for of_rank in received for norm in of_rank] or [0.0]
        total = torch.linalg.vector_norm(torch.tensor(every, dtype=torch.float64), kind)
        # 1e-6 as in torch.nn.utils.clip_grad_norm_, and a norm of NaN makes all gradients NaN: min(1.0, NaN) were 1.0
        scale = min(most / (float(total) + 1e-6), 1.0)
        for p in self.parameters.values():
            if p.grad is not None:
                p.grad.mul_(scale)
        return total


def chosen_strategy(options: Mapping[str, Any]) -> StrategyArg | None:
    """Return the user's strategy, or the one that the launcher names; None if one method serves all variables."""
    return options.get("strategy", os.environ.get(STRATEGY) or None)


class Loss(torch.autograd.Function):
    """The loss as a value. Differentiating it adds the gradients that were computed with it to ``p.grad``, times the
    incoming gradient over the loss scale, which is in them already."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, anchor: torch.Tensor, value: torch.Tensor, gradients: Gradients, computed: ComputedGradients
    ) -> torch.Tensor:
        ctx.gradients, ctx.computed, ctx.scale = gradients, computed, gradients.loss_scale
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.gradients.add(ctx.computed, float(incoming[0]) / ctx.scale)
        return None, None, None, None


def _norm(gradient: torch.Tensor, kind: float) -> float:
    """Return a gradient's norm, computed in float32 or a wider dtype of its own."""
    return float(torch.linalg.vector_norm(gradient, kind, dtype=torch.promote_types(gradient.dtype, torch.float32)))


class _ExchangingOptimizer:
    """Class of a pipeline's optimizer, which exchanges before a GradScaler unscales."""

    _pipeline: Gradients

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Value of torch's attribute of this name, which ``GradScaler.step()`` reads before it unscales gradients. The
        exchange must be over by then, so reading the attribute exchanges."""
        self._pipeline.exchange()
        return getattr(super(), "_step_supports_amp_scaling", False)
