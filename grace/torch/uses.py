"""Which of the gradients that were exchanged an optimizer has used, and which were thrown away.

What a gradient changed in a memory belongs to the update that is made with it. Where the gradient is cleared instead (a
GAN's discriminator, whose gradients the generator's loss fills; a batch that is left out), it must not come back by way
of a residual.
"""

import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

UNKNOWN = (
    "gradients were cleared, and Grace saw no optimizer that used them, nor that the parameters changed: what a memory "
    "keeps of them will be applied later. If they were thrown away (a GAN's, or a batch that was left out), give "
    "{call}(..., optimizer=optimizer), so that Grace knows whose step() to wait for; if you update the parameters "
    "yourself, by parameter.data, all is well"
)


class GradientUses:
    """The parameters whose gradients were exchanged, until it is known what became of them.

    An optimizer's ``step()`` uses the gradients that it finds. A gradient that was cleared before is thrown away, and
    one that is still there when the next one is added to it belongs to the same step. Of parameters that no optimizer
    was ever seen to hold, torch's count of changes tells whether somebody has updated them.

    Args:
        parameters: by name.
        optimizer: that of these parameters, if it is known.
        call: the function that was given the optimizer or not, for messages.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], optimizer: Any, call: str):
        self.parameters = dict(parameters)
        self.call = call
        self.names = {id(p): name for name, p in self.parameters.items()}
        self.known = set() if optimizer is None else self._held(optimizer)
        """Parameters that an optimizer holds, as far as one was given or seen."""
        self.any_known = optimizer is not None
        self.told = False
        self.arrived: set[str] = set()
        """Parameters that a backward pass gave a gradient since the last exchange."""
        self.stepping: dict[int, set[str]] = {}
        """By optimizer, those whose ``step()`` runs: it may evaluate a closure."""
        self._start()

    def _start(self) -> None:
        self.waiting: dict[str, int] = {}
        """Exchanged and not used yet: torch's count of changes of the parameter at that time."""
        self.found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        """By name: True if a gradient that was not used is there still, and True if its mean was not 0; read late."""
        self.thrown: set[str] = set()
        self.means: dict[str, torch.Tensor] = {}
        """Means that were brought; of one that shares the gradient's memory, True if it was not 0."""

    def _held(self, optimizer: Any) -> set[str]:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return {name for key, name in self.names.items() if key in held}

    def watch_arrivals(self) -> list[Any]:
        """Hook the parameters, to be told before a gradient is added to what is there; return the hooks' handles."""
        return [p.register_hook(_Arrival(self, name)) for name, p in self.parameters.items()]

    def arrives(self, name: str) -> None:
        """A backward pass is about to add to a parameter's gradient."""
        self.arrived.add(name)
        if name in self.waiting:
            self._look(name)

    def exchanged(self, names: Iterable[str]) -> None:
        """Gradients of these parameters were handed over. Those of a closure are used by the step that evaluates it."""
        evaluated = set().union(*self.stepping.values())
        for name in names:
            if name not in evaluated:
                self.waiting[name] = self.parameters[name]._version

    def brought(self, name: str, mean: torch.Tensor | None, shared: bool = False) -> None:
        """Take note of what takes the place of a parameter's gradient, or of a part of it.

        Args:
            name: the parameter's.
            mean: None if no rank had a gradient.
            shared: True if the gradient may come to lie in the same memory, so that the mean is cleared with it.
        """
        if mean is None:
            self.waiting.pop(name, None)
        else:
            self.means[name] = mean.any() if shared else mean

    def step_begins(self, optimizer: Any) -> None:
        """An optimizer uses the gradients that are there."""
        held = self._held(optimizer)
        self.known |= held
        self.any_known = True
        self.stepping[id(optimizer)] = held
        for name in held & self.waiting.keys():
            if self.parameters[name].grad is None:
                self.thrown.add(name)
            del self.waiting[name]

    def step_ends(self, optimizer: Any) -> None:
        """It has used them."""
        self.stepping.pop(id(optimizer), None)

    def _look(self, name: str) -> None:
        """Look at a gradient that no optimizer has used, before another one is added to it."""
        version, p = self.waiting.pop(name), self.parameters[name]
        if name not in self.known and p._version != version:
            return
        if p.grad is None:
            self.thrown.add(name)
            return
        gradient = getattr(p.grad, "_local_tensor", p.grad)  # a DTensor would ask the other ranks
        if name in self.means:  # one of zeros looks like a gradient that was cleared
            self.found[name] = gradient.any(), self.means[name].any()

    def throw(self, name: str, thrown: bool) -> None:
        """Say what became of a gradient that no optimizer has used."""
        del self.waiting[name]
        if thrown:
            self.thrown.add(name)

    @property
    def unused(self) -> bool:
        """Whether gradients were exchanged that no optimizer has used, cleared or not."""
        return bool(self.waiting.keys() & self.known if self.any_known else self.waiting)

    @property
    def undecided(self) -> bool:
        """Whether gradients are still there that an optimizer may use."""
        grads = [self.parameters[name].grad for name in self.waiting.keys() & self.known]
        return any(grad is not None and bool(getattr(grad, "_local_tensor", grad).any()) for grad in grads)

    def end(self, overflowed: bool = False) -> set[str]:
        """Return the parameters whose gradients were thrown away, and begin with the next step's; none of a step that
        overflowed, of which nothing is kept anyway."""
        if overflowed:
            self._start()
            return set()
        for name in list(self.waiting):
            self._look(name)
        cleared = {name for name, (there, came) in self.found.items() if came and not there}
        thrown = self.thrown | cleared
        self._start()
        if not thrown or self.any_known:
            return thrown
        if not self.told:
            self.told = True
            warnings.warn(UNKNOWN.format(call=self.call), stacklevel=2)
        return set()


class UnusedMeans:
    """The means that ``synchronize()`` has just written into ``p.grad``, until a ``step()`` uses them.

    What they changed in memories is committed when ``step()`` uses them, or when the next exchange begins with what was
    added to them, and not if they were cleared.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]):
        self.parameters = parameters
        grads = [(name, p.grad) for name, p in parameters.items()]
        self.means = {name: weakref.ref(grad) for name, grad in grads if grad is not None}

    def cleared(self) -> list[str]:
        """Return the parameters that have no gradient any more."""
        return [name for name in self.means if self.parameters[name].grad is None]

    def replaced(self) -> list[str]:
        """Return the parameters whose gradient is another tensor now: the mean was cleared in between."""
        return [name for name, mean in self.means.items() if self.parameters[name].grad is not mean()]


class _Arrival:
    """A hook of a parameter, which must not keep alive who is told."""

    def __init__(self, uses: GradientUses, name: str):
        self.uses, self.name = weakref.ref(uses), name

    def __call__(self, gradient: torch.Tensor | None) -> None:
        uses = self.uses()
        if uses is not None and gradient is not None:
            uses.arrives(self.name)
