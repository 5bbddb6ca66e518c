"""Support for DistributedDataParallel's reducer in Python (``optimize_ddp="python_reducer"``), which compiled autograd
traces: gradients arrive one by one."""

import weakref
from collections.abc import Callable, Mapping

import torch
from torch.nn.parallel import DistributedDataParallel

from grace.torch.gradient_hooks import gradient_hook, register_session
from grace.torch.gradient_uses import GradientUses


class SingleGradientBucket:
    """A bucket of one gradient, with the methods of DDP's buckets that Grace's hook calls."""

    def __init__(self, gradient: torch.Tensor, parameter: torch.nn.Parameter, first: bool):
        self.gradient = gradient
        self.parameter = parameter
        self.first = first

    def index(self) -> int:
        """Return 0 for the first gradient of a step, 1 for all others."""
        return 0 if self.first else 1

    def is_last(self) -> bool:
        """Return True: each gradient ends the record of arrivals."""
        return True

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradient, as the only one."""
        return [self.gradient]

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameter, as the only one."""
        return [self.parameter]

    def buffer(self) -> torch.Tensor:
        """Return the gradient, which is the whole buffer."""
        return self.gradient


class PythonReducer:
    """Exchange of gradients that arrive one by one. Each is exchanged when it is ready, within a compiled graph too,
    and its mean replaces it before it is used.

    Args:
        model: the model whose gradients arrive.
        parameters: its parameters that train, by name.
        uses: the record of gradients that optimizers have used.
        exchange: the work of the communication hook, which must not keep the hook's state alive.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        parameters: Mapping[str, torch.nn.Parameter],
        uses: GradientUses,
        exchange: Callable[[SingleGradientBucket], torch.futures.Future],
    ):
        self.model = weakref.ref(model)
        self.parameters = parameters
        self.uses = uses
        self.exchange = exchange
        self.seen: set[str] = set()
        """Names of the gradients that came in this step."""
        self.exchanged: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}
        """Each exchanged gradient and its version at that time, by parameter name."""

    def register_hooks(self) -> None:
        """Register a hook on every parameter. The buckets that the Python reducer passes to a communication hook have
        no name that a graph could keep."""
        number = register_session(self)
        for name, p in self.parameters.items():
            p.register_post_accumulate_grad_hook(gradient_hook(number, name))

    def begin_step(self) -> None:
        """Let the next gradient be the first of a step."""
        self.seen.clear()

    def mark_ready(self, name: str, gradient: torch.Tensor | None) -> None:
        """Exchange an accumulated gradient."""
        # In older releases, which have this attribute, DDP's C++ reducer serves every backward that is not compiled.
        if not getattr(self.model(), "_force_to_disable_cpp_reducer", True):
            return
        if gradient is not None and name in self.uses.waiting:
            last, version = self.exchanged[name]
            # A backward pass adds to the same tensor once; any other change means that the gradient was cleared.
            self.uses.resolve(name, discarded=gradient is not last() or gradient._version != version + 1)
        self._exchange(name, gradient)

    def mark_ready_in_graph(self, name: str, gradient: torch.Tensor) -> None:
        """Exchange a gradient within a compiled graph. The graph writes ``p.grad`` at its end, so the existing gradient
        was not cleared."""
        self.uses.record_arrival(name)
        self._exchange(name, gradient)

    def _exchange(self, name: str, gradient: torch.Tensor | None) -> None:
        """Exchange a gradient and await its mean, unless gradients only accumulate now."""
        model = self.model()
        if gradient is None or model is None or not model.require_backward_grad_sync:
            return
        if name in self.seen:  # a second gradient of a parameter begins another step
            self.seen.clear()
        first = not self.seen
        self.seen.add(name)
        self.exchange(SingleGradientBucket(gradient, self.parameters[name], first)).wait()
        self.exchanged[name] = weakref.ref(gradient), gradient._version
