"""The program that is called like ``python``: asks the server of warm.py for a fork, and ends as that does.

``PYTHON``, ``FOLDER`` and ``FORWARDED`` are written before it. It imports nothing that is written in Python.
"""

# ruff: noqa: F821 - the names that are written before it

import _signal
import _socket
import marshal
import posix
import resource
import sys

PYTHON: str
FOLDER: str
FORWARDED: list[int]

pid, early, argv = 0, [], sys.argv[1:]
folder, _, name = sys.argv[0].rpartition("/")
unbuffered = False
if not name.startswith("python"):
    argv.insert(0, f"{PYTHON.rpartition('/')[0]}/{name}")
while argv and argv[0] in ("-u", "-B"):
    unbuffered |= argv.pop(0) == "-u"
if not argv or (argv[0].startswith("-") and argv[0] not in ("-m", "-c")):  # nothing for a fork
    posix.execv(PYTHON, [PYTHON, *sys.argv[1:]])


def forward(number, frame):
    posix.kill(pid, number) if pid else early.append(number)


def is_open(file):
    try:
        return posix.fstat(file)
    except OSError:  # what listed them is closed
        return None


def answer():
    line = b""
    while not line.endswith(b"\n") and (more := server.recv(1)):
        line += more
    return int(line) if line else None


for number in FORWARDED:
    _signal.signal(number, forward)
files = [file for file in map(int, posix.listdir("/proc/self/fd")) if is_open(file)]
server = _socket.socket(_socket.AF_UNIX)
server.connect(f"{FOLDER}/.server")
posix.umask(umask := posix.umask(0))
request = marshal.dumps(
    {
        "argv": argv,
        "files": files,
        "cwd": posix.getcwd(),
        "env": posix.environ,
        "pid": posix.getpid(),
        "umask": umask,
        "unbuffered": unbuffered,
        "python": f"{folder}/python",
        "cores": list(posix.sched_getaffinity(0)),
        "namespaces": {name: posix.readlink(f"/proc/self/ns/{name}") for name in ("user", "net", "uts", "mnt")},
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in ("RLIMIT_NOFILE", "RLIMIT_CORE")},
    }
)
numbers = b"".join(file.to_bytes(4, sys.byteorder) for file in files)
server.sendmsg([len(request).to_bytes(4, "big")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)])
server.sendall(request)
pid = answer() or 0
for number in early:
    posix.kill(pid, number)
for file in files:
    posix.close(file)
status = answer()
code = posix.waitstatus_to_exitcode(status) if status is not None else -_signal.SIGKILL  # the server was killed
if code < 0:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (_signal.SIGKILL, _signal.SIGSTOP):
        _signal.signal(-code, _signal.SIG_DFL)
    posix.kill(posix.getpid(), -code)
posix._exit(code)
