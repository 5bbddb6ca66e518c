"""Refusal of runs with fewer ranks than were started: ranks would train alone and nobody would notice."""

from grace.backends import launchers
from grace.backends.launchers import NAMES, Launcher
from grace.core.backend import Backend
from grace.errors import ConfigError

CALLS = {"horovod": "hvd.init()", "torch": "torch.distributed.init_process_group()"}
"""Calls by which a program initializes an engine itself."""
STARTERS = {"horovod": "horovodrun or mpirun", "torch": "torchrun", "mpi": "mpirun"}


def check_engine(backend: Backend, framework: str = "") -> None:
    """Raise ConfigError if an engine sees fewer ranks than a launcher has started, or than another engine of this
    process. The framework is that of the tensors that it is to move, if that is known."""
    if backend.elastic:  # ranks come and go, and the launcher's variables stay
        return
    launcher = launchers.detect(partly=True)
    if launcher is not None and launcher.size > backend.size:
        _raise_wrong_size(
            _started(launcher), backend, f"{_remedy(backend, launcher, framework)}. {_on_purpose(backend.name)}"
        )
    check_other_engines(backend)


def tensorflow_not_supported(launcher: Launcher | None) -> ConfigError:
    """Return the error for torch.distributed where TensorFlow's tensors are to be moved.

    >>> print(tensorflow_not_supported(None))
    torch.distributed moves no tensors of TensorFlow: start the program by horovodrun or mpirun
    """
    by = "" if launcher is None else f"{_started(launcher)}, and "
    return ConfigError(
        f"{by}torch.distributed moves no tensors of TensorFlow: start the program by {STARTERS['horovod']}"
    )


def check_other_engines(backend: Backend) -> None:
    """Raise ConfigError if an engine sees fewer ranks than another one that the program has initialized, perhaps
    since."""
    for name, size in launchers.initialized_sizes().items():
        if size > backend.size and not backend.elastic:
            remedy = f"say which engine counts: grace.init({name!r})"
            if backend.name == "local" and name in CALLS:
                remedy = f"call grace.init() after {CALLS[name]}, and rank() and size() after that"
            _raise_wrong_size(
                f"this program has initialized {NAMES[name]} with {size} ranks",
                backend,
                f"{remedy}. {_on_purpose(backend.name)}",
            )


def check_trainer(size: int, way: str) -> None:
    """Raise ConfigError if a trainer knows fewer ranks than a launcher has started; ``way`` is the advice how to tell
    the trainer of all of them."""
    launcher = launchers.detect(partly=True)
    if launcher is not None and launcher.size > size and not launchers.chosen():
        raise ConfigError(
            f"{_started(launcher)}, and the trainer knows {size}: ranks would train alone. {way}. Where each rank is "
            "to train alone, set GRACE_BACKEND=local"
        )


def _started(launcher: Launcher) -> str:
    started = "tell of" if launcher.name.endswith("variables") else "has started"
    return f"{launcher.name} {started} {launcher.size} ranks ({launcher.settings})"


def _raise_wrong_size(started: str, backend: Backend, remedy: str) -> None:
    """Raise the error with the ranks that were started, those that the engine sees, and the remedy."""
    if backend.name == "local":
        sees = "Grace has joined this process alone"
    else:
        sees = f"{NAMES.get(backend.name, backend.name)} sees {backend.size} ({backend.describe()})"
    raise ConfigError(f"{started}, and {sees}: ranks would train alone. Do this: {remedy}")


def _remedy(backend: Backend, launcher: Launcher, framework: str) -> str:
    """Return the advice that makes the engine see all ranks that a launcher has started."""
    name = backend.name
    if name not in CALLS or backend.owns:  # Grace has joined it, and it sees nothing of the launcher
        return (
            f"start the program by {STARTERS.get(name, 'the launcher')} of the installation that this engine belongs "
            f"to (srun: with the --mpi that it was built for), since it does not understand {launcher.name}"
        )
    if launcher.kind == "torch" and (framework or backend.framework) == "tensorflow":
        return f"start the program by {STARTERS['horovod']}: torch.distributed moves no tensors of TensorFlow"
    joined = NAMES[launcher.kind] if launcher.kind != "mpi" else "Horovod or MPI"
    spelled = " (grace.rank(), grace.allreduce() and so on stand for hvd's)" if name == "horovod" else ""
    return (
        f"leave out {CALLS[name]}, so that grace.init() joins {joined} under {launcher.name}{spelled}; or start the "
        f"program by {STARTERS[name]}"
    )


def _on_purpose(name: str) -> str:
    return f"Where each rank is to train alone, name the engine: grace.init({name!r}), or GRACE_BACKEND={name}"
