"""Names and start values of TensorFlow and Keras variables."""

import hashlib
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from grace.backends.runtime import current
from grace.backends.together import chosen_root, compared
from grace.core.backend import Backend
from grace.core.variable import Variable
from grace.errors import ConfigError, RankError
from grace.kernels import kernels_of
from grace.session import state_schema
from grace.session.agreement import first_difference, gather_or_raise
from grace.tensorflow.distribute import refuse_distribute, strategy_of
from grace.tensorflow.preprocessing import adapt_alike


def value_of(variable: Any) -> Any:
    """The tf.Variable of a Keras variable; a tf.Variable or a tensor itself (Keras computes ``iterations`` where it
    accumulates gradients)."""
    return variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)


def is_overwritten(variable: Any) -> bool:
    """Tell whether a gradient is the variable's next value, as those of float8's scales and histories of maxima."""
    return getattr(variable, "overwrite_with_gradient", False)


def names_of(variables: Sequence[Any]) -> list[str]:
    """A name for each: a Keras variable's path, a tf.Variable's name; repeated ones get a number.

    What all paths begin with is the model's name, which Keras numbers anew in every process; it is left out.

    >>> names_of([tf.Variable(1.0, name="w"), tf.Variable(2.0, name="w")])
    ['w', 'w#2']
    >>> names_of([tf.Variable(1.0, name="sequential_3/dense/kernel"), tf.Variable(2.0, name="sequential_3/dense/bias")])
    ['dense/kernel', 'dense/bias']
    """
    names, seen = [], Counter[str]()
    paths = [getattr(variable, "path", None) or variable.name.removesuffix(":0") for variable in variables]
    models = {path.split("/")[0] for path in paths}
    shared = len(models) == 1 and all(path.count("/") > 1 for path in paths)
    for path in paths:
        name = path.split("/", 1)[1] if shared else path
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names


NUMBERING = re.compile(r"_\d+(?=[/_]|$)|#\d+$")


def alike(names: Sequence[str], others: Sequence[str]) -> bool:
    """Whether lists of names are the same, or differ only in how Keras has numbered layers and in the models that it
    names them by, which both depend on what a process has made before.

    >>> alike(["dense_3/kernel", "dense_4/kernel"], ["sequential_1/dense/kernel", "dense_1/kernel"])
    True
    >>> alike(["dense/kernel", "dense_1/kernel"], ["dense_1/kernel", "dense/kernel"])
    False
    """
    if len(names) != len(others) or set(names) == set(others):
        return list(names) == list(others)
    for pair in zip(
        names, others, strict=True
    ):  # "/" and "_" alike: the names of optimizers' variables have the latter
        short, long = sorted(("/" + NUMBERING.sub("", name).replace("_", "/") for name in pair), key=len)
        if not long.endswith(short):
            return False
    return True


def names_as_saved(names: list[str], variables: Sequence[Any], saved: dict[str, Any] | None) -> list[str]:
    """The names of these variables in what is to be loaded, if they are :func:`alike` and so are the shapes; or else
    ``names``."""
    try:
        state_schema.check(saved)
    except ConfigError:  # there is none, or all ranks hear of it when it is loaded
        return names
    before = (saved or {}).get("pieces", {})
    if list(before) == names or not alike(names, list(before)):
        return names
    if any(list(cut.get("shape", ())) != list(v.shape) for cut, v in zip(before.values(), variables, strict=True)):
        return names
    pairs = [f"{old!r} for {new!r}" for old, new in zip(before, names, strict=True) if old != new]
    more = f" and {len(pairs) - 3} more" if len(pairs) > 3 else ""
    warnings.warn(
        "the checkpoint's names of variables differ from this model's only as Keras numbers layers, and names models "
        f"in models; matched by position and shape: {', '.join(pairs[:3])}{more}",
        stacklevel=2,
    )
    return list(before)


def described_as(name: str, variable: Any, sparse: bool) -> Variable:
    """What the exchange knows of a variable; it raises if that cannot be exchanged."""
    refuse_distribute(strategy_of(value_of(variable)))
    dtype = tf.as_dtype(variable.dtype).name
    if not dtype.startswith(("float", "bfloat")):
        raise ConfigError(f"variable {name!r} is {dtype}; Grace exchanges float16, bfloat16, float32 and float64")
    if None in tuple(variable.shape):
        raise ConfigError(f"variable {name!r} has no fixed shape ({tuple(variable.shape)}), which an exchange needs")
    return Variable(name, tuple(int(n) for n in variable.shape), dtype, "tensorflow", sparse)


def broadcast_variables(
    variables: Iterable[Any] | keras.Model,
    root: int = 0,
    backend: Backend | None = None,
    *,
    root_rank: int | None = None,
) -> None:
    """Give every rank the root's values, in place.

    Args:
        variables: Keras or TensorFlow variables of any dtypes, in the same order on all ranks: ``model.variables``,
            ``optimizer.variables``. Or a Keras model: then layers that were adapted to data (``Normalization``,
            ``StringLookup``) compute as the root's do, too, which its variables alone do not bring about.
        root: the rank whose values count.
        backend: the engine; that of ``grace.init()`` if left out.
        root_rank: Horovod's name of ``root``.

    Raises:
        ConfigError: ``root`` is no rank; nothing was broadcast.
        RankError: (on all ranks) they gave other variables; nothing was broadcast.

    >>> import grace
    >>> backend = grace.init("local")
    >>> broadcast_variables([tf.Variable([1.0, 2.0])])
    >>> grace.shutdown()
    """
    model = variables if isinstance(variables, keras.Model) else None
    found = list(variables if model is None else model.variables)
    backend = current() if backend is None else backend
    with compared(backend, "broadcast", lambda: f"from rank {chosen_root(root, root_rank, backend.size)}"):
        root = chosen_root(root, root_rank, backend.size)
        broadcast_as(names_of(found), found, root, backend)
        if model is not None:
            adapt_alike(model, root, backend)


def broadcast_as(names: list[str], variables: Sequence[Any], root: int, backend: Backend) -> None:
    """The same, of variables that the ranks compare under these names."""
    found = [value_of(variable) for variable in variables]
    refuse_distribute(*map(strategy_of, found))
    _compare(names, [f"{tf.as_dtype(v.dtype).name}{v.shape}" for v in found], root, backend)
    with backend.checked_operation(f"broadcast of {len(found)} variables"), tf.init_scope():
        for variable in found:
            value = variable.read_value()
            if value.dtype == tf.string or not value.shape.num_elements():
                continue
            if value.dtype == tf.bool:
                received = backend.broadcast(tf.cast(value, tf.uint8), root).wait()
                variable.assign(tf.cast(received, tf.bool))
                continue
            k = kernels_of(value)
            raw = k.to_bytes(value)  # engines do not know every dtype
            received = backend.broadcast(raw, root).wait()
            if backend.rank != root:
                name = tf.as_dtype(value.dtype).name
                variable.assign(k.from_bytes(received, name, tuple(value.shape)))


def start_alike(variables: Sequence[Any], beside: Sequence[Any], backend: Backend) -> None:
    """Give every rank rank 0's values, in place, of a model's variables, and of those beside them that differ.

    Most of an optimizer's begin as zeros everywhere, so they are compared first."""
    broadcast_variables(variables, 0, backend)
    mine = [hashlib.sha256(np.asarray(value_of(variable)).tobytes()).hexdigest() for variable in beside]
    told = gather_or_raise(backend, "the optimizer's variables", mine)
    same = {i for i, everyones in enumerate(zip(*told, strict=False)) if len(set(everyones)) == 1}
    different = [variable for i, variable in enumerate(beside) if i not in same]
    if any(other != mine for other in told):
        broadcast_as(names_of_slots(different), different, 0, backend)


def names_of_slots(variables: Iterable[Any]) -> list[str]:
    """Names of an optimizer's variables, without the optimizer's own name."""
    return [variable.path.split("/")[-1] for variable in variables]


def _compare(names: list[str], kinds: list[str], root: int, backend: Backend) -> None:
    """Refuse on all ranks what one of them would wait for, or take for another variable."""
    told = gather_or_raise(backend, "variables to broadcast", (root, names, kinds))
    if all(told[0][::2] == other[::2] and alike(told[0][1], other[1]) for other in told):
        return
    facts: list[Any] = [
        [("root", str(r)), *((f"the variable {n}", k) for n, k in zip(*both, strict=True))] for r, *both in told
    ]
    raise RankError(first_difference(facts, DIFFERENT, "Make the same model and optimizer on every rank"))


DIFFERENT = "the ranks are about to broadcast other variables; the first difference: "
