"""What every distributed optimizer needs: its parameters' exchanger, and the way of gradients in and out of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from grace.backend import Backend
from grace.communicator import Communicator
from grace.component import Context
from grace.errors import ConfigError, ExchangeError
from grace.exchange import Group, Outcome
from grace.exchanger import build_exchanger
from grace.reduction import Reduction, check_integer
from grace.torch.parameters import broadcast_parameters, check_memory, named, variables


def parts(
    parameters: Mapping[str, torch.nn.Parameter], groups: int | Sequence[Sequence[torch.Tensor]] | None, each: bool
) -> list[list[str]] | None:
    """Names of the parameters that may share a collective, Horovod's ``groups``.

    Args:
        parameters: by name.
        groups: how many sets, or the sets (parameters in none of them are on their own).
        each: if ``groups`` is None, every parameter is on its own (and the engine joins small messages).

    >>> weights = {name: torch.nn.Parameter(torch.zeros(2)) for name in "abc"}
    >>> parts(weights, 2, each=True), parts(weights, [[weights["c"], weights["a"]]], each=True)
    ([['a', 'b'], ['c']], [['c', 'a'], ['b']])
    """
    if groups is None or groups == 0:
        return [[name] for name in parameters] if each else None
    if isinstance(groups, int):
        check_integer("groups", groups)
        names, count = list(parameters), min(groups, len(parameters))
        small, larger = divmod(len(names), max(1, count))
        starts = [i * small + min(i, larger) for i in range(count + 1)]
        return [names[a:b] for a, b in pairwise(starts)]
    name_of = {p: name for name, p in parameters.items()}
    given = [[name_of[p] for p in group if p in name_of] for group in _tensors(groups)]
    taken = Counter(name for group in given for name in group)
    twice = [name for name, count in taken.items() if count > 1]
    if twice:
        raise ConfigError(f"groups has the parameter {twice[0]!r} more than once")
    return [*(group for group in given if group), *([name] for name in parameters if name not in taken)]


def _tensors(groups: Any) -> Any:
    if all(isinstance(p, torch.Tensor) for group in groups for p in group):
        return groups
    raise ConfigError("groups must be a whole number, or lists of parameters")


class Session:
    """The parameters of an optimizer, their exchanger, and the gradients that are on their way.

    Args:
        optimizer: the user's.
        parameters: ``named_parameters`` as the user gave them.
        choices: compressor, memory and communicator, likewise.
        backend: the engine.
        passes: backward passes per step.
        reduction: what the result is.
        groups: parameters that may share a collective: how many such sets, or the sets; None for all.
        group_bytes: bytes of gradient that are exchanged in one collective.
        seed: of the stochastic methods.
        grad_scaler: the scaler whose scale memories follow.
        sparse_as_dense: exchange sparse gradients as dense ones.
        broadcast: start from rank 0's parameter values.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Any,
        choices: tuple[Any, Any, Any],
        backend: Backend,
        *,
        passes: int,
        reduction: Reduction,
        groups: int | Sequence[Sequence[torch.Tensor]] | None,
        group_bytes: int,
        seed: int,
        grad_scaler: Any,
        sparse_as_dense: bool,
        broadcast: bool,
    ):
        self.optimizer, self.grad_scaler, self.sparse_as_dense = optimizer, grad_scaler, sparse_as_dense
        self.parameters: dict[str, torch.nn.Parameter] = {}

        def list_variables():
            check_integer("backward_passes_per_step", passes)
            check_integer("group_bytes", group_bytes)
            reduction.check()
            self.parameters = named(optimizer, parameters)
            return variables(self.parameters)

        self.context = Context(seed=seed, lr=self._lr)
        facts = [
            ("backward_passes_per_step", str(passes)),
            ("the reduction", str(reduction)),
            ("group_bytes", str(group_bytes)),
            ("broadcast", str(broadcast)),
            ("grad_scaler", "none" if grad_scaler is None else "given"),
        ]
        self.exchanger = build_exchanger(
            list_variables,
            choices,
            backend,
            self.context,
            group_bytes,
            facts,
            self._check,
            lambda: parts(self.parameters, groups, each=backend.pairs_by_name),
            later=backend.elastic,
        )
        self.reduction = reduction
        self.before, self.after = reduction.factors(backend.size)
        self.group_of = {v.name: group for group in self.exchanger.groups for v in group.variables}
        self.param_group = {
            name: index
            for index, group in enumerate(optimizer.param_groups)
            for name, p in self.parameters.items()
            if any(p is other for other in group["params"])
        }
        self.versions: dict[str, tuple[torch.Tensor, int]] = {}
        if broadcast and not backend.elastic:
            broadcast_parameters(self.parameters, 0, backend)

    def _check(self, communicator: Communicator) -> None:
        check_memory(communicator.memory, self.optimizer)

    def _lr(self, name: str) -> float:
        return float(self.optimizer.param_groups[self.param_group[name]]["lr"])

    # -- gradients in ----------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, group: Group) -> None:
        """Begin a group's exchange, with zeros where this rank has no gradient."""
        if not self.versions and self.grad_scaler is not None and self.grad_scaler.is_enabled():
            self.exchanger.rescale(self.grad_scaler.get_scale())
        gradients, present = [], []
        for variable in group.variables:
            p = self.parameters[variable.name]
            present.append(p.grad is not None)
            gradient = torch.zeros_like(p) if p.grad is None else self._dense(variable.name, p)
            gradients.append(gradient if self.before == 1.0 else gradient * self.before)
            if p.grad is not None:
                self.versions[variable.name] = (p.grad, p.grad._version)
        self.exchanger.start(group, gradients, present)

    def _dense(self, name: str, p: torch.nn.Parameter) -> torch.Tensor:
        assert p.grad is not None
        if p.grad.layout is not torch.strided:
            if not self.sparse_as_dense:
                raise ConfigError(
                    f"the gradient of {name!r} is sparse ({p.grad.layout}); pass sparse_as_dense=True to exchange "
                    "it as a dense one, or make the layer dense (Embedding(sparse=False))"
                )
            p.grad = p.grad.to_dense()
        return p.grad.contiguous()

    # -- means out -------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self) -> list[Outcome]:
        """Await the exchanges begun and write what they brought into ``p.grad``."""
        self._check_untouched()
        outcomes = self.exchanger.finish(self._outs)
        for outcome in outcomes:
            p = self.parameters[outcome.variable.name]
            if outcome.value is None:
                continue
            if outcome.value is not p.grad:
                if p.grad is None:
                    p.grad = torch.empty_like(p)
                p.grad.copy_(outcome.value)
            if self.after != 1.0:
                p.grad.mul_(self.after)
        self.versions = {}
        return outcomes

    def _check_untouched(self) -> None:
        states = getattr(self.grad_scaler, "_per_optimizer_states", {})  # torch counts no version for unscale_()
        unscaled = getattr(states.get(id(self.optimizer), {}).get("stage"), "name", "") == "UNSCALED"
        for name, (gradient, version) in self.versions.items():
            p = self.parameters[name]
            if unscaled or p.grad is not gradient or gradient._version != version:
                raise ExchangeError(
                    f"the gradient of {name!r} was changed after its exchange began (by clipping, unscaling or "
                    "another backward pass). Call optimizer.synchronize() after backward and before you change "
                    "gradients; step() then uses them as they are"
                )

    def _outs(self, group: Group) -> list[torch.Tensor | None]:
        """Where aggregates may be written directly: float32 or exact gradients, contiguous, of this rank."""
        traits = group.communicator.compressor.traits
        outs: list[torch.Tensor | None] = []
        for variable in group.variables:
            grad = self.parameters[variable.name].grad
            usable = grad is not None and grad.is_contiguous() and (traits.exact or grad.dtype == torch.float32)
            outs.append(grad if usable else None)
        return outs
