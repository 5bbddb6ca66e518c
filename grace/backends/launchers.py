"""Detection of the launcher that has started this process, by the variables that it leaves in the environment, and of
engines that the program, or a framework that it uses, has initialized itself."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from grace.backends.topology import MPI_SIZES
from grace.core.backend import Backend
from grace.errors import ConfigError

FRAMEWORKS = ("torch", "tensorflow")
NAMES = {"horovod": "Horovod", "torch": "torch.distributed", "mpi": "MPI"}
"""Names of engines in messages."""
TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torch.distributed reads, whoever sets them."""
HOROVOD = ("HOROVOD_RANK", "HOROVOD_SIZE")
MPI = dict(zip(MPI_SIZES, ("mpirun (Open MPI)", "mpiexec or srun (PMI)", "srun (Slurm)"), strict=True))
"""Names of the launchers that set the variables by which an MPI run is detected."""
QUIET = "GRACE_QUIET"
RANK_PROCESS = "GRACE_RANK_PROCESS"
"""Variable by which processes that a rank starts know it: its process number and its rank."""
_announced = False


@dataclass(frozen=True)
class Launcher:
    """Launcher that was detected.

    Attributes:
        name: its name in messages.
        kind: the engine that its variables are for: "horovod", "torch" or "mpi".
        variables: the variables by which it was detected.
        counts: the variable with the number of ranks that it has started.
    """

    name: str
    kind: str
    variables: Sequence[str]
    counts: str

    @property
    def size(self) -> int:
        """Number of ranks that the launcher has started; 1 if it does not say so."""
        size = os.environ.get(self.counts, "")
        return int(size) if size.isdigit() else 1

    @property
    def settings(self) -> str:
        """Variables by which the launcher was detected, and their values."""
        return ", ".join(f"{key}={os.environ[key]}" for key in self.variables)

    def __str__(self) -> str:
        return f"{self.name}: {self.settings}"


def detect(partly: bool = False) -> Launcher | None:
    """Return the launcher; None if its variables are not set, or only some of them.

    Args:
        partly: True if the program meets the other ranks by itself: then torch's RANK and WORLD_SIZE are enough.
    """
    if "HOROVOD_RANK" in os.environ:  # horovodrun over Gloo; over MPI it leaves mpirun's variables only
        return Launcher("horovodrun", "horovod", [key for key in HOROVOD if key in os.environ], HOROVOD[1])
    keys = TORCH[:2] if partly else TORCH
    if all(key in os.environ for key in keys):
        torchrun = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "torch.distributed's variables"
        return Launcher("Ray" if "RAY_JOB_ID" in os.environ else torchrun, "torch", keys, TORCH[1])
    for key, name in MPI.items():
        if os.environ.get(key, "1") not in ("", "1"):  # a single rank needs no engine
            return Launcher(name, "mpi", (key,), key)
    return None


def horovod_framework() -> str:
    """Return the framework for which Horovod is initialized; empty if it is not."""
    for framework in FRAMEWORKS:
        horovod = sys.modules.get(f"horovod.{framework}")
        if horovod is not None and horovod.is_initialized():
            return framework
    return ""


def initialized_sizes() -> dict[str, int]:
    """Return the number of ranks that each initialized engine sees, by the engine's name in `grace.init()`.

    >>> initialized_sizes()
    {}
    """
    found = {}
    framework = horovod_framework()
    if framework:
        found["horovod"] = sys.modules[f"horovod.{framework}"].size()
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        found["torch"] = torch.distributed.get_world_size()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        found["mpi"] = mpi.COMM_WORLD.Get_size()
    return found


def chosen() -> bool:
    """Return True if GRACE_BACKEND names an engine."""
    return os.environ.get("GRACE_BACKEND", "auto") != "auto"


def check_complete() -> None:
    """Raise ConfigError if ranks seem to be started, but variables are missing.

    Some variables of a launcher of several ranks may be set without the others; or a job of Slurm may have tasks that
    srun has not started. This process would train alone, and nobody would notice.
    """
    for keys, launcher in ((TORCH, "torchrun"), (HOROVOD, "horovodrun")):
        size = keys[1]
        present = [f"{key}={os.environ[key]}" for key in keys[:2] if os.environ.get(key)]
        missing = [key for key in keys if key not in os.environ]
        if present and missing and os.environ.get(size) != "1":
            raise ConfigError(
                f"{' and '.join(present)} {'is' if len(present) == 1 else 'are'} set, but not {', '.join(missing)}: "
                f"{launcher}, and whatever starts ranks in its place, sets {', '.join(keys)}. Start the program by "
                f"{launcher}; or, for one process, unset what is there or set GRACE_BACKEND=local"
            )
    workers = tf_config_workers()
    if workers > 1:
        raise ConfigError(
            f"TF_CONFIG names {workers} workers: each of them would train alone, because Grace's ranks are not "
            "started by tf.distribute's variables. Start the program by horovodrun or mpirun; or, for one process, set "
            "GRACE_BACKEND=local"
        )
    tasks, step = os.environ.get("SLURM_NTASKS", ""), os.environ.get("SLURM_STEP_NUM_TASKS", "")
    if tasks not in ("", "1"):
        raise ConfigError(
            f"SLURM_NTASKS={tasks}, but SLURM_STEP_NUM_TASKS is {step or 'not set'}: this is the job's own script or "
            "shell, which runs once, and srun starts the ranks. Write `srun python ...` (or `srun torchrun ...`, one "
            "for each node); or, for one process, `srun -n 1 python ...` or set GRACE_BACKEND=local"
        )


def tf_config_workers() -> int:
    """Return the number of workers in TF_CONFIG, which tf.distribute reads; 0 without it."""
    try:
        cluster = dict(json.loads(os.environ.get("TF_CONFIG", "{}"))["cluster"])
        return sum(len(cluster.get(job, ())) for job in ("chief", "master", "worker"))
    except (ValueError, TypeError, KeyError, RecursionError):
        return 0


def mark_children(backend: Backend) -> None:
    """Let processes that this rank starts know that it is one."""
    if backend.size > 1:
        os.environ[RANK_PROCESS] = f"{os.getpid()} {backend.rank}"


def check_no_child() -> None:
    """Raise ConfigError if a rank has started this process by multiprocessing.

    A ``DataLoader``'s worker that is spawned has the launcher's variables and not the rank's engine: it would join as a
    rank, and wait for the workers of all others.
    """
    number, _, rank = os.environ.get(RANK_PROCESS, "").partition(" ")
    # Not imported: it is there in every process that it has started.
    multiprocessing = sys.modules.get("multiprocessing")
    parent = None if multiprocessing is None else multiprocessing.parent_process()
    if parent is not None and str(parent.pid) == number:
        raise ConfigError(
            f"rank {rank} has started this process, which is no rank, by multiprocessing (a DataLoader's worker that "
            "is not forked?): it cannot join the run. Read grace.rank() and grace.size() before, and pass them to it. "
            "If it is to be a rank of another run, call grace.shutdown() first in the process that starts it"
        )


def announce(backend: Backend) -> None:
    """Print on stderr, once and on rank 0, the launcher by whose variables this run was joined; not if the user has
    chosen the engine."""
    global _announced
    launcher = detect()
    quiet = chosen() or os.environ.get(QUIET, "0") not in ("", "0")
    if launcher is None or backend.rank != 0 or quiet or _announced:
        return
    _announced = True
    print(f"grace: {backend.describe()}; started by {launcher} ({QUIET}=1 hides this)", file=sys.stderr, flush=True)
