"""What compressors, memories and communicators have in common: a name, parameters, a context."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from grace.errors import ConfigError
from grace.kernels.random import Stream, stream_key
from grace.state import State

C = TypeVar("C", bound="type[Component]")


@dataclasses.dataclass
class Context:
    """What a component may know about the run it is in; shared by all components of one optimizer.

    Attributes:
        seed: seed of every random number, the same on all ranks.
        step: number of exchanges so far.
        rank, size: this process and how many there are.
        loss_scale: the factor that gradients are scaled by in mixed precision.
        lr: the learning rate that the optimizer will use for a variable.
    """

    seed: int = 0
    step: int = 0
    rank: int = 0
    size: int = 1
    loss_scale: float = 1.0
    lr: Callable[[str], float] = lambda name: 1.0

    def stream(self, name: str, *, shared: bool = False) -> Stream:
        """Random numbers for one variable at this step, the same on all ranks if ``shared``."""
        who = "shared" if shared else str(self.rank)
        return Stream(stream_key(self.seed, name, who), self.step)


class Component:
    """Base of :class:`~grace.Compressor`, :class:`~grace.Memory` and :class:`~grace.Communicator`.

    A component with parameters is a dataclass; its fields are the parameters of its spec. Per-variable
    state lives in ``self.state`` (a :class:`~grace.state.State`), which is saved with the optimizer.
    """

    kind: ClassVar[str]
    name: ClassVar[str] = ""
    shared_state: ClassVar[bool] = False
    """Whether ``state`` is the same on every rank (then any rank's copy restores all)."""

    _state: State | None = None
    _context: Context | None = None

    @property
    def state(self) -> State:
        """Values per variable name, committed at the end of each successful step."""
        if self._state is None:
            object.__setattr__(self, "_state", State())
        assert self._state is not None
        return self._state

    @property
    def context(self) -> Context:
        """The run that this component takes part in (a single process until it is bound)."""
        if self._context is None:
            object.__setattr__(self, "_context", Context())
        assert self._context is not None
        return self._context

    def bind(self, context: Context) -> None:
        """Tell the component which run it is in."""
        object.__setattr__(self, "_context", context)

    @classmethod
    def parameters(cls) -> dict[str, Any]:
        """Parameter names and their defaults (``dataclasses.MISSING`` where there is none)."""
        if not dataclasses.is_dataclass(cls):
            return {}
        return {field.name: field.default for field in dataclasses.fields(cls) if field.init}

    def to_dict(self) -> dict[str, Any]:
        """The dict form of the spec: the name, and every parameter."""
        return {"name": self.name, **{key: getattr(self, key) for key in self.parameters()}}

    @property
    def spec(self) -> str:
        """The text form: the name, and the parameters that differ from their defaults.

        >>> from grace.compressors.topk import TopK
        >>> TopK(ratio=0.05).spec, TopK().spec
        ('topk(ratio=0.05)', 'topk')
        """
        changed = [
            f"{key}={getattr(self, key)!r}"
            for key, default in self.parameters().items()
            if getattr(self, key) != default
        ]
        name = self.name or type(self).__qualname__
        return f"{name}({', '.join(changed)})" if changed else name

    def refuse(self, message: str) -> ConfigError:
        """An error about this component's parameters, to be raised by the caller."""
        return ConfigError(f"{self.name or type(self).__name__}: {message}")

    def check_number(self, key: str, low: float, high: float = math.inf, *, low_open: bool = False) -> None:
        """Refuse a parameter that is not a number in [low, high] (or (low, high] if ``low_open``)."""
        value = getattr(self, key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not (value > low if low_open else value >= low) or not value <= high:
            left = "(" if low_open else "["
            raise self.refuse(f"{key} must be a number in {left}{low:g}, {high:g}], not {value!r}")
        if type(value) not in (int, float):  # NumPy's numbers are no literals of a spec
            object.__setattr__(self, key, float(value))

    def check_integer(self, key: str, low: int, high: float = math.inf) -> None:
        """Refuse a parameter that is not a whole number in [low, high]."""
        value = getattr(self, key)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.refuse(f"{key} must be a whole number in [{low}, {high:g}], not {value!r}")

    def check_choice(self, key: str, choices: tuple[Any, ...]) -> None:
        """Refuse a parameter that is not one of ``choices``."""
        value = getattr(self, key)
        if value not in choices or isinstance(value, bool) != isinstance(choices[0], bool):
            raise self.refuse(f"{key} must be one of {', '.join(map(repr, choices))}, not {value!r}")
