"""Choice of the kernels that compute with a tensor, by its framework and device."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np

from grace.kernels.reference import Kernels, Tensor

Choose = Callable[[Tensor], Kernels]
"""Function that chooses among one framework's kernels."""
_REFERENCE = Kernels()
_THREAD = threading.local()


@contextlib.contextmanager
def arrays_by(kernels: Kernels) -> Iterator[None]:
    """Let other kernels than the reference compute with NumPy arrays, in this context and thread."""
    before, _THREAD.arrays = getattr(_THREAD, "arrays", _REFERENCE), kernels
    try:
        yield
    finally:
        _THREAD.arrays = before


def _torch_kernels() -> Choose:
    from grace.kernels.torch.fused import kernels_of_tensor  # a run without torch must not import it

    return kernels_of_tensor


def _tensorflow_kernels() -> Choose:
    from grace.kernels.tensorflow.primitives import kernels_of_tensor

    return kernels_of_tensor


_FRAMEWORKS: dict[str, tuple[tuple[str, ...], Callable[[], Choose]]] = {
    "torch": (("Tensor",), _torch_kernels),
    "tensorflow": (("Tensor", "Variable"), _tensorflow_kernels),
}
"""Names of a module's types, and the loader of the function that chooses among its kernels."""
_CHOICES: dict[type, Choose] = {}
"""Functions that choose kernels, by types of tensors: each type is searched for once."""


def kernels_of(tensor: Tensor) -> Kernels:
    """Return the kernels of this tensor's framework and device. Only frameworks already imported are considered.

    Raises:
        TypeError: the tensor is of no framework that Grace knows.

    >>> kernels_of(np.zeros(3)).name
    'numpy'
    """
    choose = _CHOICES.get(type(tensor))
    if choose is not None:
        return choose(tensor)
    # Not kept by type, since each thread may choose other kernels.
    if isinstance(tensor, np.ndarray):
        return getattr(_THREAD, "arrays", _REFERENCE)
    for module, (names, load) in _FRAMEWORKS.items():
        framework = sys.modules.get(module)
        if framework is not None and isinstance(tensor, tuple(getattr(framework, n) for n in names)):
            _CHOICES[type(tensor)] = load()
            return _CHOICES[type(tensor)](tensor)
    raise TypeError(
        f"no kernels for {type(tensor).__module__}.{type(tensor).__qualname__}; known: numpy.ndarray, torch.Tensor, "
        "tensorflow.Tensor"
    )
