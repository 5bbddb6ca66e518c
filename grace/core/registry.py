"""The registry of compressors, memories, communicators, outer optimizers, strategy builders and rules.

Built-in ones are the classes in ``grace/compressors``, ``grace/memories``, ``grace/communicators``, ``grace/outer``,
``grace/strategy/builders``, ``grace/planner/builders`` and ``grace/strategy/rules``, found by importing these folders'
modules (a file may hold a compressor and its memory); others register themselves (:func:`register`) or are
found through entry points, whose groups have the folders' names: ``grace.compressors``, ``grace.memories``,
``grace.communicators``, ``grace.outer``, ``grace.strategy.builders`` and ``grace.strategy.rules``.
"""

import dataclasses
import functools
import importlib
import pkgutil
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from grace.core import specs
from grace.core.component import Component
from grace.core.composition import Composed
from grace.core.compressor import Compressor
from grace.core.schema_words import hint
from grace.errors import ConfigError

KINDS = {
    "compressor": "compressors",
    "memory": "memories",
    "communicator": "communicators",
    "outer": "outer",
    "builder": "strategy.builders",
    "rule": "strategy.rules",
}
MORE = {"builder": ("planner.builders",)}
"""Further packages of a kind."""
SHARING = {"compressor", "memory", "communicator"}
"""Kinds that may be defined in each other's modules."""
ARGUMENTS = {"builder": "strategy", **dict.fromkeys(("compressor", "memory", "communicator", "outer"))}
"""Argument of optimizers that takes a kind; None if it has the kind's name. No argument takes rules."""
_registered: dict[str, dict[str, type[Component]]] = {kind: {} for kind in KINDS}


def register(cls: type[Component]) -> type[Component]:
    """Register a component by its ``name``; usable as a decorator.

    Raises:
        ConfigError: the class has no name, or the name is taken.

    >>> from grace import Compressor
    >>> @register
    ... class Mine(Compressor):
    ...     name = "mine_for_the_doctest"
    >>> type(make("compressor", "mine_for_the_doctest")).__name__
    'Mine'
    """
    if not cls.name or not cls.name.isidentifier():
        raise ConfigError(f"{cls.__qualname__} needs a class attribute name = '...', a plain word")
    taken = known(cls.kind).get(cls.name)
    # The same name in the same place is a module that runs again, such as a notebook's cell.
    if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ConfigError(f"the {cls.kind} name {cls.name!r} is taken by {taken.__module__}.{taken.__qualname__}")
    if cls.name in _discover(cls.kind)[1]:
        raise ConfigError(f"the {cls.kind} name {cls.name!r} is a short name of {_discover(cls.kind)[1][cls.name]}")
    _registered[cls.kind][cls.name] = cls
    return cls


def known(kind: str) -> dict[str, type[Component]]:
    """Return all components of a kind ("compressor", "memory", "communicator", "outer", "builder", "rule"), by name.

    >>> sorted(known("memory"))
    ['dgc', 'efsignsgd', 'loco', 'none', 'residual']
    """
    return dict(sorted({**_discover(kind)[0], **_registered[kind]}.items()))


def parameterless(kind: str) -> list[str]:
    """Return the components of a kind that are made by their names alone: all parameters have defaults.

    >>> parameterless("memory")
    ['dgc', 'efsignsgd', 'loco', 'none', 'residual']
    """
    return [name for name, cls in known(kind).items() if dataclasses.MISSING not in cls.parameters().values()]


def find(kind: str, name: str) -> type[Component] | None:
    """Return the component of a name; None if it is not known.

    >>> find("memory", "residual").name
    'residual'
    """
    return _registered[kind].get(name) or _discover(kind)[0].get(name)


def noun(kind: str) -> str:
    """Return the noun for components of a kind.

    >>> noun("memory"), noun("outer")
    ('memory', 'outer optimizer')
    """
    return "outer optimizer" if kind == "outer" else kind


def aliases(kind: str) -> dict[str, dict[str, object]]:
    """Return the short names of a kind, and the dict specs that they stand for.

    >>> aliases("compressor")["bf16"]
    {'name': 'cast', 'dtype': 'bf16'}
    """
    return dict(_discover(kind)[1])


def unusable(kind: str) -> dict[str, ConfigError]:
    """Return the errors of a kind's entry points that cannot be used, by name.

    >>> unusable("compressor")
    {}
    """
    return dict(_discover(kind)[2])


def load_entry_point(point: EntryPoint) -> Any:
    """Return the object that an entry point names.

    Raises:
        ConfigError: importing its package fails.
    """
    try:
        return point.load()
    except Exception as error:  # importing a foreign package may raise anything
        raise ConfigError(f"{_describe(point)} cannot be loaded: {type(error).__name__}: {error}") from error


def make(kind: str, spec: Component | str | dict[str, Any]) -> Any:
    """Return the component that a spec names; an object is returned as it is.

    Raises:
        ConfigError: the name, or a parameter, is not known or not legal; the message lists what is.

    >>> make("compressor", "topk(ratio=0.05)").ratio
    0.05
    >>> make("compressor", "topk(ration=0.05)")
    Traceback (most recent call last):
    grace.errors.ConfigError: compressor topk has no parameter 'ration'; it has: ratio=0.01, chunk=0, warmup_steps=0
    >>> make("compressor", "topq")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    grace.errors.ConfigError: unknown compressor 'topq' (did you mean 'topk'?); known: ...
    """
    if isinstance(spec, Component):
        if spec.kind != kind:
            raise ConfigError(f"{type(spec).__name__} is a {spec.kind}, where a {kind} is needed")
        return spec
    parts = specs.split(spec) if kind == "compressor" else None
    if parts is not None:
        if any(isinstance(part, dict) and specs.split(part) for part in parts):
            raise ConfigError("a composition has two parts, and none of them is one itself")
        return Composed(make(kind, parts[0]), make(kind, parts[1]))
    name, parameters = specs.parse(spec)
    if name in _discover(kind)[1]:
        name, defaults = specs.parse(_discover(kind)[1][name])
        parameters = {**defaults, **parameters}  # the user's win
    return _class(kind, name)(**checked(kind, name, parameters))


def legal_communicators(compressor: Compressor) -> list[str]:
    """Return the names of the communicators that can carry a compressor's payloads.

    >>> legal_communicators(make("compressor", "topk"))
    ['allgather', 'broadcast', 'reduce_broadcast', 'scatter_merge']
    """
    classes: Any = known("communicator").items()
    return [name for name, cls in classes if cls.accepts(compressor) is None]


def legal_memories(compressor: Compressor) -> list[str]:
    """Return the names of the memories that can serve a compressor.

    >>> legal_memories(make("compressor", "onebit"))
    ['efsignsgd', 'loco', 'residual']
    """
    classes: Any = known("memory").items()
    needed = compressor.traits.needs_memory
    return [name for name, cls in classes if cls.accepts(compressor) is None and (cls.stateful or not needed)]


def _class(kind: str, name: str) -> type[Component]:
    components = known(kind)
    if name not in components and name in unusable(kind):
        why = unusable(kind)[name]
        # A new error: one object that is raised again and again would collect their tracebacks.
        raise ConfigError(str(why)) from why.__cause__
    if name not in components:
        names = sorted([*components, *_discover(kind)[1]])
        said = _other_kind(kind, name) or hint(name, names)
        raise ConfigError(f"unknown {noun(kind)} {name!r}{said}; known: {', '.join(names)}")
    return components[name]


def _other_kind(kind: str, name: str) -> str:
    """Return a note on a name that is of another kind, with the argument that takes it; empty if it is of none."""
    for other, argument in ARGUMENTS.items():
        if other != kind and name in known(other):
            article = "an" if other == "outer" else "a"
            return f" (it is {article} {noun(other)}: {argument or other}={name!r})"
    return ""


def checked(kind: str, name: str, parameters: dict[str, object]) -> dict[str, object]:
    """Return the parameters if the component has all of them and needs no others.

    Raises:
        ConfigError: one is unknown or missing; the message lists the component's parameters.
    """
    valid = _class(kind, name).parameters()
    for key in parameters:
        if key not in valid:
            has = ", ".join(k if v is dataclasses.MISSING else f"{k}={v!r}" for k, v in valid.items())
            raise ConfigError(f"{kind} {name} has no parameter {key!r}; it has: {has or 'none'}")
    for key, default in valid.items():
        if default is dataclasses.MISSING and key not in parameters:
            raise ConfigError(f"{kind} {name} needs {key}")
    return parameters


def _describe(point: EntryPoint) -> str:
    package = "" if point.dist is None else f" in the package {point.dist.name} {point.dist.version}"
    return f"the entry point {point.name} = {point.value} of {point.group}{package}"


@functools.cache
def _discover(kind: str) -> tuple[dict[str, type[Component]], dict[str, dict[str, object]], dict[str, ConfigError]]:
    """Return the built-in and entry point components of a kind, the aliases that built-in modules define, and the
    errors of entry points that cannot be used."""
    classes: dict[str, type[Component]] = {}
    aliases: dict[str, dict[str, object]] = {}
    for other, folder in KINDS.items():
        if kind != other and not {kind, other} <= SHARING:
            continue
        packages = [importlib.import_module(f"grace.{place}") for place in (folder, *MORE.get(other, ()))]
        found = [f"{p.__name__}.{info.name}" for p in packages for info in pkgutil.iter_modules(p.__path__)]
        for module in map(importlib.import_module, found):
            if kind == other:
                aliases.update(getattr(module, "ALIASES", {}))
            for value in vars(module).values():
                here = isinstance(value, type) and issubclass(value, Component) and value.__module__ == module.__name__
                # A class without a name of its own is a base, and no component that a spec can name.
                if here and "name" in vars(value) and value.kind == kind:
                    classes[value.name] = value
    unusable: dict[str, ConfigError] = {}
    for point in entry_points(group=f"grace.{KINDS[kind]}"):
        try:
            value = load_entry_point(point)
        except ConfigError as error:
            unusable[point.name] = error
            continue
        if getattr(value, "kind", None) == kind:
            # A package cannot replace a method of Grace: specs in checkpoints would mean another one.
            classes.setdefault(point.name, value)
        else:
            unusable[point.name] = ConfigError(f"{_describe(point)} is no {kind}")
    return classes, aliases, unusable
