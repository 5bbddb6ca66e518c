"""Names and start values of TensorFlow and Keras variables."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Union

import keras
import numpy as np
import tensorflow as tf

from grace.backends.object_collectives import chosen_root, compared
from grace.backends.runtime import backend_or_current
from grace.core.arguments import check_keras_backend, do_not_convert
from grace.core.backend import Backend
from grace.core.variable import Variable
from grace.errors import ConfigError, RankError, warn
from grace.kernels import kernels_of
from grace.session import state_schema
from grace.session.agreement import first_difference, gather_or_raise
from grace.session.state_schema import SavedState
from grace.tensorflow.distribute import check_not_distribute, strategy_of
from grace.tensorflow.preprocessing import broadcast_adapted_layers

AnyVariable = Union["keras.Variable", "tf.Variable"]
"""Variable of Keras, which holds TensorFlow's, or TensorFlow's own."""


def value_of(variable: "AnyVariable | tf.Tensor") -> "tf.Variable | tf.Tensor":
    """Return the tf.Variable of a Keras variable; a tf.Variable or a tensor is returned as it is.

    Keras computes ``iterations``, as a tensor, where it accumulates gradients.
    """
    return variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)


def is_overwritten(variable: AnyVariable) -> bool:
    """Return True if a gradient is the variable's next value, as for the scales and histories of maxima of float8."""
    return getattr(variable, "overwrite_with_gradient", False)


def names_of(variables: Sequence[AnyVariable]) -> list[str]:
    """Return a name for each variable: a Keras variable's path, a tf.Variable's name; repeated ones get a number.

    A first part that all paths share is the model's name, which Keras numbers anew in every process; it is left out.

    >>> names_of([tf.Variable(1.0, name="w"), tf.Variable(2.0, name="w")])
    ['w', 'w#2']
    >>> names_of([tf.Variable(1.0, name="sequential_3/dense/kernel"), tf.Variable(2.0, name="sequential_3/dense/bias")])
    ['dense/kernel', 'dense/bias']
    """
    names = []
    seen = Counter[str]()
    paths = [getattr(variable, "path", None) or variable.name.removesuffix(":0") for variable in variables]
    models = {path.split("/")[0] for path in paths}
    shared = len(models) == 1 and all(path.count("/") > 1 for path in paths)
    for path in paths:
        name = path.split("/", 1)[1] if shared else path
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names


NUMBERING = re.compile(r"_\d+(?=[/_]|$)|#\d+$")
"""Numbers by which Keras tells layers of one class apart."""


def names_match(names: Sequence[str], others: Sequence[str]) -> bool:
    """Return True if lists of names are equal, or differ only in Keras's numbers of layers and in names of enclosing
    models, which both depend on what a process has made before.

    >>> names_match(["dense_3/kernel", "dense_4/kernel"], ["sequential_1/dense/kernel", "dense_1/kernel"])
    True
    >>> names_match(["dense/kernel", "dense_1/kernel"], ["dense_1/kernel", "dense/kernel"])
    False
    """
    if len(names) != len(others) or set(names) == set(others):  # the same names in another order are no match
        return list(names) == list(others)
    for pair in zip(names, others, strict=True):
        # "/" and "_" count as equal: the names of optimizers' variables have the latter
        short, long = sorted(("/" + NUMBERING.sub("", name).replace("_", "/") for name in pair), key=len)
        if not long.endswith(short):
            return False
    return True


def names_as_saved(names: list[str], variables: Sequence[AnyVariable], saved: SavedState | None) -> list[str]:
    """Return the names that a checkpoint has for these variables, if :func:`names_match` and the shapes are equal; else
    ``names``.
    """
    try:
        state_schema.check(saved)
    except ConfigError:  # no checkpoint, or a damaged one: all ranks refuse it together when it is loaded
        return names
    before = (saved or {}).get("pieces", {})
    if list(before) == names or not names_match(names, list(before)):
        return names
    if any(list(cut.get("shape", ())) != list(v.shape) for cut, v in zip(before.values(), variables, strict=True)):
        return names
    pairs = [f"{old!r} for {new!r}" for old, new in zip(before, names, strict=True) if old != new]
    more = f" and {len(pairs) - 3} more" if len(pairs) > 3 else ""
    warn(
        "the checkpoint's names of variables differ from this model's only as Keras numbers layers, and names models "
        f"in models; matched by position and shape: {', '.join(pairs[:3])}{more}"
    )
    return list(before)


def describe_variable(name: str, variable: AnyVariable, sparse: bool) -> Variable:
    """Return the exchange's description of a variable.

    Raises:
        ConfigError: the variable cannot be exchanged.
    """
    check_not_distribute(strategy_of(value_of(variable)))
    dtype = tf.as_dtype(variable.dtype).name
    if not dtype.startswith(("float", "bfloat")):
        raise ConfigError(f"variable {name!r} is {dtype}; Grace exchanges float16, bfloat16, float32 and float64")
    if None in tuple(variable.shape):
        raise ConfigError(f"variable {name!r} has no fixed shape ({tuple(variable.shape)}), which an exchange needs")
    return Variable(name, tuple(int(n) for n in variable.shape), dtype, "tensorflow", sparse)


@do_not_convert
def broadcast_variables(
    variables: "Iterable[AnyVariable] | keras.Model",  # the site is built with a stand-in for keras
    root: int = 0,
    backend: Backend | None = None,
    *,
    root_rank: int | None = None,
) -> None:
    """Give every rank the root's values, in place.

    Args:
        variables: Keras or TensorFlow variables of any dtypes, in the same order on all ranks: ``model.variables``,
            ``optimizer.variables``. Or a Keras model: then layers that were adapted to data (``Normalization``,
            ``StringLookup``) also get the state of the root's layers, of which variables are a part only.
        root: the rank whose values count.
        backend: the engine; that of ``grace.init()`` if left out.
        root_rank: Horovod's name of ``root``.

    Raises:
        ConfigError: ``root`` is no rank, or Keras does not run on TensorFlow; nothing was broadcast.
        RankError: (on all ranks) the ranks gave different variables; nothing was broadcast.

    >>> import grace
    >>> backend = grace.init("local")
    >>> broadcast_variables([tf.Variable([1.0, 2.0])])
    >>> grace.shutdown()
    """
    model = variables if isinstance(variables, keras.Model) else None
    backend = backend_or_current(backend)
    found: list[AnyVariable] = []

    def checked() -> str:
        """Find the variables. Other ranks hear of a refusal."""
        found.extend(_variables_in(variables))
        return f"from rank {chosen_root(root, root_rank, backend.size)}"

    with compared(backend, "broadcast", checked):
        root = chosen_root(root, root_rank, backend.size)
        broadcast_named(names_of(found), found, root, backend)
        if model is not None:
            broadcast_adapted_layers(model, root, backend)


def _variables_in(given: Any) -> "list[AnyVariable]":
    """Return a model's variables, or those of an iterable.

    Raises:
        ConfigError: it is no iterable of variables; or Keras does not run on TensorFlow.
    """
    try:
        found = list(given.variables if isinstance(given, keras.Model) else given)
    except TypeError:  # an optimizer, or a layer
        found = [given]
    others = [each for each in found if not isinstance(each, (tf.Variable, keras.Variable))]
    if others:
        inside = "" if others[0] is given else f" that holds an object {type(others[0]).__name__}"
        hint = ": give its .variables" if others[0] is given and hasattr(given, "variables") else ""
        kind = type(given).__name__
        raise ConfigError(
            f"broadcast_variables takes a list of variables, or a Keras model, not an object {kind}{inside}{hint}"
        )
    if any(isinstance(variable, keras.Variable) for variable in found):
        check_keras_backend()
    return found


def broadcast_named(names: list[str], variables: Sequence[AnyVariable], root: int, backend: Backend) -> None:
    """Give every rank the root's values of variables, in place; the ranks compare them under these names."""
    found = [value_of(variable) for variable in variables]
    check_not_distribute(*map(strategy_of, found))
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


def broadcast_initial(
    variables: Sequence[AnyVariable], optimizer_variables: Sequence[AnyVariable], backend: Backend
) -> None:
    """Give every rank rank 0's values, in place, of a model's variables, and of the optimizer's that differ.

    Most of an optimizer's variables begin as zeros everywhere, so hashes of them are compared first.
    """
    broadcast_variables(variables, 0, backend)
    mine = [hashlib.sha256(np.asarray(value_of(variable)).tobytes()).hexdigest() for variable in optimizer_variables]
    hashes = gather_or_raise(backend, "the optimizer's variables", mine)
    same = {i for i, of_ranks in enumerate(zip(*hashes, strict=False)) if len(set(of_ranks)) == 1}
    different = [variable for i, variable in enumerate(optimizer_variables) if i not in same]
    if any(other != mine for other in hashes):
        broadcast_named(names_of_slots(different), different, 0, backend)


def names_of_slots(variables: "Iterable[keras.Variable]") -> list[str]:
    """Return the names of an optimizer's variables, without the optimizer's own name."""
    return [variable.path.split("/")[-1] for variable in variables]


def _compare(names: list[str], kinds: list[str], root: int, backend: Backend) -> None:
    """Refuse, on all ranks, variables that would make ranks wait for each other, or be taken for other variables."""
    received = gather_or_raise(backend, "variables to broadcast", (root, names, kinds))
    first = received[0]
    if all(first[::2] == other[::2] and names_match(first[1], other[1]) for other in received):
        return
    facts: list[Sequence[tuple[str, str]]] = [
        [("root", str(r)), *((f"the variable {n}", k) for n, k in zip(*both, strict=True))] for r, *both in received
    ]
    remedy = "Make the same model and optimizer on every rank"
    raise RankError(first_difference(facts, DIFFERENT, remedy, backend.number_of))


DIFFERENT = "the ranks are about to broadcast other variables; the first difference: "
