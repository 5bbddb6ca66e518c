"""The run that this process is part of: ``grace.init()``, ``rank()``, ``size()``, ``shutdown()``."""

import os
import sys
from importlib.metadata import entry_points

from grace.backends import launchers, topology, world_size_check
from grace.backends.launchers import FRAMEWORKS
from grace.backends.signals import raise_on_sigterm
from grace.core import watch
from grace.core.at_exit import call_at_exit, cancel_at_exit
from grace.core.backend import Backend, LocalBackend
from grace.core.registry import load_entry_point
from grace.core.waits import set_timeout, timeout_for
from grace.errors import ConfigError, MissingExtraError, installed, require

GROUP = "grace.backends"
"""Entry point group of engines that other packages provide."""
BACKENDS = ("auto", "torch", "horovod", "mpi", "local")

_current: Backend | None = None
_named = False
"""True if the user has named the engine of this run."""


def init(backend: str | Backend = "auto", framework: str | None = None, timeout: float | None = None) -> Backend:
    """Join the run. Call it once, before anything else of Grace's.

    Args:
        backend: "torch", "horovod", "mpi", "local", or a :class:`~grace.Backend` of your own, or its name in the entry
            point group ``grace.backends``, whose value is called without arguments to join. "auto" is the value of
            the environment variable GRACE_BACKEND; or else an engine that the program has initialized
            already; or else the launcher's: Horovod under horovodrun, torch.distributed under torchrun, and
            under mpirun and srun Horovod where it is installed, else MPI; and "local" without a launcher.
        framework: "torch" or "tensorflow": the framework whose tensors Horovod moves, for programs that import both.
            By default the one for which Horovod is initialized, or else the one that is imported.
        timeout: seconds that a rank waits for others, in an exchange or in anything else that all ranks do together,
            before it raises an ExchangeError that says which ranks did not come, and where they are; after 30 seconds a
            line on stderr says that already. By default the value of the environment variable GRACE_TIMEOUT, or else
            600, or less where the process group that the program has made waits less. If ranks differ the smallest
            counts. Engines that the program initialized itself keep their own timeouts for their own operations.

    Returns:
        The backend. Where a launcher's variables led to it, rank 0 says so in a line on stderr, once, unless
        GRACE_QUIET=1 is in the environment.

    Raises:
        ConfigError: an unknown name, some of a launcher's variables without the others, or a timeout that is no
            positive number; an engine that nobody named and that sees fewer ranks than the launcher has started, or
            than another engine that the program has initialized: they would train alone; torch.distributed, for
            TensorFlow's tensors; a process that a rank has started by multiprocessing.
        MissingExtraError: the backend's package is not installed; the message says which launcher was found.

    >>> init("local").describe()
    'local, rank 0 of 1'
    >>> shutdown()
    """
    global _current, _named
    if isinstance(backend, Backend):
        if timeout is not None:
            set_timeout(timeout)
        _current = _with_timeout(backend, timeout)
        _named = True
        return backend
    _check_known(backend)
    if framework not in (None, *FRAMEWORKS):
        raise ConfigError(f"unknown framework {framework!r}; known: {', '.join(FRAMEWORKS)}")
    if timeout is not None or _current is None:
        set_timeout(timeout)
        timeout_for()  # raises for a wrong timeout before anything is joined
    named = backend != "auto" or launchers.chosen()
    name = _detect() if backend == "auto" else backend
    # An import of TensorFlow alone does not count where the user has named torch's engine.
    if name == "torch" and _framework(framework, guess=not named) == "tensorflow":
        raise world_size_check.tensorflow_not_supported(launchers.detect())
    if _current is not None and _current.is_ended:
        # Optimizers keep the groups that they were made with.
        named = named or _named
        _current = None
        watch.leave()
    if _current is None or _current.name != name or framework not in (None, _current.framework or framework):
        if name != "local" and name not in launchers.initialized_sizes():
            launchers.check_no_child()
        engine = _with_timeout(_join(name, framework, detected=backend == "auto"), timeout)
        if not named:
            try:
                world_size_check.check_engine(engine, _framework(framework))
            except ConfigError:
                engine.close()  # the user's next init() must be able to join another engine
                raise
        _current = engine
        _named = named
        launchers.mark_children(engine)
        if name in ("horovod", "mpi"):  # their launchers end ranks by SIGTERM when one has failed
            raise_on_sigterm(_current)
        if backend == "auto":
            launchers.announce(_current)
        cancel_at_exit(shutdown)
        # Last registered runs first: after the engine's own shutdown no rank would be told that this one has left.
        call_at_exit(shutdown)
    elif timeout is not None:
        _current.timeout = timeout_for()
    _named = _named or named
    return _current


def current() -> Backend:
    """Return the backend of this run; call ``init("auto")`` if it was not called yet, or if the program has initialized
    the engine anew since.

    Raises:
        ConfigError: the user has not named the engine, and the program has since initialized one that sees more ranks.
    """
    # Not only ended: a program that has ended the engine may still ask for its rank.
    if _current is None or (_current.is_ended and _current.name in launchers.initialized_sizes()):
        return init()
    if not _named:
        world_size_check.check_other_engines(_current)
    return _current


def backend_or_current(backend: Backend | None) -> Backend:
    """Return the backend that a user gave, or that of this run if none was given; refuse another object."""
    if backend is None:
        return current()
    if not isinstance(backend, Backend):
        raise ConfigError(f"backend= takes a Backend, as grace.init('mpi') returns one, not {backend!r}")
    return backend


def check_group(backend: Backend) -> None:
    """Raise ConfigError if the program has made an engine of fewer ranks than were started, and the user has not named
    it. The backend is over all of the engine's ranks; the exchange may use a group of them."""
    if not _named and not launchers.chosen():
        world_size_check.check_engine(backend)


def joined() -> Backend:
    """Return the backend that :func:`init` joined, or this process alone. Raise ConfigError if a launcher has started
    several ranks, and ``grace.init()`` was not called."""
    name = _detect() if _current is None else "local"
    if name != "local":
        raise ConfigError(
            f"a launcher has started this program as a rank (for {name}), and nobody called grace.init(): a step would "
            "be this rank's alone. Call grace.init() first"
        )
    return current()


def rank() -> int:
    """Return this process's number, from 0.

    >>> init("local").rank, rank()
    (0, 0)
    >>> shutdown()
    """
    return current().rank


def local_rank() -> int:
    """Return this process's number among the ranks of its node, from 0: the number of the node's GPU that it should
    use.

    Where neither the launcher nor the engine says it (a process group that the program made, or a backend of your
    own), the first call asks all ranks, and every rank must make it; ranks are on one node if their hosts' names, or
    GRACE_NODE, are the same.

    >>> init("local").rank, local_rank()
    (0, 0)
    >>> shutdown()
    """
    return topology.local_rank(current())


def size() -> int:
    """Return the number of ranks.

    >>> init("local").size, size()
    (1, 1)
    >>> shutdown()
    """
    return current().size


def local_size() -> int:
    """Return the number of ranks on this process's node, which is found out as for :func:`local_rank`.

    >>> init("local").size, local_size()
    (1, 1)
    >>> shutdown()
    """
    return topology.local_size(current())


def is_initialized() -> bool:
    """Return True if this process has joined a run, by :func:`init` or by a call that needed one.

    >>> is_initialized(), init("local").name, is_initialized()
    (False, 'local', True)
    >>> shutdown()
    """
    return _current is not None


def shutdown() -> None:
    """Leave the run, and close what ``init`` opened."""
    global _current, _named
    if _current is not None:
        _current.at_shutdown(watch.leave)  # last: the others may have needed this rank until now
        _current.close()
    _current, _named = None, False
    os.environ.pop(launchers.RANK_PROCESS, None)
    watch.leave()
    set_timeout(None)


call_at_exit(shutdown)


def _detect() -> str:
    chosen = os.environ.get("GRACE_BACKEND", "auto")
    _check_known(chosen, f"GRACE_BACKEND={chosen}: ")
    if chosen != "auto":
        return chosen
    sizes = launchers.initialized_sizes()
    for name in ("horovod", "torch"):  # an engine that the program has initialized counts more than a launcher
        if name in sizes:
            return name
    launcher = launchers.detect()
    if launcher is None:
        launchers.check_complete()
        return "local"
    return "horovod" if launcher.kind == "mpi" and installed("horovod") else launcher.kind


def _join(name: str, framework: str | None, detected: bool) -> Backend:
    launcher = launchers.detect() if detected else None
    try:
        if name == "horovod":
            return _horovod(framework)
        return JOIN[name]() if name in JOIN else _from_entry_point(name)
    except MissingExtraError as error:
        if launcher is None:
            raise
        neither = "; neither Horovod nor MPI's package is there" if name == "mpi" else ""
        raise MissingExtraError(f"this program was started by {launcher}{neither}. {error}") from None


def _with_timeout(backend: Backend, timeout: float | None) -> Backend:
    """Return the backend with the user's timeout, if the user gave one and its engine has not read it."""
    if timeout is not None or ("timeout" not in vars(backend) and os.environ.get("GRACE_TIMEOUT")):
        backend.timeout = timeout_for()
    return backend


def _check_known(name: str, where: str = "") -> None:
    if name not in BACKENDS:
        names = [*BACKENDS, *(point.name for point in entry_points(group=GROUP))]
        if name not in names:
            raise ConfigError(f"{where}unknown backend {name!r}; known: {', '.join(names)}")


def _from_entry_point(name: str) -> Backend:
    """Return a backend that another package provides."""
    (point, *_) = entry_points(group=GROUP, name=name)
    engine = load_entry_point(point)()
    if not isinstance(engine, Backend) or engine.name != name:
        is_what = f"a backend of the name {engine.name!r}" if isinstance(engine, Backend) else f"{engine!r}"
        raise ConfigError(
            f"the entry point {name} = {point.value} of {GROUP} must give a backend of its name, not {is_what}"
        )
    return engine


def _torch() -> Backend:
    require("torch", "torch")
    from grace.backends.torch_distributed import TorchBackend

    return TorchBackend.join()


def _framework(framework: str | None, guess: bool = True) -> str:
    """Return the framework whose tensors this run moves: the user's choice, or the one that Horovod is initialized for,
    or one that is imported; without ``guess`` the user's choice alone. Empty if it is not known."""
    if framework or not guess:
        return framework or ""
    imported = [name for name in FRAMEWORKS if name in sys.modules]
    return launchers.horovod_framework() or next(iter(imported), "")


def _horovod(framework: str | None) -> Backend:
    found = filter(installed, FRAMEWORKS)
    chosen = _framework(framework) or next(iter([*found, "torch"]))
    require(chosen, chosen)
    if not installed("horovod"):
        raise MissingExtraError(
            "this needs Horovod, whose released source does not build against today's frameworks as it is; "
            "`make horovod` in a checkout of Grace builds and installs it (or use grace.init('mpi') under mpirun)"
        )
    if chosen == "torch":
        from grace.backends.horovod_torch import TorchHorovodBackend

        return TorchHorovodBackend.join()
    from grace.backends.horovod_tensorflow import TensorFlowHorovodBackend

    return TensorFlowHorovodBackend.join()


def _mpi() -> Backend:
    require("mpi4py", "mpi")
    from grace.backends.mpi import MPIBackend

    return MPIBackend()


JOIN = {"torch": _torch, "mpi": _mpi, "local": LocalBackend}
