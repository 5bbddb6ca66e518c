"""Start the ranks of a training benchmark on this machine, watch them, and end them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from grace.errors import GraceError, MissingExtraError
from grace.processes import end, signals_raise

RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
"""Where launchers say which rank a process is."""
NOISE = re.compile(r"WARNING: All log messages before absl::InitializeLog|I\d{4} \d\d:")
"""What TensorFlow writes when it starts, whatever it is told."""


class WorkerError(GraceError, RuntimeError):
    """A rank failed; the message is what it said."""


@dataclasses.dataclass
class Launcher:
    """How ranks are started.

    Attributes:
        command: the command line, up to the arguments of Python.
        environment: what it needs, unless the user has set it.
        killed: matches what it says of a rank that a signal ended, with its ``rank`` and the ``signal``.
        signals_from: what it adds to the signal's number.
        engine: the backend that ``grace.init()`` is to join; empty if it finds it.
    """

    command: list[str]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    killed: str = r"(?!)"
    signals_from: int = 0
    engine: str = ""


def launcher_of(framework: str, ranks: int) -> Launcher:
    """Torch's ranks are started by torchrun, TensorFlow's by horovodrun, or by mpirun without Horovod.

    Raises:
        MissingExtraError: neither is installed.
    """
    if framework == "torch":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
        killed = r"failed \(exitcode: -(?P<signal>\d+)\) local_rank: (?P<rank>\d+)"
        return Launcher([*command, "--nproc-per-node", str(ranks)], loopback, killed)
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    if ranks == 1:
        return Launcher([sys.executable], quiet, engine="local")
    if _has_horovod():
        command = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", str(ranks), sys.executable]
        killed = r"Process (?P<rank>\d+) exit with status code (?P<signal>\d+)"
        return Launcher(command, quiet, killed, signals_from=128, engine="horovod")
    mpirun = _mpirun()
    if mpirun is None:
        raise MissingExtraError(
            "torch.distributed cannot move TensorFlow's tensors: ranks of TensorFlow need Horovod (`make horovod` in a "
            "checkout of Grace builds and installs it), or an MPI's mpirun and mpi4py "
            '(pip install "grace-compress[mpi]"); --ranks 1 needs neither'
        )
    crowded = {  # more ranks than cores, tied to none
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
    killed = r"process rank (?P<rank>\d+) with PID \d+ on node \S+ exited on signal (?P<signal>\d+)"
    return Launcher([mpirun, "-np", str(ranks), sys.executable], {**quiet, **crowded}, killed, engine="mpi")


def _has_horovod() -> bool:
    """Whether Horovod is installed, and was built for TensorFlow."""
    found = importlib.util.find_spec("horovod")
    folders = [] if found is None else list(found.submodule_search_locations or [])
    return any(list(Path(folder, "tensorflow").glob("mpi_lib*")) for folder in folders)


def _mpirun() -> str | None:
    """The program, if mpi4py is installed too; MPIs installed by pip lie beside Python."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    return shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))


def run_ranks(launcher: Launcher, ranks: int, program: list[str], folder: Path, watch: Callable[[], None]) -> None:
    """Run a Python program on all ranks, and return when they have ended.

    Args:
        launcher: how they are started.
        ranks: how many.
        program: what follows ``python``.
        folder: where their complaints go: ``launcher.log``, and those that called :func:`redirect_stderr`.
        watch: called ten times a second meanwhile.

    Raises:
        WorkerError: one failed.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP; all are ended.
    """
    with (folder / "launcher.log").open("w") as log, signals_raise():
        # a session of its own, so that Ctrl-C reaches only us and the ranks end without tracebacks
        process = subprocess.Popen(
            [*launcher.command, *program],
            env=_environment(launcher, ranks),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
                watch()
        finally:
            end(process)
    if process.returncode != 0:
        raise WorkerError(f"the ranks failed (exit code {process.returncode})\n{_complaints(launcher, folder)}")


def redirect_stderr(folder: Path) -> None:
    """Write what this rank says on stderr, native libraries included, to a file of its own below the folder."""
    name = next((os.environ[key] for key in RANK_VARIABLES if key in os.environ), "0")
    log = os.open(folder / f"rank{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    os.close(log)


def _environment(launcher: Launcher, ranks: int) -> dict[str, str]:
    """Each rank gets its share of the cores."""
    environment = {**launcher.environment, **os.environ}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    environment.setdefault("PYTHONSAFEPATH", "1")  # `python -m` would import what lies in the current folder
    if launcher.engine:
        environment["GRACE_BACKEND"] = launcher.engine
    return environment


def _complaints(launcher: Launcher, folder: Path) -> str:
    """What the ranks wrote to stderr, and which rank a signal ended; or else all that the launcher wrote."""
    log = (folder / "launcher.log").read_text(errors="replace").strip()
    said = []
    for path in sorted(folder.glob("rank*.log")):
        lines = [line for line in path.read_text(errors="replace").splitlines() if not NOISE.match(line)]
        if text := "\n".join(lines).strip():
            said.append(f"rank {path.stem.removeprefix('rank')}:\n{text}")
    for found in re.finditer(launcher.killed, log):
        number = int(found["signal"]) - launcher.signals_from
        if number in set(signal.Signals):
            said.append(f"rank {found['rank']} was ended by {signal.Signals(number).name}")
    return "\n".join(said) or log
