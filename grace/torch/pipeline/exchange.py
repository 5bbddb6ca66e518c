"""The gradients of a rank's stages, from the end of a schedule to the optimizer's step."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from grace.backends.together import from_root
from grace.errors import ConfigError
from grace.exchange.bucket import Traffic
from grace.partition.exchange import documented, of_stage
from grace.planner.asked import Baseline
from grace.session.metrics import metrics
from grace.strategy.choices import STRATEGY
from grace.torch.optimizer import DistributedOptimizer
from grace.torch.pipeline.places import Places
from grace.torch.step_hooks import around_steps

OPTIONS = (
    *("op", "gradient_predivide_factor", "seed", "bucket_bytes", "group_bytes", "hierarchical", "sparse_as_dense"),
    "compress_after",
)
"""Of a distributed optimizer, which a pipeline hands on."""
INSTEAD = {
    "backward_passes_per_step": "accumulate under `with engine.no_sync():`",
    "resources": "builders of strategies get the replicas of each stage, and the nodes that they are on",
}


def check_options(options: Mapping[str, Any], model: torch.nn.Module) -> None:
    """Refuse what a pipeline does not hand on.

    Raises:
        ConfigError: there is such an option, or a layer has sparse gradients and ``sparse_as_dense`` was not given.
    """
    if odd := [name for name in options if name not in OPTIONS]:
        why = INSTEAD.get(odd[0], f"of a distributed optimizer's it takes {', '.join(OPTIONS)}")
        raise ConfigError(f"a pipeline has no option {odd[0]!r}: {why}")
    for name, module in model.named_modules() if not options.get("sparse_as_dense") else ():
        is_table = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        if is_table and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"the layer {name!r} has sparse gradients, which a pipeline does not exchange: give "
                "Pipeline(..., sparse_as_dense=True), or leave sparse=True out of the layer"
            )


class Gradients:
    """The parameters of this rank's stages, and their exchange over the stages' replicas. Every rank must make one.

    Args:
        owned: the parameters of each stage, by name, of all stages.
        parameters: this rank's, by name.
        make_optimizer: what the user gave, called with this rank's parameters.
        places: of this rank.
        scaler: a ``torch.amp.GradScaler``, or None.
        options: of :func:`grace.DistributedOptimizer`.
    """

    def __init__(
        self,
        owned: Sequence[Sequence[str]],
        parameters: Mapping[str, torch.nn.Parameter],
        make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        places: Places,
        scaler: Any,
        options: Mapping[str, Any],
    ):
        self.parameters, self.places, self.scaler, self.ruled = dict(parameters), places, scaler, False
        scaled = scaler is not None and scaler.is_enabled()  # which refuses an optimizer without gradients
        self.steps = any(p.requires_grad or not scaled for p in self.parameters.values())
        """True if this rank has the user's optimizer; else one of a number stands in."""
        self.holders = {
            name: tuple(stage for stage, names in enumerate(owned) if name in names)
            for name in dict.fromkeys(name for names in owned for name in names)
        }
        """The stages that have each parameter."""
        self.tied = self._tied_groups()
        self.as_dense = bool(options.get("sparse_as_dense"))
        self.ready = False
        """Whether gradients were computed that are not exchanged."""
        self.handed, self.updates = 0, 0
        """Batches whose gradients were handed over, and steps of the optimizer, which are the same on all ranks."""
        self.optimizer: Any = None
        self.stand_in = torch.nn.Parameter(torch.zeros(1))
        with places.together():
            self._make(make_optimizer)
        given = chosen_strategy(options)
        document = from_root(lambda: documented(given, self.holders))  # a file is on rank 0's host
        with places.together():
            self._distribute(options, document or given)
        self.start_equal()

    def _make(self, make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> None:
        """The user's optimizer."""
        own, made = list(self.parameters.values()), None
        try:
            made = make_optimizer(own) if self.steps else None
        except ValueError:  # torch's, of none: it takes those that train
            if any(p.requires_grad for p in own):
                raise
            self.steps = False
        if not self.steps:  # a scaler has to follow here too
            self.optimizer = torch.optim.SGD([self.stand_in], lr=0.0)
            self.optimizer.register_step_pre_hook(self._before_step)
            self.optimizer.__class__ = type("SGD", (_Stepping, torch.optim.SGD), {})
            self.optimizer._pipeline = self
        else:
            self.optimizer = made
            if not isinstance(self.optimizer, torch.optim.Optimizer):
                raise ConfigError(
                    f"optimizer= must make a torch optimizer of a list of parameters, and made a "
                    f"{type(self.optimizer).__name__}: optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
                )
            held = {p for group in self.optimizer.param_groups for p in group["params"]}
            if left := [name for name, p in self.parameters.items() if p.requires_grad and p not in held]:
                raise ConfigError(f"optimizer= left out {left[0]!r}: freeze it before the pipeline is made, or take it")
            around_steps(self.optimizer, self._before_step, None)

    def _distribute(self, options: Mapping[str, Any], strategy: Any) -> None:
        """Exchange over the replicas of this rank's stages."""
        if not self.steps:
            return
        chosen = dict(options)
        if strategy is not None:
            self.ruled = True
            chosen["strategy"] = of_stage(strategy, self.parameters)
        if self.places.own.size == 1:  # nobody to exchange with
            chosen = {"op": options.get("op", "average"), "seed": options.get("seed", 0)}
            if strategy is not None:
                chosen["strategy"] = Baseline()
        self.optimizer = DistributedOptimizer(
            self.optimizer, list(self.parameters.items()), backend=self.places.own, grad_scaler=self.scaler, **chosen
        )
        self._session.paused = True  # hooks see micro-batches, before they are scaled
        cls = type(self.optimizer)
        self.optimizer.__class__ = type(cls.__name__, (_Stepping, cls), {"__module__": cls.__module__})
        self.optimizer._pipeline = self

    @property
    def _session(self) -> Any:
        return self.optimizer._grace

    def _tied_groups(self) -> list[tuple[list[str], Any, int]]:
        """Names of tied parameters of this rank, with who else has copies (a replica's stages, or all where stages have
        different numbers of replicas), and who of them has the first stage."""
        sets: dict[tuple[int, ...], list[str]] = {}
        for name, stages in self.holders.items():
            ranks = {self.places.ranks[stage] for stage in stages}
            if len(ranks) > 1:
                sets.setdefault(tuple(sorted({self.places.ranks[stage][0] for stage in stages})), []).append(name)
        found = []
        for names in sets.values():
            columns = list(dict.fromkeys(self.places.ranks[stage] for stage in self.holders[names[0]]))
            rows = list(zip(*columns, strict=True)) if self.places.equal else [sum(columns, ())]
            for members in rows:
                made = self.places.split(tuple(sorted(members)))
                if made is not None:
                    found.append((names, made, sorted(members).index(members[0])))
        return found

    @torch.no_grad()
    def start_equal(self) -> None:
        """Tied parameters start from their first stage's."""
        for names, group, first in self.tied:
            for name in names:
                value = self.parameters[name].detach().contiguous()
                group.broadcast(value, first).wait()
                self.parameters[name].copy_(value)

    # -- from the schedule --------------------------------------------------------------------------------

    def factor(self, microbatches: int) -> float:
        """By which the sum over micro-batches becomes what the exchange's mean over replicas takes."""
        places = self.places
        return places.replicas[places.stages[0]] / places.replicas[-1] / microbatches

    @torch.no_grad()
    def prepare(self) -> None:
        """Before the exchange: sum copies of tied parameters; and an overflow anywhere is one everywhere, so that all
        memories roll back."""
        for names, group, _ in self.tied:
            for name in names:
                p = self.parameters[name]
                if not p.requires_grad:  # weight decay would move it
                    continue
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                share = 1 if self.places.equal else self.places.own.size  # a replica's, of the mean over them
                total = p.grad.contiguous().div(share)
                group.allreduce(total).wait()
                p.grad.copy_(total)
        if self.scaler is not None and self.scaler.is_enabled():
            own = [p.grad for p in self.parameters.values() if p.grad is not None]
            bad = not all(bool(torch.isfinite(gradient).all()) for gradient in own)
            self.stand_in.grad = torch.zeros(1)
            if self.places.total(float(bad)):
                [*own, self.stand_in.grad][0].fill_(float("inf"))

    def exchange(self) -> None:
        """Exchange what was computed since the last time; every rank must call it."""
        if self.ready:
            self.ready = False
            self.prepare()
            if self.steps and self.places.own.size == 1:
                self._keep_own()
            elif self.steps:
                self._tell_planner()
                self.optimizer.synchronize()
            if self.ruled:
                self._settle_copies()

    def _keep_own(self) -> None:
        """Take the gradients as means of one replica: a wire for them would be as large as they are."""
        for p in self.parameters.values():
            if p.grad is not None and p.grad.is_sparse and self.as_dense:
                p.grad = p.grad.to_dense()
        self._session.runner.commit_or_roll_back([])  # steps count, by which saves are told apart
        self._session.synchronized = True

    def _tell_planner(self) -> None:
        """Of ``strategy="auto"``: what it times is the exchange alone, which nothing hides; steps would tell of other
        stages' exchanges too."""
        auto = self._session.auto
        if auto is not None and auto.watching:
            self.places.own.allgather_object(None)  # so that nobody's schedule is taken for exchange
            auto.clock.begin()
            for name, p in self.parameters.items():
                if p.grad is not None:
                    auto.ready(name)

    @torch.no_grad()
    def _settle_copies(self) -> None:
        """A strategy may treat copies of a tied parameter differently on two stages: the first one's mean counts."""
        for names, group, first in self.tied:
            for name in (name for name in names if self.parameters[name].requires_grad):
                p = self.parameters[name]
                there = group.tensor_of([float(p.grad is not None)])
                group.broadcast(there, first).wait()
                if not float(there):  # nothing has come yet
                    p.grad = None
                    continue
                mean = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
                group.broadcast(mean, first).wait()
                p.grad = mean

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any, inner: bool = False) -> None:
        self.updates += not inner  # as of a step() that calls its parent's
        self.exchange()

    def metrics(self) -> dict[str, float]:
        """See :mod:`grace.session.metrics`; of a rank without an optimizer all is 0."""
        return self.optimizer.metrics() if self.steps else metrics(None, Traffic())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear this rank's gradients."""
        self.ready = False
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
        """Scale all gradients so that their norm, over all stages, is at most ``most``; the norm before."""
        first = {name for name, stages in self.holders.items() if stages[0] in self.places.stages}
        own = [p.grad for name, p in self.parameters.items() if p.grad is not None and name in first]
        norms = [torch.linalg.vector_norm(gradient.float(), kind).double() for gradient in own]
        mine = torch.stack([norm.cpu() for norm in norms]) if norms else torch.zeros(1, dtype=torch.float64)
        if kind == float("inf"):
            every = self.places.backend.allgather_object(float(mine.max()))
            total = torch.tensor(max(every))
        else:
            every = self.places.backend.allgather_object(float((mine**kind).sum()) / self.places.own.size)
            total = torch.tensor(sum(every) ** (1 / kind))
        scale = min(1.0, most / (float(total) + 1e-6))
        for p in self.parameters.values():
            if p.grad is not None:
                p.grad.mul_(scale)
        return total


def chosen_strategy(options: Mapping[str, Any]) -> Any:
    """The user's, or what the launcher names; None if one method is for all."""
    return options.get("strategy", os.environ.get(STRATEGY) or None)


class _Stepping:
    """A distributed optimizer of a pipeline."""

    _pipeline: Gradients

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """``GradScaler.step()`` asks this before it unscales gradients, which the exchange must be over by."""
        self._pipeline.exchange()
        return getattr(super(), "_step_supports_amp_scaling", False)
