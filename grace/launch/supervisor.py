"""Launchers that run: what they print, which rank failed first, and the end of all of them."""

import contextlib
import dataclasses
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from grace.errors import ConfigError
from grace.launch import preparing, processes
from grace.launch.command_lines import Command

KEPT = 1 << 18
"""Bytes of what a launcher said last that are searched for the rank that failed."""


@dataclasses.dataclass(frozen=True)
class End:
    """How a job ended.

    Attributes:
        code: the exit code: 0, or that of the first rank that failed, or 128 and the signal that ended it.
        message: which rank ended how, or which node could not be reached; empty for 0.
    """

    code: int
    message: str = ""


def run(commands: Sequence[Command]) -> End:
    """Start the commands, wait, and say how they ended; when one fails the others are ended.

    What they print goes to this process's stdout and stderr. If this process is killed, they are ended, too.

    Raises:
        ConfigError: a launcher is not installed.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP; all are ended.
    """
    jobs: list[_Job] = []
    with processes.signals_raise(), processes.no_orphans():
        try:
            for part in commands:
                jobs.append(_Job(part))
            while not any(job.failed for job in jobs) and any(job.process.poll() is None for job in jobs):
                for job in jobs:
                    job.go_on()
                time.sleep(0.05)
            failed = [job for job in jobs if job.failed]
        finally:
            processes.end(*(process for job in jobs for process in job.started))
    for job in jobs:
        job.close()
    return failed[0].end(len(commands) > 1) if failed else End(0)


def check_program(name: str) -> None:
    """Whether there is such a program, in PATH or beside this Python.

    Raises:
        ConfigError: there is none, or it cannot be executed.
    """
    if shutil.which(name, path=_path()) is None:
        why = "it is not executable" if Path(name).is_file() else os.strerror(errno.ENOENT)
        raise ConfigError(f"cannot start {name}: {why}")


def _path() -> str:
    """Where launchers that were installed beside this Python are found, after the user's own."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])


REPORT = re.compile(
    rb"MPI_ABORT was invoked on rank|with errorcode -?\d+\.|NOTE: invoking MPI_ABORT|You may or may not see output|"
    rb"exactly when Open MPI kills|Primary job +terminated|a non-zero exit code\. Per|mpirun (?:detected|noticed) that|"
    rb"the job to be terminated\. The|  Process name: \[\[|  Exit code: +\d|"
    rb"\[\S+:\d+\] (?:\d+ more process|Set MCA parameter \"orte_base_help)"
)
"""Lines of Open MPI's report of a failure."""
REPORT_TO_THE_END = re.compile(rb"E\d{4} .*torch/distributed/elastic/.*\] failed \(exitcode: ")
"""Where torchrun's report begins, with a traceback of its own; all ranks have ended before."""


class _Report:
    """Tells what launchers say of a failure, in many lines, from what ranks print. Parts of lines are never held back.

    >>> report = _Report()
    >>> report.split(b"loss 1\\n" + b"-" * 74 + b"\\nMPI_ABORT was invoked on rank 1 in communicator A\\n\\nloss")[0]
    b'loss 1\\nloss'
    """

    def __init__(self) -> None:
        self.inside = self.ended = False
        self.inside_line = False
        self.rule = b""
        """A line of dashes, whose next line tells whose it is."""

    def split(self, data: bytes) -> tuple[bytes, bytes]:
        """What is to be shown, and what is a launcher's report; nothing more comes after no data."""
        shown, left_out = bytearray(), bytearray()
        for line in data.splitlines(keepends=True):
            text = b"" if self.inside_line else line.strip(b"\r\n")
            self.ended |= REPORT_TO_THE_END.match(text) is not None
            reports = self.ended or REPORT.match(text) is not None
            reports |= self.inside and not self.inside_line and (not text or _is_rule(text))
            if not reports and not self.inside_line and _is_rule(text):
                shown += self.rule
                self.rule = line
                continue
            (left_out if reports else shown).extend(self.rule + line)
            self.rule, self.inside, self.inside_line = b"", reports, not line.endswith(b"\n")
        if not data:
            shown, self.rule = shown + self.rule, b""
        return bytes(shown), bytes(left_out)


def _is_rule(text: bytes) -> bool:
    return len(text) > 60 and not text.strip(b"-")


class _Job:
    """A launcher that runs, in a session of its own: Ctrl-C reaches only us, and ranks end without tracebacks.

    Attributes:
        started: what hands variables to the node, if there are any, and the launcher once the node has them. The former
            goes on until the job ends, since it then removes them if the launcher did not come to it.
    """

    def __init__(self, command: Command):
        self.command = command
        self.said = bytearray()
        self.left_out = bytearray()
        self.threads: list[threading.Thread] = []
        self.started: list[subprocess.Popen] = []
        self.handed = False
        try:
            check_program(command.argv[0])
        except ConfigError as error:
            raise ConfigError(f"{error}; is it installed?") from None
        if command.handing:
            process = self._start(command.handing)
            self._in_thread(self._hand, process.stdin, process.stdout)
        else:
            self._launch()

    @property
    def process(self) -> subprocess.Popen:
        """The one that was started last."""
        return self.started[-1]

    def go_on(self) -> None:
        """Start the launcher if the node has its variables now."""
        if self.handed and len(self.started) == 1:
            self._launch()

    def _launch(self) -> None:
        process = self._start(processes.kept(self.command.argv))
        if process.stdout is not None:
            self._in_thread(self._copy, process.stdout, sys.stdout)

    def _start(self, argv: list[str]) -> subprocess.Popen:
        process = subprocess.Popen(
            argv,
            env={**os.environ, "PATH": _path(), **self.command.environment},
            stdin=subprocess.PIPE,  # which ends when we do
            stdout=subprocess.PIPE if self.command.tells_on_stdout else None,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.started.append(process)
        self._in_thread(self._copy, process.stderr, sys.stderr)
        return process

    def _in_thread(self, function: Callable[..., None], *args: Any) -> None:
        self.threads.append(threading.Thread(target=function, args=args, daemon=True))
        self.threads[-1].start()

    def _hand(self, target: IO[bytes], source: IO[bytes]) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended, and is seen to
            target.write(os.fsencode(self.command.handed))
            target.flush()
            self.handed = any(line.strip() == b"ready" for line in source)

    def _copy(self, source: IO[bytes], target: IO[str]) -> None:
        report = _Report()
        while data := os.read(source.fileno(), 1 << 16):
            self.said += data
            del self.said[:-KEPT]
            self._write(target, report, data)
        self._write(target, report, b"")

    def _write(self, target: IO[str], report: _Report, data: bytes) -> None:
        shown, left_out = report.split(data)
        self.left_out += left_out
        target.buffer.write(shown)  # type: ignore[attr-defined]
        target.flush()

    @property
    def failed(self) -> bool:
        return self.process.poll() not in (None, 0)

    def close(self) -> None:
        for thread in self.threads:
            thread.join(2)

    def end(self, one_of_several: bool) -> End:
        said, code = self.said.decode(errors="replace"), self.process.returncode
        if found := first_failure(said):
            rank, code = found
            why = f": {reason}" if (reason := first_reason(said, rank)) else ""
            return End(_exit_code(code), f"rank {rank} {_how(code)}{why}; the others were ended")
        if message := preparing.unprepared(said) or unreachable(said):
            return End(_exit_code(code), message)
        if self.command.remote and (message := of_node(said, self.command.node)):
            return End(_exit_code(code), message)
        sys.stderr.write(self.left_out.decode(errors="replace"))  # it says all that is known
        where = f" for node {self.command.node}" if one_of_several else ""
        how = _how(code) if code < 0 else f"ended with exit code {code}"  # launchers have codes over 128 of their own
        return End(_exit_code(code), f"{Path(self.command.argv[0]).name}{where} {how}; no rank is named")


FAILURES = (
    r"Root Cause \(first observed failure\):.*?\n\s*rank\s*:\s(?P<rank>\d+).*?\n\s*exitcode\s*:\s(?P<code>-?\d+)",
    r"process rank (?P<rank>\d+) with PID \d+ on node \S+ exited on signal (?P<signal>\d+)",
    r"Process name: \[\[\d+,\d+\],(?P<rank>\d+)\]\s+Exit code:\s+(?P<code>\d+)",
    r"Process name: (?P<rank>\d+)\s+Exit code: (?P<code>\d+)",
    r"grace: \w+ on rank (?P<rank>\d+) ends all ranks",  # grace.backends.mpi says it, and aborts with exit code 1
    # ranks that mpirun ends when another has failed may say this, too
    r"MPI_ABORT was invoked on rank (?P<rank>\d+) in communicator.*?\swith errorcode (?P<code>-?\d+)",
)
"""What torchrun, Open MPI's mpirun, horovodrun and Grace say of the first rank that failed; the surest come first."""


def first_failure(said: str) -> tuple[int, int] | None:
    """The rank that a launcher says failed first, and its exit code, or a signal's number below zero.

    >>> first_failure("mpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9 (Killed).")
    (1, -9)
    >>> first_failure("Process name: 3\\nExit code: 7")
    (3, 7)

    Ranks know who was first where a launcher names one that followed:

    >>> first_failure("[1]<stderr>:grace: rank 1 failed first: ValueError: no\\nProcess name: 0\\nExit code: 7")
    (1, 1)
    """
    told = re.search(r"grace: rank (?P<rank>\d+) failed first: ", said)  # grace.core.watch says it, on all ranks
    for pattern in FAILURES:
        found = re.search(pattern, said, re.DOTALL)
        if found and (told is None or told["rank"] == found["rank"]):
            groups = found.groupdict()
            code = -int(groups["signal"]) if "signal" in groups else int(groups.get("code", 1))
            return int(groups["rank"]), code
    return (int(told["rank"]), 1) if told else None


def first_reason(said: str, rank: int) -> str:
    """What a rank failed of, in its own words; empty if it cannot be told.

    >>> first_reason("[rank1]: Traceback (most recent call last):\\n[rank1]: ValueError: no data", 1)
    'ValueError: no data'
    """
    error = r"([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)\b[^\r\n]*)"
    told = re.findall(rf"grace: rank {rank} failed first: ([^\r\n]+)", said)
    told += map(": ".join, re.findall(rf"grace: (\w+) on rank {rank} ends all ranks: ([^\r\n]+)", said))
    own = re.findall(rf"^(?:\[rank{rank}\]:|\[(?:1,)?{rank}\]<stderr>:) ?{error}", said, re.MULTILINE)
    return re.sub(r"\[[\d,]+\]<stderr>:", "", next(iter([*told, *own[-1:]]), ""))


UNREACHABLE = (
    r"ssh: Could not resolve hostname (?P<node>\S+): (?P<why>[^\r\n]+)",
    r"ssh: connect to host (?P<node>\S+) port \d+: (?P<why>[^\r\n]+)",
    r"(?:\S+@)?(?P<node>[^\s@]+): (?P<why>Permission denied \([^\r\n]+)",
    r"Host key for (?P<node>\S+) has changed and you have requested (?P<why>strict checking)",
)
"""What ssh says of a machine that it does not reach."""


def unreachable(said: str) -> str:
    """Which node ssh did not reach, and why; empty if it says nothing of the kind.

    >>> unreachable("ssh: connect to host b port 22: Connection refused")
    'node b cannot be reached by ssh: Connection refused'
    """
    found = next((match for pattern in UNREACHABLE if (match := re.search(pattern, said))), None)
    return f"node {found['node']} cannot be reached by ssh: {found['why']}" if found else ""


def of_node(said: str, node: str) -> str:
    """What a node itself, or ssh to it, says that it lacks; empty if neither says anything of the kind.

    >>> of_node("bash: line 1: cd: /work: No such file or directory", "b").partition(";")[0]
    'node b lacks the working folder or a part of it (cd: /work: No such file or directory)'
    """
    if why := re.search(r"sh: (?:line )?\d*:? ?(cd: [^\r\n]+)", said):
        lacks = f"node {node} lacks the working folder or a part of it ({why[1]})"
        return f"{lacks}; grace launch --copy puts files on the nodes"
    if "Host key verification failed" in said:
        return f"node {node} cannot be reached by ssh: its host key is not known here; log in to it once by ssh"
    return ""


def _exit_code(code: int) -> int:
    """A shell's number for it, never 0.

    >>> _exit_code(7), _exit_code(-9), _exit_code(256)
    (7, 137, 1)
    """
    return 128 - code if code < 0 else code & 255 or 1


def _how(code: int) -> str:
    """In words; shells add 128 to a signal's number.

    >>> _how(7), _how(-9), _how(137)
    ('ended with exit code 7', 'was ended by SIGKILL (exit code 137)', 'was ended by SIGKILL (exit code 137)')
    """
    number = -code if code < 0 else code - 128
    if number in set(signal.Signals):
        return f"was ended by {signal.Signals(number).name} (exit code {number + 128})"
    return f"ended with exit code {code}"
