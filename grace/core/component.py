"""The base class of compressors, memories and communicators: a name, parameters, state."""

import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, ClassVar, TypeVar, cast

from grace.core.context import AnyContext, Context
from grace.core.state import State
from grace.errors import ConfigError

C = TypeVar("C", bound="Component")  # typing.Self needs Python 3.11
Natural = Annotated[int, {"minimum": 0}]
Positive = Annotated[int, {"minimum": 1}]
"""Types of parameters, with keys for the JSON Schema of strategy files. The class checks its values itself."""


class Component:
    """Base of :class:`~grace.Compressor`, :class:`~grace.Memory` and :class:`~grace.Communicator`.

    A component with parameters is a dataclass; its fields are the parameters of its spec. Per-variable
    state lives in ``self.state`` (a :class:`~grace.core.state.State`), which is saved with the optimizer.
    Components among its attributes are its parts: they are in the same run, and their state is saved, too.
    """

    kind: ClassVar[str]
    name: ClassVar[str] = ""
    own_numbers: ClassVar[tuple[str, ...]] = ()
    """Parameters that differ by rank. They are no part of the spec, which ranks compare."""
    shared_state: ClassVar[bool] = False
    """True if ``state`` is the same on every rank (then any rank's copy restores all)."""

    state: State
    """Values per variable name, committed at the end of each successful step."""
    context: Context
    """The run that this component takes part in (a single process until it is bound)."""
    _binding: bool = False
    """True while :meth:`bind` runs, which stops it at parts that know each other."""
    _owner: Callable[[], object] | None = None
    """Weak reference to the :class:`ComponentOwner` of the run that the component serves. It returns None when the run
    has ended."""

    def __new__(cls: type[C], *args: object, **options: object) -> C:
        """Create the object with a state and a context here, because users' classes may not call
        ``super().__init__``."""
        made = super().__new__(cls)
        # Past __setattr__, which refuses these two names in users' classes.
        object.__setattr__(made, "state", State(copies=not is_ours(cls)))
        object.__setattr__(made, "context", Context())
        return made

    def bind(self, context: AnyContext) -> None:
        """Set the run that the component and its parts take part in."""
        if self._binding:  # parts that know each other
            return
        object.__setattr__(self, "context", context)
        object.__setattr__(self, "_binding", True)
        try:
            for _, part in self.parts():
                part.bind(context)
        finally:
            object.__setattr__(self, "_binding", False)

    def parts(self) -> "Iterator[tuple[str, Component]]":
        """Yield the components among the attributes, those in lists and dicts too, with the attributes' names."""
        for name, value in list(vars(self).items()):
            yield from _components(name, value)

    def named_components(self) -> "dict[str, Component]":
        """Return this component (named "") and all nested parts by dotted names, each once.

        >>> import grace
        >>> list(grace.make("compressor", "topk | qsgd").named_components())
        ['', 'sparsifier', 'values']
        """
        found: dict[str, Component] = {"": self}
        seen, todo = {id(self)}, [("", self)]
        # The list grows while it is iterated: breadth first.
        for prefix, component in todo:
            for name, part in component.parts():
                if id(part) not in seen:
                    seen.add(id(part))
                    found[f"{prefix}{name}"] = part
                    todo.append((f"{prefix}{name}.", part))
        return found

    def with_context(
        self: C,
        context: Context,
        copies: "dict[int, Component] | None" = None,
        former: "Mapping[int, Component] | None" = None,
    ) -> C:
        """Return a copy of the component and its parts in another context. The copy shares their state.

        Args:
            context: the context.
            copies: takes the copies of all parts, by the ids of the originals.
            former: the ``copies`` of an earlier call; they are brought up to date instead of copies being made.

        >>> from grace.compressors.dgc import DGC
        >>> dgc = DGC(ratio=0.01, warmup_steps=4)
        >>> dgc.with_context(Context(step=4)).current_ratio, dgc.current_ratio
        (0.01, 0.25)
        """
        copies = {} if copies is None else copies
        if id(self) in copies:
            return cast(C, copies[id(self)])
        # A part that was replaced meanwhile may have left its id to an object of another class.
        known = None if former is None else former.get(id(self))
        other = cast(C, known) if type(known) is type(self) else object.__new__(type(self))
        # Registered before its parts are copied, because a part may refer to this component.
        copies[id(self)] = other
        for name, value in vars(self).items():
            object.__setattr__(other, name, _mapped(value, lambda part: part.with_context(context, copies, former)))
        object.__setattr__(other, "context", context)
        return other

    def set_owner(self, owner: object) -> None:
        """Make this component and its parts those of a :class:`ComponentOwner`. State that the steps of an ended owner
        left is cleared.

        Raises:
            ConfigError: the component, or a part of it, has another owner that still lives.
        """
        components = self.named_components().values()
        # Check all before the first one changes hands: a refusal must leave no part with another owner.
        for component in components:
            if component._owner is not None and component._owner() not in (None, owner):
                raise ConfigError(
                    f"the {component.kind} {component.spec} is in use by another distributed optimizer, and what it "
                    "remembers of one's gradients would reach the other's. Give each an object of its own, or the spec "
                    f"{component.spec!r}, which makes one; or end the other optimizer first"
                )
        for component in components:
            if component._owner is not None and component._owner() is None:  # its owner was garbage-collected
                component.state.clear()
                component.state.commit()
            object.__setattr__(component, "_owner", weakref.ref(owner))

    def release(self, owner: object) -> None:
        """Give up the ownership, if that owner has it."""
        for component in self.named_components().values():
            if component._owner is not None and component._owner() is owner:
                # Not None: the next owner then clears the state, as that of an owner that was garbage-collected.
                object.__setattr__(component, "_owner", _no_owner)

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes for copies and pickles, which are in no run yet."""
        return {key: value for key, value in vars(self).items() if key not in ("context", "_owner")}

    @classmethod
    def parameters(cls) -> dict[str, object]:
        """Return parameter names and their defaults (``dataclasses.MISSING`` for a parameter without a default)."""
        if not dataclasses.is_dataclass(cls):
            return {}
        return {field.name: field.default for field in dataclasses.fields(cls) if field.init}

    def to_dict(self) -> dict[str, object]:
        """Return the dict form of the spec: the name, and every parameter."""
        return {"name": self.name, **{key: getattr(self, key) for key in self.parameters()}}

    def keeps(self, shape: tuple[int, ...]) -> "StateForm":
        """Return the form of ``state`` for a variable of this shape, by which checkpoints that do not fit are refused:
        the shape of a float32 tensor, ``float`` for a number, a dict of these; None if it may be anything.

        >>> import grace
        >>> grace.make("memory", "efsignsgd").keeps((3, 2))
        {'residual': (3, 2), 'lr': <class 'float'>}
        """
        return None

    @property
    def spec(self) -> str:
        """Text form of the spec: the name, and the parameters that differ from their defaults.

        >>> from grace.compressors.topk import TopK
        >>> TopK(ratio=0.05).spec, TopK().spec
        ('topk(ratio=0.05)', 'topk')
        """
        changed = [
            f"{key}={getattr(self, key)!r}"
            for key, default in self.parameters().items()
            if key not in self.own_numbers
            and getattr(self, key, default) != default  # a communicator may keep it by another name
        ]
        name = self.name or type(self).__qualname__
        return f"{name}({', '.join(changed)})" if changed else name

    def error(self, message: str) -> ConfigError:
        """Return an error about this component, which the caller raises."""
        return ConfigError(f"{self.name or type(self).__name__}: {message}")

    def check_number(self, key: str, low: float, high: float = math.inf, *, low_open: bool = False) -> None:
        """Refuse a parameter that is not a number in [low, high] (or (low, high] if ``low_open``)."""
        value = getattr(self, key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # "not value <= high" refuses NaN, too, and the last test infinity where there is no upper bound.
        if not number or not (value > low if low_open else value >= low) or not value <= high or value == math.inf:
            left = "(" if low_open else "["
            right = f"{high:g}]" if high < math.inf else "inf)"
            raise self.error(f"{key} must be a number in {left}{low:g}, {right}, not {value!r}")
        if type(value) not in (int, float):  # NumPy's numbers are no literals of a spec
            object.__setattr__(self, key, float(value))

    def check_integer(self, key: str, low: int, high: float = 2**53) -> None:
        """Refuse a parameter that is not a whole number in [low, high]."""
        value = getattr(self, key)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(f"{key} must be a whole number in [{low}, {high:g}], not {value!r}")

    def check_choice(self, key: str, choices: tuple[object, ...]) -> None:
        """Refuse a parameter that is not one of ``choices``."""
        value = getattr(self, key)
        # True equals 1: neither may stand for the other.
        if value not in choices or isinstance(value, bool) != isinstance(choices[0], bool):
            raise self.error(f"{key} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def is_ours(cls: type) -> bool:
    """Return True if a class is a part of Grace, and not a user's."""
    return cls.__module__.partition(".")[0] == "grace"


StateForm = tuple[int, ...] | type[float] | Mapping[str, "StateForm"] | None
"""Form of a variable's state: a tensor's shape, a number, a dict of these by key; None for anything."""


def _components(name: str, value: object) -> Iterator[tuple[str, Component]]:
    if isinstance(value, Component):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _components(f"{name}.{i}", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _components(f"{name}.{key}", item)


class ComponentOwner:
    """Owner of the components of one run, which nobody else may use while it exists.

    The run's runner keeps it alive.
    """

    def __init__(self) -> None:
        self.components: list[Component] = []

    def claim(self, components: Iterable[Component]) -> None:
        """Become the owner of components, before anything of them is changed.

        Raises:
            ConfigError: one of them has another owner. :meth:`release` gives back those before it.
        """
        for component in components:
            component.set_owner(self)
            self.components.append(component)

    def release(self) -> None:
        """Give all components back, so that another run may use them."""
        for component in self.components:
            component.release(self)
        self.components = []


def _mapped(value: object, change: Callable[[Component], Component]) -> object:
    """Return a value with ``change`` applied to each component in it."""
    if isinstance(value, Component):
        return change(value)
    # Containers without components stay the same objects, so that a copy shares them.
    if isinstance(value, (list, tuple, dict)) and next(_components("", value), None) is not None:
        if isinstance(value, dict):
            return {key: _mapped(item, change) for key, item in value.items()}
        return type(value)(_mapped(item, change) for item in value)
    return value


def _no_owner() -> None:
    """Return None, the owner of a released component."""
