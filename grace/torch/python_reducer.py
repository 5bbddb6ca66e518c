"""DistributedDataParallel whose reducer is written in Python (``optimize_ddp="python_reducer"``), for compiled autograd
to trace: gradients come one after the other."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from grace.torch.hooks import enlist, gradient_hook


class OneGradient:
    """One gradient, in the terms of DDP's buckets."""

    def __init__(self, gradient: torch.Tensor, parameter: torch.nn.Parameter, first: bool):
        self.index = lambda: 0 if first else 1
        self.is_last = lambda: True
        self.gradients, self.parameters, self.buffer = lambda: [gradient], lambda: [parameter], lambda: gradient


class OneByOne:
    """A part of :class:`grace.torch.ddp.DDPState`. Each gradient is exchanged where it is there, within a compiled
    graph too, and the mean written in its place, before anything else is done with it."""

    names: Mapping[torch.nn.Parameter, str]
    exchange: Callable[[Any], Any]
    uses: Any
    model: Any
    seen: set[str]

    def take_one_by_one(self) -> None:
        """Hook the parameters themselves: what the reducer hands over to a communication hook has no name that a graph
        could keep."""
        self.parameters = {name: p for p, name in self.names.items()}
        self.left: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}
        """The gradients that were exchanged, and torch's counts of their changes then."""
        number = enlist(self)
        for name, p in self.parameters.items():
            p.register_post_accumulate_grad_hook(gradient_hook(number, name))

    def offer(self, name: str, gradient: torch.Tensor | None) -> None:
        """A gradient has accumulated."""
        if gradient is not None and name in self.uses.waiting:
            last, version = self.left[name]
            self.uses.throw(name, thrown=gradient is not last() or gradient._version != version + 1)
        self._exchange(name, gradient)

    def offer_in_graph(self, name: str, gradient: torch.Tensor) -> None:
        """The same within a compiled graph, which writes ``p.grad`` at its end: what was there is there still."""
        self.uses.arrives(name)
        self._exchange(name, gradient)

    def _exchange(self, name: str, gradient: torch.Tensor | None) -> None:
        model = self.model()
        if gradient is None or model is None or not model.require_backward_grad_sync:
            return
        if name in self.seen:
            self.seen.clear()
        first = not self.seen
        self.seen.add(name)
        self.exchange(OneGradient(gradient, self.parameters[name], first)).wait()
        self.left[name] = weakref.ref(gradient), gradient._version
