"""Pools of ranks that the real launchers start: horovodrun over Gloo and MPI, and mpirun."""

import contextlib
import importlib.util
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from tests.support import ROOT
from tests.support.drawing import THOROUGH
from tests.support.limits import HANGS
from tests.support.pool import RankFailure, Ranks, own_settings, tell_stacks
from tests.support.warm import collect_seldom

ENGINES = {
    "horovodrun-gloo": (["horovodrun", "--gloo"], "horovod"),
    "horovodrun-mpi": (["horovodrun", "--mpi"], "horovod"),
    "mpirun-horovod": (["mpirun"], "horovod"),
    "mpirun-mpi": (["mpirun"], "mpi"),
}
"""The launcher, and the backend that ``grace.init()`` is to join."""
STARTED = [name for name in ENGINES if THOROUGH or name != "horovodrun-mpi"]  # mpirun starts Horovod over MPI as well
"""Launchers that the tests of engines and launchers start."""
DRAWN = [name for name in STARTED if THOROUGH or name != "mpirun-horovod"]
"""Launchers that all other tests start: Horovod runs the same operations over Gloo and over MPI."""

BIN = Path(sys.executable).parent


def available(engine: str) -> bool:
    """Return True if an engine's packages are installed."""
    package = {"horovod": "horovod", "mpi": "mpi4py"}[ENGINES[engine][1]]
    return importlib.util.find_spec(package) is not None


def environment() -> dict[str, str]:
    """Return the environment of launchers: our programs, root allowed, more ranks than cores, tied to none, one
    thread."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",  # or two ranks are tied to the cores of another worker's ranks
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "HOROVOD_CYCLE_TIME": "1",  # milliseconds between Horovod's looks at what is ready
    }


def command(engine: str, size: int, *program: str) -> list[str]:
    """The command line that runs a Python program on ``size`` ranks; "torchrun" is torch's launcher."""
    if engine == "torchrun":
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*launcher, "--nproc-per-node", str(size), *program]
    return [*ENGINES[engine][0], "-np", str(size), sys.executable, *program]


class Launched(Ranks):
    """Ranks of an engine, started by its launcher; see :class:`pool.Ranks`."""

    def __init__(self, engine: str, size: int, framework: str = "torch"):
        super().__init__(size)
        self.framework = framework
        self.engine, self.said, self.folder = engine, "", ""

    def run(self, function: Callable, *args: Any, timeout: float = HANGS) -> list[Any]:
        """Call ``function(*args)`` on every rank."""
        try:
            return super().run(function, *args, timeout=timeout)
        except RankFailure as failure:
            raise RankFailure(f"{self.engine}: {failure}\n{self.said}") from None

    def _start(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="grace-engine-")
        self.stacks = f"{self.folder}/stacks"
        server = ["-m", "tests.support.engine_pools", f"{self.folder}/socket", self.framework]
        program = command(self.engine, self.size, *server)
        env = {**environment(), "GRACE_BACKEND": ENGINES[self.engine][1], "HOROVOD_GLOO_TIMEOUT_SECONDS": "3600"}
        try:
            with Listener(f"{self.folder}/socket", backlog=self.size) as listener, self.log.open("w") as log:
                launcher = subprocess.Popen(program, env=env, stdout=log, stderr=log, start_new_session=True)
                self.processes = [launcher]
                listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
                joined = sorted(self._accept(listener, launcher) for _ in range(self.size))
        except OSError as error:
            self.stop()
            raise RankFailure(f"{' '.join(program)} did not start: {error}") from error
        ranks, self.pids, self.pipes = map(list, zip(*joined, strict=True))
        assert ranks == list(range(self.size))
        for pipe in self.pipes:
            pipe.send(sys.path)

    @property
    def log(self) -> Path:
        """The file with the output of the launcher and the ranks."""
        return Path(self.folder, "log")

    @staticmethod
    def _accept(listener: Listener, launcher: subprocess.Popen):
        for _ in range(int(HANGS)):
            try:
                pipe = listener.accept()
            except TimeoutError:
                if launcher.poll() is None:
                    continue
                raise
            rank, pid = pipe.recv()
            return rank, pid, pipe
        raise TimeoutError(f"nobody has come for {HANGS:.0f} s")

    def stop(self) -> None:
        """End the launcher and its ranks; the next ``run`` starts new ones."""
        if not self.processes:
            return
        self._signal(signal.SIGCONT)
        self._save_coverage()
        for pipe in self.pipes:
            pipe.close()
        for launcher in self.processes:
            launcher.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
        self.processes, self.pipes, self.pids = [], [], []
        self.said = self.log.read_text()[-4000:]
        shutil.rmtree(self.folder, ignore_errors=True)


def _serve(address: str, framework: str) -> None:
    stacks = f"{Path(address).parent}/stacks"
    tell_stacks(stacks)
    import grace

    if framework == "torch":
        import torch

        torch.set_num_threads(1)
    else:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
    grace.init(framework=framework)
    with Client(address) as pipe:
        pipe.send((grace.rank(), os.getpid()))
        sys.path[:] = pipe.recv()  # functions are found where the test process finds them
        with contextlib.suppress(EOFError):
            while True:
                function, args = pickle.loads(pipe.recv())
                tell_stacks(stacks)
                collect_seldom()
                try:
                    with own_settings():
                        answer = (True, function(*args))
                except BaseException:
                    answer = (False, traceback.format_exc())
                pipe.send(pickle.dumps(answer))
    os._exit(0)  # the launcher is being ended


if __name__ == "__main__":
    _serve(*sys.argv[1:])
