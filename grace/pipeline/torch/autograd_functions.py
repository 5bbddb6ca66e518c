"""Backward passes that are not the derivative of forward's operations: carried into the graph, or refused by name.

``torch.export`` keeps the operations of forward. A ``torch.autograd.Function`` becomes a node of its own here, which
stages call as the model does. Hooks on tensors, parameters and modules cannot be carried.
"""

import contextlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import fx
from torch._ops import HigherOrderOperator, _get_dispatch_mode_pre_dispatch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import Function, FunctionMeta, _SingleLevelFunction
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, PythonKeyTracer, track_tensor_tree
from torch.nn.modules import module as module_hooks
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from grace.errors import ConfigError

APPLY_IS_NATIVE = vars(Function).get("apply") is vars(torch._C._FunctionBase)["apply"]
"""True from torch 2.14 on, whose ``Function.apply`` calls no method written in Python."""
TORCH_DIRECTORY = str(Path(torch.__file__).parent)
INSTEAD = (
    "a pipeline's stages run forward's operations and differentiate these, so it would train with another gradient. "
    "Write it as a torch.autograd.Function that forward applies, or leave it out"
)
CLIPPED = (
    "a pipeline's stages would run it once for each micro-batch, on gradients that are not scaled yet. Change them "
    "between engine.exchange() and the optimizer's step, or by engine.clip_grad_norm_()"
)


class AppliedFunction:
    """An ``autograd.Function`` as the operation of a node, with its arguments: None at the ``positions`` of tensors."""

    def __init__(self, cls: type[Function], args: tuple[object, ...], positions: Sequence[int]):
        self.cls = cls
        self.args = args
        self.positions = positions
        self.__name__ = self.__qualname__ = cls.__name__
        self.__module__ = __name__

    def __call__(self, *tensors: torch.Tensor) -> object:
        args = list(self.args)
        for position, tensor in zip(self.positions, tensors, strict=True):
            args[position] = tensor
        return self.cls.apply(*args)

    def __str__(self) -> str:
        return f"{self.cls.__module__}.{self.cls.__qualname__} {self.args}"


class _Placeholder(HigherOrderOperator):
    """The operation that stands for an applied Function while ``torch.export`` inspects the graph. Its first argument
    is the Function's number."""

    def __init__(self) -> None:
        super().__init__("grace_autograd_function")

    def __call__(self, number: int, *tensors: object) -> NoReturn:
        raise RuntimeError("a placeholder in a graph is not run")


_placeholder = _Placeholder()  # one for all captures: torch keeps one higher-order operator of a name


class CarriedFunctions:
    """The Functions that a model applies while it is captured."""

    def __init__(self) -> None:
        self.applied: list[AppliedFunction] = []
        self.within = False
        """True in the forward of a Function, whose operations are not recorded."""

    def insert_into(self, module: torch.nn.Module) -> None:
        """Replace placeholders by the Functions themselves, in graphs of blocks too."""
        for part in module.modules():
            for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
                if node.target is _placeholder:
                    node.target = self.applied[node.args[0]]
                    node.args = tuple(node.args[1:])

    def _apply(self, cls: type[Function], *args: object) -> object:
        """Apply a Function, and record the result as the value of a node."""
        if issubclass(cls, CheckpointFunction):  # its backward is forward's derivative, so the operations will do
            function, _, *arguments = args  # _ is preserve_rng_state: random operations are nodes like others
            return function(*arguments)  # type: ignore[operator]
        tracing = _tracing()
        original = vars(torch._C._FunctionBase)["apply"].__get__(None, cls)  # which capturing() does not replace
        if tracing is None or self.within:
            return original(*args)
        for one in pytree.tree_leaves(args):
            if isinstance(one, torch.nn.Module) or inspect.isroutine(one):
                raise ConfigError(
                    f"the autograd.Function {_describe(cls)} is applied{_model_location()} to "
                    f"{getattr(one, '__qualname__', type(one).__name__)}, whose parameters a pipeline cannot know: "
                    "apply it to tensors alone, which are carried"
                )
            if isinstance(one, FakeTensor) and not any(one is arg for arg in args):
                raise ConfigError(
                    f"the autograd.Function {_describe(cls)} is applied{_model_location()} to a list or dict of "
                    "tensors, which a pipeline does not carry: give each of them as an argument of its own"
                )
        positions = [i for i, one in enumerate(args) if isinstance(one, torch.Tensor)]
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        versions = [tensor._version for tensor in tensors]
        self.within = True  # a Function that forward applies is a part of this node
        try:
            with _below_tracing():
                result = original(*args)
        finally:
            self.within = False
        if versions != [tensor._version for tensor in tensors]:
            raise ConfigError(
                f"the autograd.Function {_describe(cls)}, applied{_model_location()}, writes to what it is given, "
                "which a pipeline does not carry: let it return a new tensor"
            )
        number = len(self.applied)
        tracer = tracing.tracer
        assert isinstance(tracer, PythonKeyTracer)  # as of torch.export
        proxies = [tracer.unwrap_proxy(tensor) for tensor in tensors]
        self.applied.append(
            AppliedFunction(cls, tuple(None if i in positions else one for i, one in enumerate(args)), positions)
        )
        name = str(cls.__name__).lower()
        proxy = tracer.create_proxy("call_function", _placeholder, (number, *proxies), {}, name=name)
        track_tensor_tree(result, proxy, constant=None, tracer=tracer)
        return result

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Return a context in which a model is captured.

        Raises:
            ConfigError: the model registers a hook on a tensor, or changes what autograd saves, in the context.
        """
        entered = saved_tensors_hooks.__enter__
        attribute = FunctionMeta.__getattribute__

        def apply(cls: type[Function], *args: object) -> object:
            """Apply a Function, and record it. Replaces ``Function.apply``."""
            return self._apply(cls, *args)

        def find(cls: type[Function], name: str) -> object:
            """Return an attribute of a Function; refuse a forward that :meth:`_apply` is not running. Replaces
            ``FunctionMeta.__getattribute__``."""
            if name == "forward" and not self.within and _tracing() is not None:
                raise ConfigError(
                    f"the autograd.Function {cls.__name__} is applied{_model_location()} by a name that kept its "
                    f"apply, where torch {torch.__version__} shows it to nobody: write {cls.__name__}.apply(...)"
                )
            return attribute(cls, name)

        def register(tensor: torch.Tensor, hook: Callable[..., object], *ignored: object, **named: object) -> NoReturn:
            """Refuse a hook on a tensor. Replaces ``Tensor.register_hook``."""
            raise ConfigError(
                f"the model registers a hook on a tensor{_model_location()} ({_describe(hook)}): {INSTEAD}"
            )

        def grad_fn(tensor: torch.Tensor) -> Node | None:
            """Return a tensor's grad_fn to torch; refuse to return it to user code. Replaces ``Tensor.grad_fn``."""
            if is_user_code(sys._getframe(1).f_code.co_filename):
                raise ConfigError(
                    f"the model reads a tensor's grad_fn{_model_location()}, which takes hooks: {INSTEAD}"
                )
            return vars(torch._C.TensorBase)["grad_fn"].__get__(tensor)

        def enter(context: saved_tensors_hooks) -> None:
            """Enter a context of saved tensors; refuse the user's. Replaces ``saved_tensors_hooks.__enter__``."""
            # torch's subclasses (of checkpoint, save_on_cpu) change no gradient; the class itself has a user's hooks
            if not type(context).__module__.startswith("torch.") or type(context) is saved_tensors_hooks:
                raise ConfigError(
                    f"the model changes what autograd saves{_model_location()} ({_describe(context.pack_hook)}): a "
                    "pipeline's stages save what forward computes. Leave it out; recompute=True saves less"
                )
            return entered(context)

        with contextlib.ExitStack() as stack:
            if APPLY_IS_NATIVE:
                stack.enter_context(_patched(Function, "apply", classmethod(apply)))
                stack.enter_context(_patched(FunctionMeta, "__getattribute__", find))
            else:  # Function.apply calls this method, even if a program saved `reverse = Reversal.apply` before
                stack.enter_context(_patched(_SingleLevelFunction, "apply", classmethod(apply)))
            stack.enter_context(_patched(torch.Tensor, "register_hook", register))
            stack.enter_context(_patched(torch.Tensor, "grad_fn", property(grad_fn)))
            stack.enter_context(_patched(saved_tensors_hooks, "__enter__", enter))
            yield


def check_hooks(model: torch.nn.Module) -> None:
    """Refuse a model with hooks that change gradients.

    Raises:
        ConfigError: a module has a backward hook, or a parameter a hook; the message names both, and where the hook is.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    >>> _ = model[0].register_full_backward_hook(max)
    >>> check_hooks(model)
    Traceback (most recent call last):
    grace.errors.ConfigError: the module '0' (Linear) has a backward hook (max): a pipeline's stages run forward's ...
    """
    every = [module_hooks._global_backward_hooks, module_hooks._global_backward_pre_hooks]
    for hook in (hook for hooks in every for hook in hooks.values()):
        raise ConfigError(f"all modules have a backward hook ({_describe(hook)}): {INSTEAD}")
    for name, module in model.named_modules():
        for hook in (*module._backward_hooks.values(), *module._backward_pre_hooks.values()):
            what = f"the module {name!r}" if name else "the model"
            raise ConfigError(f"{what} ({type(module).__name__}) has a backward hook ({_describe(hook)}): {INSTEAD}")
    for name, p in model.named_parameters():
        for hook in (*(p._backward_hooks or {}).values(), *(p._post_accumulate_grad_hooks or {}).values()):  # type: ignore
            if not getattr(hook, "__module__", "").startswith("grace."):  # hooks of an earlier pipeline stay
                raise ConfigError(f"the parameter {name!r} has a hook ({_describe(hook)}): {CLIPPED}")


def _tracing() -> ProxyTorchDispatchMode | None:
    """Return the mode in which ``torch.export`` records operations; None if it records none."""
    return _get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY)


@contextlib.contextmanager
def _below_tracing() -> Iterator[None]:
    """Return a context in which operations are computed and differentiated, but not recorded."""
    keys = torch._C._dispatch_tls_local_include_set()
    pre = torch._C.DispatchKey.PreDispatch
    excluded = torch._C._dispatch_tls_local_exclude_set() | torch._C.DispatchKeySet(pre)
    with torch._C._ForceDispatchKeyGuard(keys.remove(pre), excluded), torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def _patched(owner: type, name: str, value: object) -> Iterator[None]:
    """Return a context in which a class has another value of an attribute."""
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:  # the class inherits it
            delattr(owner, name)


def is_user_code(file: str) -> bool:
    """Return True if a file is neither torch's nor part of the pipeline."""
    return not file.startswith((TORCH_DIRECTORY, str(Path(__file__).parent), "<"))


def _source_location(one: Callable[..., object]) -> str:
    """Return the place where a class or function is written, as "file:line"; its module if that is not known."""
    try:
        return f"{Path(inspect.getsourcefile(one) or '').name}:{inspect.getsourcelines(one)[1]}"
    except (TypeError, OSError):  # a callable object, or code that was typed in
        return str(getattr(one, "__module__", type(one).__module__))


def _describe(hook: Callable[..., object]) -> str:
    """Return a description of a hook or class, with its place in the source."""
    function = getattr(hook, "__func__", hook)
    name = getattr(function, "__qualname__", type(function).__name__)
    return name if inspect.isbuiltin(function) else f"{name}, {_source_location(function)}"


def _model_location() -> str:
    """Return the line that the model is at, as " at file:line"."""
    frames = [one for one in traceback.extract_stack() if is_user_code(one.filename)]
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
