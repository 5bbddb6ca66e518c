"""The gradients of a rank's stages, from the end of a schedule to the optimizer's step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from grace.errors import ConfigError
from grace.exchange.bucket import Traffic
from grace.session.metrics import metrics
from grace.torch.optimizer import DistributedOptimizer
from grace.torch.pipeline.places import Places


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
        self.parameters, self.places, self.scaler = dict(parameters), places, scaler
        self.holders = {
            name: tuple(stage for stage, names in enumerate(owned) if name in names)
            for name in dict.fromkeys(name for names in owned for name in names)
        }
        """The stages that have each parameter."""
        self.tied = self._tied_groups()
        self.ready = False
        """Whether gradients were computed that are not exchanged."""
        self.optimizer: Any = None
        self.stand_in = torch.nn.Parameter(torch.zeros(1))
        if not self.parameters:  # a scaler has to follow here too
            self.optimizer = torch.optim.SGD([self.stand_in], lr=0.0)
            self.optimizer.register_step_pre_hook(self._before_step)
            self.optimizer.__class__ = type("SGD", (_Stepping, torch.optim.SGD), {})
            self.optimizer._pipeline = self
        else:
            self.optimizer = make_optimizer(list(self.parameters.values()))
            if not isinstance(self.optimizer, torch.optim.Optimizer):
                raise ConfigError(
                    f"optimizer= must make a torch optimizer of a list of parameters, and made a "
                    f"{type(self.optimizer).__name__}: optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
                )
            held = {p for group in self.optimizer.param_groups for p in group["params"]}
            if left := [name for name, p in self.parameters.items() if p.requires_grad and p not in held]:
                raise ConfigError(f"optimizer= left out {left[0]!r}: freeze it before the pipeline is made, or take it")
            self.optimizer.register_step_pre_hook(torch.compiler.disable(self._before_step))
            if places.own.size == 1:  # nobody to exchange with
                options = {"op": options.get("op", "average"), "seed": options.get("seed", 0)}
            self.optimizer = DistributedOptimizer(
                self.optimizer, list(self.parameters.items()), backend=places.own, grad_scaler=scaler, **options
            )
            self._session.paused = True  # hooks see micro-batches, before they are scaled
            cls = type(self.optimizer)
            self.optimizer.__class__ = type(cls.__name__, (_Stepping, cls), {"__module__": cls.__module__})
            self.optimizer._pipeline = self
        self.start_equal()

    @property
    def _session(self) -> Any:
        return self.optimizer._grace

    def _tied_groups(self) -> list[tuple[list[str], Any]]:
        """Names of tied parameters of this rank, with who else has copies; a replica's stages, or all where stages have
        different numbers of replicas."""
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
                    found.append((names, made))
        return found

    @torch.no_grad()
    def start_equal(self) -> None:
        """Tied parameters start from their first stage's."""
        for names, group in self.tied:
            for name in names:
                value = self.parameters[name].detach().contiguous()
                group.broadcast(value, 0).wait()
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
        for names, group in self.tied:
            for name in names:
                p = self.parameters[name]
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
                [*own, self.stand_in.grad][0].view(-1)[0] = float("inf")

    def exchange(self) -> None:
        """Exchange what was computed since the last time; every rank must call it."""
        if self.ready:
            self.ready = False
            self.prepare()
            if self.parameters:
                self.optimizer.synchronize()

    def _before_step(self, *ignored: Any) -> None:
        self.exchange()

    def metrics(self) -> dict[str, float]:
        """See :mod:`grace.session.metrics`; of a rank without parameters all is 0."""
        return self.optimizer.metrics() if self.parameters else metrics(None, Traffic())

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


class _Stepping:
    """A distributed optimizer of a pipeline."""

    _pipeline: Gradients

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """``GradScaler.step()`` asks this before it unscales gradients, which the exchange must be over by."""
        self._pipeline.exchange()
        return getattr(super(), "_step_supports_amp_scaling", False)
