"""Calls of methods that do not keep the methods' objects alive."""

import weakref
from collections.abc import Callable
from typing import Any


class WeakCall:
    """Call of a method. It makes no reference cycle, so Python frees the object as soon as its user does.

    Args:
        method: the bound method.
        otherwise: the result after the object is gone.

    >>> class Session:
    ...     def lr(self, name):
    ...         return 0.1
    >>> session = Session()
    >>> lr = WeakCall(session.lr, otherwise=1.0)
    >>> lr("weight")
    0.1
    >>> del session
    >>> lr("weight")
    1.0
    """

    def __init__(self, method: Callable[..., Any], otherwise: object = None):
        self.method = weakref.WeakMethod(method)
        self.otherwise = otherwise

    def __call__(self, *args: object) -> Any:
        method = self.method()
        return self.otherwise if method is None else method(*args)
