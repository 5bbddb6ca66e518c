"""The memory contract: the state that is kept of earlier gradients."""

import copy
from numbers import Number
from typing import ClassVar

from grace.core.component import is_ours
from grace.core.compressor import Compressor, Ctx, Payload, Tensor
from grace.core.state import Value
from grace.core.transactional_dict import StatefulComponent, TransactionalDict
from grace.core.user_parts import wrap_compensate
from grace.kernels import kernels_of


class Memory(StatefulComponent):
    """Error feedback. Write ``compensate``, and ``update`` to store the part that a payload left out, in
    ``self.state[name]`` or in dicts by name (``self.residuals = {}``), which are saved and rolled back like ``state``.

    Writes to ``self.state`` take effect at the end of the step, and only if no rank's gradient
    overflowed, so a memory never has to check for NaN.

    >>> import numpy as np
    >>> from grace.compressors.topk import TopK
    >>> class Residual(Memory):
    ...     def compensate(self, tensor, name):
    ...         return tensor + self.state.get(name, 0)
    ...     def update(self, tensor, name, compressor, payload, ctx):
    ...         self.state[name] = tensor - compressor.decompress(payload, ctx)
    >>> memory, topk = Residual(), TopK(ratio=0.5)
    >>> x = memory.compensate(np.float32([3, 1]), "w")
    >>> memory.update(x, "w", topk, *topk.compress(x, "w"))
    >>> memory.state["w"]
    array([0., 1.], dtype=float32)
    """

    kind = "memory"
    stateful: ClassVar[bool] = True
    owns_momentum: ClassVar[bool] = False
    """True if the memory applies momentum itself, so that the optimizer's must be 0."""
    needs_lr: ClassVar[bool] = False
    """True if the memory reads the learning rate, so that it needs the optimizer."""
    noise_advice: ClassVar[str] = "memory='none'"
    """The choice that is recommended instead of this memory on a noisy method."""

    def __init_subclass__(cls, **kwargs: object):
        super().__init_subclass__(**kwargs)
        if "compensate" in vars(cls) and not is_ours(cls):
            cls.compensate = wrap_compensate(cls.compensate)  # type: ignore[method-assign]

    def compensate(self, tensor: Tensor, name: str) -> Tensor:
        """Return the tensor to compress instead of ``tensor``: a new float32 tensor, which ``update`` may reuse."""
        raise TypeError(f"{type(self).__name__} must define compensate(tensor, name)")

    def update(self, tensor: Tensor, name: str, compressor: Compressor, payload: Payload, ctx: Ctx) -> None:
        """Store the part of ``tensor`` (the compensated one) that ``payload`` left out.

        It runs while the payload is in flight, and ``tensor`` may be overwritten.
        For methods of several rounds it runs after them, with the aggregated payload. It may be left out."""

    def answering(self) -> "Memory":
        """Return the memory for the means that a destination compresses once more: a copy of this one without state,
        which is of gradients."""
        copied = copy.deepcopy(self)
        for part in copied.named_components().values():
            part.state.clear()
            part.state.commit()
        return copied

    def residual_tensors(self, name: str) -> list[Tensor]:
        """Return the tensors with the part of a variable's gradients that was left out so far: all tensors of floats in
        its state. A memory that keeps other tensors overrides it."""
        found = [part.state.get(name) for part in self.named_components().values()]
        values = [item for value in found for item in (value.values() if isinstance(value, dict) else (value,))]
        # NumPy's scalars have a shape, too.
        tensors = [value for value in values if hasattr(value, "shape") and not isinstance(value, Number)]
        return [tensor for tensor in tensors if _has_units(tensor)]

    @classmethod
    def accepts(cls, compressor: Compressor) -> str | None:
        """Return the reason why this memory cannot serve the compressor; None if it can."""
        return None

    def rescale(self, factor: float) -> None:
        """Multiply the state by ``factor``, by which the loss scale changed, except tensors of whole numbers or truth
        values. A memory whose state has numbers in other units than the gradient's overrides it."""
        # Dicts of users' memories (self.residuals = {}) have states of their own.
        for state in (
            self.state,
            *(part.state for part in self.named_components().values() if isinstance(part, TransactionalDict)),
        ):
            state.map(lambda value: value * factor if _has_units(value) else value)


def _has_units(value: Value) -> bool:
    """Return True for a number or a tensor of floats, which may be in the units of a gradient."""
    if isinstance(value, Number) or not hasattr(value, "dtype"):
        return True
    return kernels_of(value).dtype(value).startswith(("float", "bfloat"))


class ErrorFeedback(Memory):
    """Memory of one residual per variable: x = a r + b g, then r = x - C(x). Write ``recall`` and ``keep``.

    For Grace's own memories a fused codec computes this beside the payload, in one pass over a bucket
    (:mod:`grace.exchange.fused_codec`). A user's memory is called for each variable.

    >>> import numpy as np
    >>> from grace.compressors.topk import TopK
    >>> class Half(ErrorFeedback):
    ...     def recall(self, name):
    ...         return 0.5, self.state.get(name), 1.0
    ...     def keep(self, name, residual):
    ...         self.state[name] = residual
    >>> memory, topk = Half(), TopK(ratio=0.5)
    >>> x = memory.compensate(np.float32([3, 1]), "w")
    >>> memory.update(x, "w", topk, *topk.compress(x, "w"))
    >>> memory.compensate(np.float32([0, 0]), "w")
    array([0. , 0.5], dtype=float32)
    """

    def recall(self, name: str) -> tuple[float, Tensor | None, float]:
        """Return a, r and b; r is None if the variable has no residual yet."""
        raise TypeError(f"{type(self).__name__} must define recall(name)")

    def keep(self, name: str, residual: Tensor) -> None:
        """Store a variable's residual."""
        raise TypeError(f"{type(self).__name__} must define keep(name, residual)")

    def compensate(self, tensor: Tensor, name: str) -> Tensor:
        a, residual, b = self.recall(name)
        if residual is None:
            # The kernel of two terms, the second times 0: a new tensor, since update() writes into it.
            return kernels_of(tensor).combine(b, tensor, 0.0, tensor)
        return kernels_of(tensor).combine(a, residual, b, tensor)

    def update(self, tensor: Tensor, name: str, compressor: Compressor, payload: Payload, ctx: Ctx) -> None:
        self.keep(name, compressor.accumulate(payload, ctx, tensor, -1.0))
