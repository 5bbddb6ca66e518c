"""Tracking of exchanged gradients: the ones that an optimizer has used, and the ones that were discarded.

The change that a gradient makes in a memory belongs to the update that is made with the gradient. If the gradient is
cleared instead (a GAN's discriminator, whose gradients the generator's loss fills; a batch that is left out), the
gradient must not return by way of a residual.
"""

import threading
import weakref
from collections.abc import Iterable, Mapping

import torch
from torch.utils.hooks import RemovableHandle

from grace.errors import warn
from grace.torch.step_hooks import is_stepping

UNKNOWN = (
    "gradients were cleared, and Grace saw no optimizer that used them, nor that the parameters changed: what a memory "
    "keeps of them will be applied later. {advice}If you update the parameters yourself, by parameter.data, all is well"
)
ADVICE = (
    "If they were thrown away (a GAN's, or a batch that was left out), give {call}(..., optimizer=optimizer), so that "
    "Grace knows whose step() to wait for. "
)


class GradientUses:
    """The parameters whose gradients were exchanged, until each gradient is known to be used or discarded.

    An optimizer's ``step()`` uses the gradients that it finds. A gradient that was cleared before is discarded. A
    gradient that still exists when the next one is added to it belongs to the same step. For parameters that no known
    optimizer holds, torch's version counter shows whether the program has updated them.

    Args:
        parameters: the parameters, by name.
        optimizer: their optimizer; None if it is not known.
        call: name of the function to which the optimizer may be given, for messages; empty if there is none.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer | None, call: str
    ):
        self.parameters = dict(parameters)
        self.call = call
        self.names = {id(p): name for name, p in self.parameters.items()}
        self.held_parameters = set() if optimizer is None else self._names_held_by(optimizer)
        """Names of parameters that a known optimizer holds: one that was given, or whose step was seen."""
        self.optimizer_seen = optimizer is not None
        self.warned = False
        self.arrived: set[str] = set()
        """Names of parameters that received a gradient from a backward pass since the last exchange."""
        self.stepping: dict[int, tuple[int, set[str]]] = {}
        """The thread, and the parameter names, of optimizers whose ``step()`` is running, which may evaluate a closure;
        by id."""
        self._reset()

    def _reset(self) -> None:
        """Clear the record of the current exchange."""
        self.waiting: dict[str, int] = {}
        """Version counter of each parameter at its exchange, by name; a used gradient's name is removed."""
        self.inspected: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        """Two flags by name, read late: an unused gradient is not 0, and its mean was not 0."""
        self.discarded: set[str] = set()
        self.means: dict[str, torch.Tensor] = {}
        """The means by name; for a mean that shares the gradient's memory, a flag that it was not 0."""

    def _names_held_by(self, optimizer: torch.optim.Optimizer) -> set[str]:
        """Return the names of the parameters that an optimizer holds."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return {name for key, name in self.names.items() if key in held}

    def register_arrival_hooks(self) -> list[RemovableHandle]:
        """Register hooks that run before a gradient is added to the existing one; return their handles."""
        return [p.register_hook(_ArrivalHook(self, name)) for name, p in self.parameters.items()]

    def record_arrival(self, name: str) -> None:
        """Record that a backward pass is about to add to a parameter's gradient."""
        self.arrived.add(name)
        if name in self.waiting:
            self._inspect(name)

    def record_exchange(self, names: Iterable[str]) -> None:
        """Record that gradients of these parameters were handed over. Gradients of a closure are used by the step that
        evaluates the closure, so they do not wait for a step."""
        if self.stepping:  # without those that raised: torch calls no hook after them
            self.stepping = {key: one for key, one in self.stepping.items() if is_stepping(one[0])}
        evaluated = set().union(*(held for _, held in self.stepping.values()))
        for name in names:
            if name not in evaluated:
                self.waiting[name] = self.parameters[name]._version

    def record_mean(self, name: str, mean: torch.Tensor | None, shared: bool = False) -> None:
        """Record the mean that replaces a parameter's gradient, or a part of it.

        Args:
            name: the parameter's name.
            mean: the mean; None if no rank had a gradient.
            shared: True if the gradient may come to share the mean's memory, so that both are cleared together.
        """
        if mean is None:
            self.waiting.pop(name, None)
        else:
            self.means[name] = mean.any() if shared else mean

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer uses the gradients that exist. Called before its ``step()``."""
        held = self._names_held_by(optimizer)
        self.held_parameters |= held
        self.optimizer_seen = True
        self.stepping[id(optimizer)] = threading.get_ident(), held
        for name in held & self.waiting.keys():
            if self.parameters[name].grad is None:  # it was cleared, so this step cannot use it
                self.discarded.add(name)
            del self.waiting[name]

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer has used the gradients. Called after its ``step()``."""
        self.stepping.pop(id(optimizer), None)

    def _inspect(self, name: str) -> None:
        """Inspect a gradient that no optimizer has used, before another one is added to it."""
        version = self.waiting.pop(name)
        p = self.parameters[name]
        if name not in self.held_parameters and p._version != version:
            return  # the program updated the parameter itself, so it has used the gradient
        if p.grad is None:
            self.discarded.add(name)
            return
        gradient = getattr(p.grad, "_local_tensor", p.grad)  # any() of a DTensor is a collective
        if name in self.means:  # without its mean, a gradient of zeros looks like a cleared one
            self.inspected[name] = gradient.any(), self.means[name].any()

    def resolve(self, name: str, discarded: bool) -> None:
        """Record whether a gradient that no optimizer has used was discarded."""
        del self.waiting[name]
        if discarded:
            self.discarded.add(name)

    def unused_gradients(self) -> list[torch.Tensor]:
        """Return this rank's parts of gradients that were exchanged and that no optimizer has used, but not those of
        zeros: they were cleared."""
        names = self.waiting.keys() & self.held_parameters if self.optimizer_seen else self.waiting
        gradients = [self.parameters[name].grad for name in names]
        parts = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients if gradient is not None]
        return [part for part in parts if part.any()]

    @property
    def undecided(self) -> str:
        """Name of a parameter whose gradient exists, so that an optimizer may still use it; empty if there is none."""
        for name in self.waiting:
            grad = self.parameters[name].grad if name in self.held_parameters else None
            if grad is not None and getattr(grad, "_local_tensor", grad).any():
                return name
        return ""

    def end_exchange(self, nothing_kept: bool = False) -> set[str]:
        """Return the names of parameters whose gradients were discarded, and reset the record for the next step.

        The result is empty if no memory keeps anything of the step, as after an overflow, and if no optimizer is known.
        """
        if nothing_kept:
            self._reset()
            return set()
        for name in list(self.waiting):
            self._inspect(name)
        cleared = {name for name, (exists, existed) in self.inspected.items() if existed and not exists}
        discarded = self.discarded | cleared
        self._reset()
        if not discarded or self.optimizer_seen:
            return discarded
        if not self.warned:
            self.warned = True
            advice = ADVICE.format(call=self.call) if self.call else ""
            warn(UNKNOWN.format(advice=advice))
        return set()


class UnusedMeans:
    """The means that ``synchronize()`` has just written into ``p.grad``, until a ``step()`` uses them.

    Their changes to memories are committed when ``step()`` uses the means, or when the next exchange begins with
    gradients that were added to them. They are rolled back if the means were cleared.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]):
        self.parameters = parameters
        grads = [(name, p.grad) for name, p in parameters.items()]
        self.means = {name: weakref.ref(grad) for name, grad in grads if grad is not None}

    def find_cleared(self) -> list[str]:
        """Return the names of parameters that have no gradient any more."""
        return [name for name in self.means if self.parameters[name].grad is None]

    def find_replaced(self) -> list[str]:
        """Return the names of parameters whose gradient is another tensor now: the mean was cleared in between."""
        return [name for name, mean in self.means.items() if self.parameters[name].grad is not mean()]


class _ArrivalHook:
    """Hook of a parameter that records the arrival of a gradient, without keeping the record alive."""

    def __init__(self, uses: GradientUses, name: str):
        self.uses = weakref.ref(uses)
        self.name = name

    def __call__(self, gradient: torch.Tensor | None) -> None:
        uses = self.uses()
        if uses is not None and gradient is not None:
            uses.record_arrival(self.name)
