"""Start of a benchmark's ranks for each engine: on this machine's loopback, or on an emulated link."""

import contextlib
import dataclasses
import importlib.util
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from grace.bench.common.ending import WorkerError
from grace.bench.link.emulation import Link
from grace.errors import ConfigError, MissingExtraError, installed
from grace.launch.processes import end
from grace.planner.measure_network import cores

ENGINES = ("torch", "horovod", "mpi")
LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo" if sys.platform == "linux" else "lo0"
CROWDED = {  # Open MPI: more ranks than cores, tied to none, and root as in a container
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


@dataclasses.dataclass
class Process:
    """Command line of a process, up to the arguments of Python, and the variables that it needs in its environment."""

    command: list[str]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class RankLauncher:
    """Launcher of a benchmark's ranks: a process for each rank, or one that starts them all; and variables that all
    ranks get unless the user has set them."""

    processes: list[Process]
    engine: str
    defaults: dict[str, str]


def check_engine(engine: str) -> str:
    """Return the engine's name; raise an error if there is no such engine, or it is not installed."""
    if engine not in ENGINES:
        raise ConfigError(f"unknown engine {engine!r}; known: {', '.join(ENGINES)}")
    if engine == "horovod" and not has_horovod():
        raise MissingExtraError(
            "--engine horovod needs Horovod, built for torch: `make horovod` in a checkout of Grace builds and "
            "installs it"
        )
    if engine == "mpi" and mpirun() is None:
        raise MissingExtraError(
            '--engine mpi needs an MPI\'s mpirun and mpi4py: pip install "grace-compress[mpi]", and an MPI'
        )
    return engine


def check_links(nodes: int, rates: Iterable[float | None]) -> None:
    """Raise a ConfigError for links that cannot be: between so many machines, of these rates; None is the loopback."""
    for rate in rates:
        if rate is not None:
            Link(nodes, rate)


def has_horovod() -> bool:
    """Return True if Horovod is installed, and was built for torch."""
    found = importlib.util.find_spec("horovod")
    folders = [] if found is None else list(found.submodule_search_locations or [])
    return any(list(Path(folder, "torch").glob("mpi_lib*")) for folder in folders)


def mpirun() -> str | None:
    """Return the path of mpirun, if mpi4py is installed too; MPIs installed by pip are beside Python."""
    if not installed("mpi4py"):
        return None
    return shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))


@contextlib.contextmanager
def launcher(engine: str, ranks: int, link: Link | None = None) -> Iterator[RankLauncher]:
    """Return the launcher of ranks that find each other by an engine; servers that they need run in the ``with`` block.

    The link is up; without one there is the loopback. Over torch it may join
    fewer machines, each of which then has equally many ranks that reach each other by its own loopback.

    >>> with launcher("torch", 2) as start:
    ...     [process.environment["RANK"] for process in start.processes]
    ['0', '1']
    """
    defaults = {  # of all ranks: a share of the cores
        "OMP_NUM_THREADS": str(max(1, len(cores()) // ranks)),
        "PYTHONSAFEPATH": "1",  # else `python -m` would import modules of the current folder
    }
    with contextlib.ExitStack() as stack:
        if engine == "torch":
            if link is None:
                defaults["GLOO_SOCKET_IFNAME"] = LOOPBACK_INTERFACE
            yield RankLauncher(_torch(ranks, link), engine, defaults)
        elif engine == "horovod":
            port = stack.enter_context(_rendezvous(ranks, link))
            yield RankLauncher(_horovod(ranks, link, port), engine, defaults)
        else:
            agent = "" if link is None else stack.enter_context(_agent(link))
            yield RankLauncher([_mpi(ranks, link, agent)], engine, {**defaults, **CROWDED})


def _python(rank: int, link: Link | None) -> list[str]:
    return [sys.executable] if link is None else link.command(rank, [sys.executable])


def _torch(ranks: int, link: Link | None) -> list[Process]:
    """Return a process for each rank, equally many on each machine that the link joins; without one all on this."""
    each = ranks // (1 if link is None else link.ranks)  # --sharded: a shard group is one node of the link
    master = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(_free_port())}
    processes = []
    for rank in range(ranks):
        node = rank // each
        own = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank % each, "LOCAL_WORLD_SIZE": each}
        shared = master if link is None else link.environment(node)
        environment = {**shared, **{key: str(value) for key, value in own.items()}}
        processes.append(Process(_python(node, link), environment))
    return processes


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))  # the kernel's choice; another program may take it before rank 0 does
        return int(free.getsockname()[1])


@contextlib.contextmanager
def _rendezvous(ranks: int, link: Link | None) -> Iterator[str]:
    """Start a server by which the ranks find each other, and return its port."""
    command = [*_python(0, link), "-m", "grace.bench.ranks.rendezvous", str(ranks)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as server:
        try:
            port = server.stdout.readline().strip() if server.stdout else ""
            if not port:
                raise WorkerError(f"Horovod's rendezvous server did not start\n{server.communicate()[1].strip()}")
            yield port
        finally:
            end(server)


def _horovod(ranks: int, link: Link | None, port: str) -> list[Process]:
    shared = {
        "HOROVOD_SIZE": str(ranks),
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_SIZE": str(ranks),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": LOOPBACK if link is None else link.address(0),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": LOOPBACK_INTERFACE if link is None else link.interface,
    }
    processes = []
    for rank in range(ranks):
        own = {"HOROVOD_RANK": str(rank), "HOROVOD_CROSS_RANK": str(rank), "HOROVOD_HOSTNAME": f"rank{rank}"}
        processes.append(Process(_python(rank, link), {**shared, **own}))
    return processes


def _mpi(ranks: int, link: Link | None, agent: str) -> Process:
    program = mpirun()
    assert program is not None
    command = [program, "-np", str(ranks)]
    if link is None:
        return Process([*command, sys.executable])
    hosts = ",".join(link.address(rank) for rank in range(ranks))
    # TCP only: ranks of one machine would exchange through shared memory, past the link
    where = {"plm_rsh_agent": agent, "btl": "tcp,self", "pml": "ob1"}
    where |= {f"{part}_tcp_if_include": link.interface for part in ("btl", "oob")}
    options = [word for key, value in where.items() for word in ("--mca", key, value)]
    return Process(link.command(0, [*command, "--host", hosts, *options, sys.executable]))


@contextlib.contextmanager
def _agent(link: Link) -> Iterator[str]:
    """Return a script that mpirun calls instead of ssh, and that runs a command on a rank's side of the link."""
    with tempfile.TemporaryDirectory(prefix="grace-mpi-") as folder:
        script = Path(folder, "agent")
        cases = [
            f'{link.address(rank)}) exec {shlex.join(link.command(rank, ["sh", "-c"]))} "$*";;'
            for rank in range(link.ranks)
        ]
        script.write_text("\n".join(["#!/bin/sh", "host=$1", "shift", "case $host in", *cases, "esac", "exit 1", ""]))
        script.chmod(0o700)
        yield str(script)
