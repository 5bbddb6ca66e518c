"""A Python that has imported the frameworks already: what a test starts with it forks, and costs no import.

After ``install()``, ``sys.executable`` is a program that is called like ``python``. It asks a server, which is started
when it is first asked, for a fork of itself that runs the command line given, with the caller's files, folder and
environment. The fork is the caller to all who look: signals are handed on, its end is the caller's end, and it dies
with the caller. Modules imported beforehand are hidden in it until they are imported, so that it knows what it has
imported no better than a new Python.
"""

import array
import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.abc
import importlib.machinery
import inspect
import io
import marshal
import multiprocessing
import os
import random
import resource
import runpy
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

REAL = sys.executable
BEFOREHAND = [
    *("coverage", "numpy", "numba", "typer", "rich.console", "rich.table", "rich.progress", "rich.markdown", "yaml"),
    "pydantic",
    *("torch", "torch.distributed", "torch.distributed.run", "torch.nn.parallel", "torch.distributed.checkpoint"),
    *("torch._dynamo", "torch._dynamo.backends.common", "torch._inductor.cudagraph_trees", "torch.export._trace"),
    *("torch.distributed.optim", "torch.distributed.pipelining"),
    *("mpi4py", "sklearn.datasets", "pytest", "hypothesis"),
    *("horovod", "horovod.common.util", "horovod.runner.launch"),  # not both of its frameworks: they exclude each other
    *("tensorflow", "keras", "lightning.pytorch"),  # the last with transformers and accelerate
]
"""Modules that the server imports; packages that are not installed are left out."""
FORWARDED = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT]
CLIENT = Path(__file__).with_name("warm_client.py").read_text()
UNSET = {"PYTHONPATH", "PYTHONUNBUFFERED", "COVERAGE_PROCESS_START", "OMP_NUM_THREADS"}


def install() -> None:
    """Let ``sys.executable`` be such a Python, for this process and all that it starts.

    In its folder are ``grace``, ``horovodrun`` and all else of the virtual environment's programs. ``REAL`` is for
    tests that look at who is whose child, or at what a Python has imported. On Linux only; elsewhere nothing changes.
    """
    if sys.platform != "linux":
        return
    folder = os.environ.get("GRACE_WARM")
    if folder is None:
        folder = os.environ["GRACE_WARM"] = tempfile.mkdtemp(prefix="grace-warm-")
        atexit.register(remove, os.getpid(), folder)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{folder}/.server")
        listener.listen(64)
        threading.Thread(target=_start_when_called, args=(listener,), daemon=True).start()
        _fill(Path(folder), Path(sys.executable))
    sys.executable = f"{folder}/python"
    multiprocessing.set_executable(sys.executable)


def _fill(folder: Path, real: Path) -> None:
    names = {"PYTHON": str(real), "FOLDER": str(folder), "FORWARDED": [int(number) for number in FORWARDED]}
    given = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    client = f"#!{real} -IS\n{given}{CLIENT}"
    for other in real.parent.iterdir():
        if other.name.startswith("python") or other.name in ("grace", "horovodrun", "torchrun"):
            (folder / other.name).write_text(client)
            (folder / other.name).chmod(0o755)
        else:
            (folder / other.name).symlink_to(other)


def start() -> None:
    """Start the server before a program is called, so that it imports what they do while others import tests."""
    if "GRACE_WARM" in os.environ:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(f"{os.environ['GRACE_WARM']}/.server")


def _start_when_called(listener: socket.socket) -> None:
    select.select([listener], [], [])
    env = {name: value for name, value in os.environ.items() if name not in UNSET}
    env |= {"OPENBLAS_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}  # a process that has threads cannot be forked
    command = [REAL, __file__, str(listener.fileno()), *BEFOREHAND]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=env, cwd="/")
    listener.close()
    server.wait()  # it ends when its stdin does, and that when we do, even killed


def remove(pid: int, folder: str) -> None:
    """Remove a folder, in the process of that number only: what it forks ends by its functions, too."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def collect_seldom() -> None:
    """Collect what is garbage, and look no more at what is left, which is imported and stays.

    Ranks call it before each test's function. Graphs make objects by the thousand, of which looking for garbage took a
    tenth of all time; and Grace looks through all objects for models that are in DistributedDataParallel, which took
    most of the time to make an optimizer after a few hundred tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


# -- the server --------------------------------------------------------------------------------------------------------


def _import_all(names: Iterable[str]) -> list[dict[str, types.ModuleType]]:
    """Import modules, and hide them again, but not those of Python's own library; for each, what it brought."""
    sys.modules["pandas"] = None  # type: ignore[assignment] # Keras takes it where it is there, and it starts threads
    groups, before = [], set(sys.modules)
    for name in names:
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            if name == "numba":
                module.njit(lambda x: x[0])(sys.modules["numpy"].ones(1))  # sets up what every first call would
        brought = {name: module for name, module in sys.modules.items() if name not in before}
        groups.append(
            {n: module for n, module in brought.items() if n.partition(".")[0] not in sys.stdlib_module_names}
        )
        before |= set(brought)
    inspect.getmodule(None, "unknown")  # it finds the files of all modules, once; torch and pydantic call it in imports
    del sys.modules["pandas"]
    for group in groups:
        for name in group:
            del sys.modules[name]
    return groups


def _into_huge_pages() -> None:
    """Move what was imported into pages of 2 MiB, where Linux has them (6.1 or newer): a fork copies their table."""
    huge, collapse = 1 << 21, 25  # MADV_COLLAPSE
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, rights, *_, inode_or_name = line.split()
        if rights == "rw-p" and inode_or_name in ("0", "[heap]"):
            first, end = (int(address, 16) for address in area.split("-"))
            for address in range(-(-first // huge) * huge, end - huge + 1, huge):
                madvise(address, huge, collapse)


def _serve(listener: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request; returns it in the fork, with the caller's files."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    ours: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                client, _ = listener.accept()
                try:
                    request, files = _receive(client)
                except (OSError, EOFError, ValueError):
                    client.close()
                    continue
                if (pid := os.fork()) == 0:
                    for open_here in (listener, client, selector, *(other for _, other in ours.values())):
                        open_here.close()
                    for pidfd in ours:
                        os.close(pidfd)
                    return request, files
                for file in files:
                    os.close(file)
                with contextlib.suppress(OSError):  # a caller that was killed since; its socket will say so
                    client.sendall(f"{pid}\n".encode())
                pidfd = os.pidfd_open(pid)
                ours[pidfd] = pid, client
                selector.register(pidfd, selectors.EVENT_READ)
                selector.register(client, selectors.EVENT_READ, pid)
            elif key.fileobj == 0:
                for pid, _ in ours.values():  # the tests are gone
                    os.kill(pid, signal.SIGKILL)  # it is no other's: nobody but us waits for it
                os._exit(0)
            elif isinstance(key.fileobj, int):  # a fork has ended
                pid, client = ours.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                with contextlib.suppress(KeyError):
                    selector.unregister(client)
                with contextlib.suppress(OSError):
                    client.sendall(f"{os.waitpid(pid, 0)[1]}\n".encode())
                client.close()
            elif key.fileobj.fileno() >= 0:  # the caller was killed, and its fork has not ended at the same time
                selector.unregister(key.fileobj)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(key.data, signal.SIGKILL)


def _receive(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    files = array.array("i")
    length, ancillary, _, _ = client.recvmsg(4, socket.CMSG_LEN(253 * files.itemsize))
    for _, _, data in ancillary:
        files.frombytes(data[: len(data) - len(data) % files.itemsize])
    with client.makefile("rb") as stream:
        request = marshal.loads(stream.read(int.from_bytes(length, "big")))
    return request, list(files)


# -- in the fork -------------------------------------------------------------------------------------------------------


class _Hidden(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what was imported beforehand."""

    def __init__(self, groups: list[dict[str, types.ModuleType]]):
        self.group_of = {name: group for group in groups for name in group}
        self.found: dict[str, tuple[Any, Any]] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        group = self.group_of.get(name)
        if group is None:
            return None
        self.found.setdefault(name, (group[name].__spec__, group[name].__loader__))
        package, origin = hasattr(group[name], "__path__"), getattr(group[name], "__file__", None)
        spec = importlib.machinery.ModuleSpec(name, self, origin=origin, is_package=package)
        if package:
            spec.submodule_search_locations = list(group[name].__path__)
        return spec

    def create_module(self, spec: Any) -> types.ModuleType:
        return self.group_of[spec.name][spec.name]

    def get_code(self, name: str) -> Any:
        """For ``python -m``."""
        return self.found[name][1].get_code(name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__, module.__loader__ = self.found[module.__name__]
        for member, other in self.group_of[module.__name__].items():
            sys.modules.setdefault(member, other)
        if module.__name__ == "torch" and (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
            module.set_num_threads(int(threads))
        if module.__name__ == "numba":
            module.core.config.reload_config()


def _become(request: dict[str, Any], files: list[int], hidden: _Hidden) -> None:
    """Take the caller's place: its files, folder, environment, cores and network."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: when the server ends
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in files]
    for file in {*files, 0, 1, 2}:
        os.close(file)
    for file, number in zip(high, request["files"], strict=True):
        os.dup2(file, number)
        os.set_inheritable(number, True)
        os.close(file)
    for name in ("user", "net", "uts", "mnt"):
        if os.readlink(f"/proc/self/ns/{name}") != request["namespaces"][name]:
            with open(f"/proc/{request['pid']}/ns/{name}") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"setns {name}")
    os.chdir(request["cwd"])
    os.sched_setaffinity(0, request["cores"])
    os.umask(request["umask"])
    for limit, values in request["limits"].items():
        resource.setrlimit(getattr(resource, limit), tuple(values))
    os.environ.clear()
    os.environb.update(request["env"])
    read_on_import = {"TRITON_INTERPRET": "triton.", "KERAS_BACKEND": "keras."}  # packages that are imported anew
    for package in [package for variable, package in read_on_import.items() if os.environ.get(variable)]:
        for group in hidden.group_of.values():
            for name in [name for name in group if f"{name}.".startswith(package) and "._C" not in name]:
                del group[name]
        hidden.group_of = {name: group for name, group in hidden.group_of.items() if name in group}
    unbuffered = request["unbuffered"] or bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if number not in request["files"]:
            setattr(sys, name, None)
            continue
        mode, buffering = ("wb", 0 if unbuffered else -1) if number else ("rb", -1)
        binary: Any = open(number, mode, buffering, closefd=False)  # noqa: SIM115
        errors = "backslashreplace" if number == 2 else "strict"
        lines = number == 2 or (binary.isatty() and not unbuffered)
        text = io.TextIOWrapper(binary, "utf-8", errors, line_buffering=lines, write_through=unbuffered)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    tempfile.tempdir = None
    random.seed()
    if group := hidden.group_of.get("numpy"):
        group["numpy"].random.seed()
    sys.executable = request["python"]
    sys.argv = sys.orig_argv = [request["python"], *request["argv"]]


def _run(argv: list[str]) -> None:
    """Run a command line as Python does."""
    kind = argv[0] if argv[0] in ("-c", "-m") else "file"
    sys.argv = ["-c", *argv[2:]] if kind == "-c" else argv[kind != "file" :]
    first = {"-c": "", "-m": os.getcwd(), "file": os.path.dirname(os.path.realpath(argv[0]))}[kind]
    before = [] if os.environ.get("PYTHONSAFEPATH") else [first]
    sys.path[:0] = [*before, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if os.environ.get("COVERAGE_PROCESS_START"):
        importlib.import_module("coverage").process_startup()
    if kind == "-m":
        runpy._run_module_as_main(argv[1], alter_argv=True)  # type: ignore[attr-defined]
    elif kind == "-c":
        exec(compile(argv[1], "<string>", "exec"), main.__dict__)
    else:
        main.__file__ = argv[0]
        exec(compile(Path(argv[0]).read_bytes(), argv[0], "exec"), main.__dict__)


def _main(listener: int, *beforehand: str) -> None:
    os.setpgid(0, 0)
    del sys.path[0]
    for number in FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    gc.disable()  # while modules are read nothing is garbage, and looking for it took a quarter of the time
    groups = _import_all(beforehand)
    assert len(os.listdir("/proc/self/task")) == 1, "a module that was imported beforehand has started a thread"
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined] # torch takes its operators apart
        finalizer.atexit = False
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    hidden = _Hidden(groups)
    gc.freeze()
    gc.enable()
    _into_huge_pages()
    request, files = _serve(socket.socket(fileno=listener))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _become(request, files, hidden)
    sys.meta_path.insert(0, hidden)
    code = _outcome(request["argv"])
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        with contextlib.suppress(mpi.Exception):
            mpi.Finalize()  # which mpi4py does when the interpreter ends
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)  # to take apart all that was imported would cost more than most programs


def _outcome(argv: list[str]) -> int:
    """Run a command line; its exit code, as Python would give it."""
    try:
        _run(argv)
        return 0
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 255
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, KeyboardInterrupt):
            sys.stderr.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1


if __name__ == "__main__":
    _main(int(sys.argv[1]), *sys.argv[2:])
