"""Supervision of running launchers: their output, the rank that failed first, and the end of all of them."""

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
from typing import IO

from grace.errors import ConfigError
from grace.launch import preparing, processes
from grace.launch.command_lines import Command

OUTPUT_BYTES = 1 << 18
"""Bytes of a launcher's last output that are searched for the rank that failed."""


@dataclasses.dataclass(frozen=True)
class End:
    """End of a job.

    Attributes:
        code: the exit code: 0, or that of the first rank that failed, or 128 and the signal that ended it.
        message: the rank and how it ended, or the node that could not be reached; empty for 0.
    """

    code: int
    message: str = ""


INTERRUPTED = End(130, "interrupted; the ranks are ended")


def run(commands: Sequence[Command]) -> End:
    """Start the commands, wait, and return how they ended; when one fails the others are ended.

    Their output goes to this process's stdout and stderr. If this process is killed, they are ended, too.

    Returns:
        The end of the job; :data:`INTERRUPTED` after Ctrl-C, SIGTERM or SIGHUP.

    Raises:
        ConfigError: a launcher is not installed.
    """
    try:
        return _run(commands)
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(commands: Sequence[Command]) -> End:
    jobs: list[_Job] = []
    with processes.signals_raise(), processes.no_orphans():
        try:
            for part in commands:
                jobs.append(_Job(part))
            while not any(job.failed for job in jobs) and any(job.process.poll() is None for job in jobs):
                for job in jobs:
                    job.launch_if_ready()
                time.sleep(0.05)
            failed = [job for job in jobs if job.failed]  # before the others are ended, which are not at fault
        finally:
            processes.end(*(process for job in jobs for process in job.started))
    for job in jobs:
        job.close()
    return failed[0].end(len(commands) > 1) if failed else End(0)


def check_program(name: str) -> None:
    """Raise ConfigError if there is no such program, in PATH or beside this Python, or it cannot be executed."""
    if shutil.which(name, path=_search_path()) is None:
        missing = "it is a folder" if Path(name).is_dir() else os.strerror(errno.ENOENT)
        why = "it is not executable" if Path(name).is_file() else missing
        raise ConfigError(f"cannot start {name}: {why}")


def _search_path() -> str:
    """Return the folders in which launchers are found: the user's own, and then that of this Python."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])


REPORT = re.compile(
    rb"MPI_ABORT was invoked on rank|with errorcode -?\d+\.|NOTE: invoking MPI_ABORT|You may or may not see output|"
    rb"exactly when Open MPI kills|Primary job +terminated|a non-zero exit code\. Per|mpirun (?:detected|noticed) that|"
    rb"the job to be terminated\. The|  Process name: \[\[|  Exit code: +\d|"
    rb"\[\S+:\d+\] (?:\d+ more process|Set MCA parameter \"orte_base_help)"
)
"""Lines of Open MPI's report of a failure."""
REPORT_TO_THE_END = re.compile(rb"E\d{4} .*torch/distributed/elastic/.*\] failed \(exitcode: ")
"""First line of torchrun's report, with a traceback of its own; all ranks have ended before."""


class _Report:
    """Filter that separates launchers' reports of a failure from ranks' output. Parts of lines are never held back.
    >>> report = _Report()
    >>> report.split(b"loss 1\\n" + b"-" * 74 + b"\\nMPI_ABORT was invoked on rank 1 in communicator A\\n\\nloss")[0]
    b'loss 1\\nloss'
    """

    def __init__(self) -> None:
        self.inside = self.ended = False
        self.inside_line = False
        self.rule = b""
        """A line of dashes that is held back: the next line shows if it belongs to a report."""

    def split(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the part of the output to show, and the part that is a launcher's report; empty data ends the
        output."""
        shown = bytearray()
        hidden = bytearray()
        for line in data.splitlines(keepends=True):
            text = b"" if self.inside_line else line.strip(b"\r\n")
            self.ended |= REPORT_TO_THE_END.match(text) is not None
            reports = self.ended or REPORT.match(text) is not None
            reports |= self.inside and not self.inside_line and (not text or _is_rule(text))
            if not reports and not self.inside_line and _is_rule(text):
                shown += self.rule
                self.rule = line
                continue
            (hidden if reports else shown).extend(self.rule + line)
            self.rule = b""
            self.inside = reports
            self.inside_line = not line.endswith(b"\n")
        if not data:
            shown += self.rule
            self.rule = b""
        return bytes(shown), bytes(hidden)


def _is_rule(text: bytes) -> bool:
    return len(text) > 60 and not text.strip(b"-")


class _Job:
    """Launcher that runs, in a session of its own: Ctrl-C reaches only us, and ranks end without tracebacks.

    Attributes:
        started: the process that sends variables to the node, if there are any, and the launcher once the node has
            them. The former runs until the job ends, since it then removes them if the launcher did not come to it.
    """

    def __init__(self, command: Command):
        self.command = command
        self.output = bytearray()
        self.hidden = bytearray()
        self.threads: list[threading.Thread] = []
        self.started: list[subprocess.Popen] = []
        self.env_sent = False
        try:
            check_program(command.argv[0])
        except ConfigError as error:
            raise ConfigError(f"{error}; is it installed?") from None
        if command.env_sender:
            process = self._start(command.env_sender)
            self._in_thread(self._send_env, process.stdin, process.stdout)
        else:
            self._launch()

    @property
    def process(self) -> subprocess.Popen:
        """Process that was started last."""
        return self.started[-1]

    def launch_if_ready(self) -> None:
        """Start the launcher if the node has its variables now."""
        if self.env_sent and len(self.started) == 1:
            self._launch()

    def _launch(self) -> None:
        process = self._start(processes.guarded(self.command.argv))
        if process.stdout is not None:
            self._in_thread(self._copy, process.stdout, sys.stdout)

    def _start(self, argv: list[str]) -> subprocess.Popen:
        process = subprocess.Popen(
            argv,
            env={**os.environ, "PATH": _search_path(), **self.command.environment},
            stdin=subprocess.PIPE,  # the pipe ends when this process does, which guarded() notices
            stdout=subprocess.PIPE if self.command.errors_on_stdout else None,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.started.append(process)
        self._in_thread(self._copy, process.stderr, sys.stderr)
        return process

    def _in_thread(self, function: Callable[..., None], *args: object) -> None:
        self.threads.append(threading.Thread(target=function, args=args, daemon=True))
        self.threads[-1].start()

    def _send_env(self, target: IO[bytes], source: IO[bytes]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the process has ended: run() notices
            target.write(os.fsencode(self.command.env_exports))
            target.flush()
            self.env_sent = any(line.strip() == b"ready" for line in source)

    def _copy(self, source: IO[bytes], target: IO[str]) -> None:
        report = _Report()
        while data := os.read(source.fileno(), 1 << 16):
            self.output += data
            del self.output[:-OUTPUT_BYTES]
            self._write(target, report, data)
        self._write(target, report, b"")

    def _write(self, target: IO[str], report: _Report, data: bytes) -> None:
        shown, hidden = report.split(data)
        self.hidden += hidden
        with contextlib.suppress(BrokenPipeError):  # nobody reads it any more: ranks must not wait until somebody does
            target.buffer.write(shown)  # type: ignore[attr-defined]
            target.flush()

    @property
    def failed(self) -> bool:
        """True if the last process has ended with an error, or too early."""
        return self.ended_early or self.process.poll() not in (None, 0)

    @property
    def ended_early(self) -> bool:
        """True if the process that sends variables to the node has ended without an error, before the node had them."""
        sends = len(self.started) == 1 and bool(self.command.env_sender)
        return sends and not self.env_sent and self.process.poll() == 0

    def close(self) -> None:
        """Wait for the threads that copy output."""
        for thread in self.threads:
            # No longer: a process that has left the session may hold the pipe open.
            thread.join(2)

    def end(self, one_of_several: bool) -> End:
        """Return how the job ended, from its output and exit code."""
        if self.ended_early:
            why = "its shell ended before it had the variables of shared_envs; does a start-up file of it call exit?"
            return End(1, f"node {self.command.node}: {why}")
        output = self.output.decode(errors="replace")
        code = self.process.returncode
        failure = first_failure(output)
        if failure is not None:
            rank, code = failure
            reason = first_reason(output, rank)
            why = f": {reason}" if reason else ""
            return End(_exit_code(code), f"rank {rank} {_describe_exit(code)}{why}; the others were ended")
        message = preparing.setup_failure(output) or unreachable(output)
        if not message and self.command.remote:
            message = node_failure(output, self.command.node)
        if message:
            return End(_exit_code(code), message)
        # No rank and no node is known: the launcher's report, which was not shown, is all there is.
        sys.stderr.write(self.hidden.decode(errors="replace"))
        where = f" for node {self.command.node}" if one_of_several else ""
        # launchers have exit codes over 128 of their own, which are no signals
        how = _describe_exit(code) if code < 0 else f"ended with exit code {code}"
        return End(_exit_code(code), f"{Path(self.command.argv[0]).name}{where} {how}; no rank is named")


FAILURES = (
    r"Root Cause \(first observed failure\):.*?\n\s*rank\s*:\s(?P<rank>\d+).*?\n\s*exitcode\s*:\s(?P<code>-?\d+)",
    r"process rank (?P<rank>\d+) with PID \d+ on node \S+ exited on signal (?P<signal>\d+)",
    r"Process name: \[\[\d+,\d+\],(?P<rank>\d+)\]\s+Exit code:\s+(?P<code>\d+)",
    r"Process name: (?P<rank>\d+)\s+Exit code: (?P<code>\d+)",
    r"grace: \w+ on rank (?P<rank>\d+) ends all ranks",  # by grace.backends.mpi, which aborts with exit code 1
    # ranks that mpirun ends when another has failed may print this, too
    r"MPI_ABORT was invoked on rank (?P<rank>\d+) in communicator.*?\swith errorcode (?P<code>-?\d+)",
)
"""Messages of torchrun, Open MPI's mpirun, horovodrun and Grace about the first rank that failed; the surest are first.
"""


def first_failure(output: str) -> tuple[int, int] | None:
    """Return the rank that a launcher reports to have failed first, and its exit code, or a signal's number below zero.

    >>> first_failure("mpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9 (Killed).")
    (1, -9)
    >>> first_failure("Process name: 3\\nExit code: 7")
    (3, 7)

    Ranks know who was first where a launcher names one that followed:

    >>> first_failure("[1]<stderr>:grace: rank 1 failed first: ValueError: no\\nProcess name: 0\\nExit code: 7")
    (1, 1)
    """
    by_watch = re.search(
        r"grace: rank (?P<rank>\d+) failed first: ", output
    )  # printed by grace.core.watch on all ranks
    for pattern in FAILURES:
        found = re.search(pattern, output, re.DOTALL)
        if found and (by_watch is None or by_watch["rank"] == found["rank"]):
            groups = found.groupdict()
            code = -int(groups["signal"]) if "signal" in groups else int(groups.get("code", 1))
            return int(groups["rank"]), code
    return (int(by_watch["rank"]), 1) if by_watch else None


def first_reason(output: str, rank: int) -> str:
    """Return the error that a rank failed with, in its own words; empty if the output does not have it.

    >>> first_reason("[rank1]: Traceback (most recent call last):\\n[rank1]: ValueError: no data", 1)
    'ValueError: no data'
    """
    error = r"([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)\b[^\r\n]*)"
    reported = re.findall(rf"grace: rank {rank} failed first: ([^\r\n]+)", output)
    reported += map(": ".join, re.findall(rf"grace: (\w+) on rank {rank} ends all ranks: ([^\r\n]+)", output))
    own = re.findall(rf"^(?:\[rank{rank}\]:|\[(?:1,)?{rank}\]<stderr>:) ?{error}", output, re.MULTILINE)
    return re.sub(r"\[[\d,]+\]<stderr>:", "", next(iter([*reported, *own[-1:]]), ""))


UNREACHABLE = (
    r"ssh: Could not resolve hostname (?P<node>\S+): (?P<why>[^\r\n]+)",
    r"ssh: connect to host (?P<node>\S+) port \d+: (?P<why>[^\r\n]+)",
    r"(?:\S+@)?(?P<node>[^\s@]+): (?P<why>Permission denied \([^\r\n]+)",
    r"Host key for (?P<node>\S+) has changed and you have requested (?P<why>strict checking)",
)
"""Messages of ssh about a machine that it does not reach."""


def unreachable(output: str) -> str:
    """Return the message about a node that ssh did not reach, and the reason; empty if there is none.

    >>> unreachable("ssh: connect to host b port 22: Connection refused")
    'node b cannot be reached by ssh: Connection refused'
    """
    found = next((match for pattern in UNREACHABLE if (match := re.search(pattern, output))), None)
    return f"node {found['node']} cannot be reached by ssh: {found['why']}" if found else ""


def node_failure(output: str, node: str) -> str:
    """Return the message about a node that lacks the working folder, or whose host key is unknown; empty if there is
    none.

    >>> node_failure("bash: line 1: cd: /work: No such file or directory", "b").partition(";")[0]
    'node b lacks the working folder or a part of it (cd: /work: No such file or directory)'
    """
    why = re.search(r"sh: (?:line )?\d*:? ?(cd: [^\r\n]+)", output)
    if why:
        lacks = f"node {node} lacks the working folder or a part of it ({why[1]})"
        return f"{lacks}; grace launch --copy puts files on the nodes"
    if "Host key verification failed" in output:
        return f"node {node} cannot be reached by ssh: its host key is not known here; log in to it once by ssh"
    return ""


def _exit_code(code: int) -> int:
    """Return a shell's exit code for an exit code or a signal's number below zero; never 0.

    >>> _exit_code(7), _exit_code(-9), _exit_code(256)
    (7, 137, 1)
    """
    return 128 - code if code < 0 else code & 255 or 1


def _describe_exit(code: int) -> str:
    """Describe an exit code in words; shells add 128 to a signal's number.

    >>> _describe_exit(7), _describe_exit(-9), _describe_exit(137)
    ('ended with exit code 7', 'was ended by SIGKILL (exit code 137)', 'was ended by SIGKILL (exit code 137)')
    """
    number = -code if code < 0 else code - 128
    if number in set(signal.Signals):
        return f"was ended by {signal.Signals(number).name} (exit code {number + 128})"
    return f"ended with exit code {code}"
