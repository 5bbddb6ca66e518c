"""Checks of users' arguments: the optimizer, and the communicator in GRACE's call forms."""

import functools
import sys
from collections.abc import Callable
from typing import TypeVar, cast

from grace.core.component import Component
from grace.errors import ConfigError

F = TypeVar("F", bound=Callable[..., object])


def accept_grace_argument(function: F) -> F:
    """Let a function that takes ``communicator=`` accept GRACE's forms for Horovod, too: ``f(x, grc, ...)`` and
    ``f(x, grace=grc)``.

    >>> accept_grace_argument(lambda x, **options: options)(1, grace="topk")
    Traceback (most recent call last):
    grace.errors.ConfigError: grace= takes a communicator, as grace.from_params({...}) makes one, not 'topk'
    """

    @functools.wraps(function)
    def called(*args: object, **options: object) -> object:
        named, placed = options.pop("grace", None), None
        if named is not None and not _is_communicator(named):
            raise ConfigError(f"grace= takes a communicator, as grace.from_params({{...}}) makes one, not {named!r}")
        # Positional, as in GRACE's hvd.DistributedOptimizer(optimizer, grc, ...).
        if _is_communicator(*args[1:2]):
            placed, args = args[1], (args[0], *args[2:])
        ways = [way for way in (options.pop("communicator", None), named, placed) if way is not None]
        if len(ways) > 1:
            raise ConfigError("the communicator is given twice: give it once, as communicator=")
        return function(*args, **options, **({"communicator": ways[0]} if ways else {}))

    return cast(F, called)


def do_not_convert(function: F) -> F:
    """Mark a function so that AutoGraph, which rewrites what a ``tf.function`` calls, runs it as it stands.

    >>> do_not_convert(lambda x: x)(1)
    1
    """
    function.autograph_info__ = {}  # type: ignore[attr-defined]  # what AutoGraph looks for
    return function


def _is_communicator(value: object = None) -> bool:
    return isinstance(value, Component) and value.kind == "communicator"


def optimizer_type_error(value: object) -> ConfigError:
    """Return the error for a value of another type than an optimizer; it names the type, and the likely correction.

    >>> print(optimizer_type_error([1, 2]))
    grace.DistributedOptimizer takes an optimizer of torch or Keras, not a list of 2: call it for each optimizer
    """
    said, hint = f"an object of {_name(type(value))}", ""
    held = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
    inner = next((part for part in held if _is_instance(part, "torch", "optim.Optimizer")), None)
    on = keras_backend() if _is_instance(value, "keras", "optimizers.Optimizer") else "tensorflow"
    if on != "tensorflow":
        return keras_backend_error(on)
    if value is None:
        said = "None"
    elif isinstance(value, type):
        said, hint = f"the class {_name(value)}", f": make an object of it, {value.__name__}(...), and give that"
    elif isinstance(value, str) or (isinstance(value, dict) and "class_name" in value):  # as model.compile takes them
        said, hint = repr(value), f": if it is Keras's, give keras.optimizers.get({value!r})"
    elif isinstance(value, (list, tuple, dict)):
        said, hint = f"a {type(value).__name__} of {len(value)}", ": call it for each optimizer"
    elif _is_instance(value, "torch", "nn.Module"):
        said = f"the model ({type(value).__name__})"
        hint = ": grace.DistributedOptimizer(optimizer, model.named_parameters(), ...)"
    elif _is_instance(value, "keras", "Model"):
        said = f"the model ({type(value).__name__})"
        hint = ": model.compile(grace.DistributedOptimizer(optimizer, ...), ...)"
    elif type(value).__module__.startswith("tensorflow.python.training"):
        hint = ": those of TensorFlow 1 need sessions. Take one of tf.keras.optimizers, in model.compile or with a tape"
    elif inner is not None:
        hint = f": give its optimizer ({type(inner).__name__}), before anything wraps it"
    return ConfigError(f"grace.DistributedOptimizer takes an optimizer of torch or Keras, not {said}{hint}")


def keras_backend() -> str:
    """Return the name of Keras's backend. Keras must be imported."""
    return sys.modules["keras"].backend.backend()


def check_keras_backend() -> None:
    """Raise ConfigError if Keras, which must be imported, does not run on TensorFlow."""
    if keras_backend() != "tensorflow":
        raise keras_backend_error(keras_backend())


def keras_backend_error(backend: str) -> ConfigError:
    """Return the error for a backend of Keras other than TensorFlow; it says what to do instead.

    >>> print(keras_backend_error("jax"))
    Keras runs on jax here, whose gradients Grace does not exchange: set KERAS_BACKEND=tensorflow before it is imported
    """
    if backend != "torch":
        does = "whose gradients Grace does not exchange: set KERAS_BACKEND=tensorflow before it is imported"
        return ConfigError(f"Keras runs on {backend} here, {does}")
    return ConfigError(
        "Keras runs on torch here, and its optimizers cannot exchange gradients there; torch's can. Its models are "
        "torch modules, so write opt = grace.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr), "
        "model.named_parameters(), ...), and let your loop, or your model's train_step, call opt.zero_grad(), "
        "loss.backward() and opt.step() (examples/torch/keras_on_torch.py). Or set KERAS_BACKEND=tensorflow before it "
        "is imported"
    )


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_instance(value: object, module: str, path: str) -> bool:
    """Return True if a value is an instance of a framework's class. Nothing is imported for it: a framework that was
    never imported has no instances."""
    found: object = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    return isinstance(found, type) and isinstance(value, found)
