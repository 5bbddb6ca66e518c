"""Compilation of loops: caching, an announcement on terminals, and a listener for `grace warmup`.

Numba keeps what it compiled beside the source, or in NUMBA_CACHE_DIR, for each processor; so this happens once. Where
nothing can be written, as in a container with a read-only root, each process compiles what it does not find.
"""

import contextlib
import functools
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from numba import njit
from numba.core import event
from numba.core.caching import CompileResultCacheImpl, FunctionCache, NullCache

from grace.errors import warn
from grace.kernels import constants, random

P = ParamSpec("P")
T = TypeVar("T")
INTERRUPTS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "HOROVOD_LOCAL_RANK")


@functools.cache
def sources() -> str:
    """Return a digest of all files that loops are written in."""
    files = [*sorted(Path(__file__).parent.glob("*.py")), Path(random.__file__), Path(constants.__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def loop(fastmath: bool | set[str] = False) -> Callable[[Callable[..., object]], Any]:
    """Return a decorator that compiles a loop, and keeps what was compiled until the source of any loop changes.

    Numba itself looks at the file of a function alone, but compiles those that it calls into it: after an upgrade that
    changes another file it would go on with what they were.
    """
    decorate = njit(nogil=True, error_model="numpy", fastmath=fastmath)

    def compiled(function: Callable[..., object]) -> Any:
        dispatcher: Any = decorate(function)
        # Numba has no option for another cache.
        dispatcher._cache = LoopCache(function)
        dispatcher.compile = _uninterrupted(dispatcher.compile)
        return dispatcher

    return compiled


def _uninterrupted(compile: Callable[P, T]) -> Callable[P, T]:
    """Return a compiler that Ctrl-C and SIGTERM interrupt only when it is done.

    LLVM calls Python back, and swallows what a signal's handler raises there: half a library would stay, and crash.
    """

    @functools.wraps(compile)
    def uninterrupted(*args: P.args, **options: P.kwargs) -> T:
        if threading.current_thread() is not threading.main_thread():
            return compile(*args, **options)  # handlers are called in the main thread alone
        came: list[int] = []
        handlers = {number: signal.getsignal(number) for number in INTERRUPTS}
        handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
        try:
            for number in handlers:
                signal.signal(number, lambda number, frame: came.append(number))
            return compile(*args, **options)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for number in came:
                signal.raise_signal(number)

    return uninterrupted


def _unwritten(locator: type[object]) -> type[object]:
    """Return Numba's class that finds a folder, without the demand that the folder can be written to."""
    return type(locator.__name__, (locator,), {"ensure_cache_path": lambda self: None})


class _ReadOnlyImpl(CompileResultCacheImpl):
    """Numba's choice between NUMBA_CACHE_DIR and the source's own folder, whether it can be written to or not."""

    _locator_classes = [_unwritten(locator) for locator in CompileResultCacheImpl._locator_classes[:2]]


class _ReadOnlyCache(FunctionCache):
    """Cache that was filled when the image of a container was built, or by another user who may write there."""

    _impl_class = _ReadOnlyImpl


class LoopCache(NullCache):
    """Keeps what is compiled where Numba does, if anything can be written there; no failure of it ends a run."""

    def __init__(self, function: Callable[..., object]):
        self.caches: list[FunctionCache] = []
        for kind in (FunctionCache, _ReadOnlyCache):
            with contextlib.suppress(RuntimeError):  # "cannot cache function": no folder can be written to
                self.caches.append(kind(function))
        for cache in self.caches:
            cache._cache_file._source_stamp = (cache._cache_file._source_stamp, sources())

    @property
    def cache_path(self) -> str | None:
        """Folder that is written to; None if none can be."""
        writable = [cache.cache_path for cache in self.caches if not isinstance(cache, _ReadOnlyCache)]
        return writable[0] if writable else None

    def load_overload(self, sig: object, target_context: object) -> object:
        """Return what was kept for a signature, or None."""
        for cache in self.caches:
            try:
                found = cache.load_overload(sig, target_context)
            except Exception:  # a damaged file raises whatever unpickling does; what is kept begins anew
                found = None
                with contextlib.suppress(OSError):
                    cache.flush()
            if found is not None:
                return found
        return None

    def save_overload(self, sig: object, data: object) -> None:
        """Keep what was compiled for a signature, or say once that it cannot be."""
        if self.cache_path is None:
            not_kept("no folder can be written to")
            return
        try:
            self.caches[0].save_overload(sig, data)
        except OSError as error:  # a full disk, or a quota
            not_kept(str(error))


_said = False


def not_kept(why: str) -> None:
    """Warn, once and on one rank of a machine, that what is compiled is not kept."""
    global _said
    if not _said and first_rank():
        warn(
            f"the loops that Grace compiles cannot be kept ({why}), so each process compiles them again, which may "
            "take 20 seconds: set NUMBA_CACHE_DIR to a folder that can be written to, or fill one by `grace warmup` "
            "when the image is built; GRACE_FUSED=0 does without them"
        )
    _said = True


def first_rank() -> bool:
    """Return True on the first rank of each machine, by launchers' variables."""
    return all(os.environ.get(name, "0") == "0" for name in RANKS)


class Listener(event.Listener):
    """Calls a function with the name of each loop of Grace's that is about to be compiled."""

    def __init__(self, told: Callable[[str], object]):
        self.told = told

    def on_start(self, event: event.Event) -> None:
        function = event.data["dispatcher"].py_func
        if function.__module__.partition(".")[0] == "grace":  # not what Numba's own functions are made of
            self.told(function.__name__)

    def on_end(self, event: event.Event) -> None:
        pass


class _Announcement(Listener):
    registered = awaited = False

    def __init__(self) -> None:
        super().__init__(self.announce)

    def announce(self, name: str) -> None:
        """Print the announcement on a terminal, once."""
        if self.awaited and sys.stderr is not None and sys.stderr.isatty():
            print(
                "grace: compiling loops for this processor, which happens once and may take 20 seconds; "
                "`grace warmup` does it ahead",
                file=sys.stderr,
            )
        self.awaited = False


_announcement = _Announcement()


def announce() -> None:
    """Announce the next loop that is compiled, on one rank of a machine."""
    _announcement.awaited = first_rank()
    if _announcement.awaited and not _announcement.registered:
        _announcement.registered = True
        event.register("numba:compile", _announcement)
