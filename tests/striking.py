"""Runs of tests/programs/trains.py under every launcher, and how they end; as a program, RELIABILITY.md's seconds."""

import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support.engine_pools import ENGINES, command, environment
from tests.support.limits import HANGS

PROGRAM = Path(__file__).parent / "programs" / "trains.py"
LAUNCHERS = ("torchrun", *ENGINES)
FAULTS = ("kill", "raise", "leave", "skip", "miss", "stop")
SIZE = 3


@dataclass
class Ended:
    """The end of a run.

    Attributes:
        code: the launcher's exit code.
        printed: what the launcher and the ranks said.
        seconds: from the fault to the launcher's end.
        left: processes of the run that are still there.
    """

    code: int
    printed: str
    seconds: float
    left: list[int]


def run(launcher: str, framework: str, method: str, fault: str, **variables: str) -> Ended:
    """Train on three ranks until ``fault`` strikes rank 1."""
    program = [str(PROGRAM), framework, method, fault]
    line = command(launcher, SIZE, *program)
    backend = "torch" if launcher == "torchrun" else ENGINES[launcher][1]
    env = {**environment(), "GRACE_BACKEND": backend, "PYTHONUNBUFFERED": "1", **variables}
    done = subprocess.run(
        line, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=HANGS, errors="replace"
    )
    ended = time.time()
    struck = re.search(r"struck at ([\d.]+)", done.stdout)
    assert struck, done.stdout
    left = subprocess.run(["pgrep", "-f", " ".join(program)], capture_output=True, text=True).stdout
    return Ended(done.returncode, done.stdout, ended - float(struck.group(1)), [int(pid) for pid in left.split()])


def main() -> None:
    """A line for each fault: seconds from the fault to the launcher's end, launcher by launcher."""
    print(f"| fault | {' | '.join(LAUNCHERS)} |\n|{' --- |' * (1 + len(LAUNCHERS))}")
    for framework, fault in [*(("torch", fault) for fault in FAULTS), *(("keras", fault) for fault in FAULTS[:3])]:
        runs = [run(launcher, framework, "topk(ratio=0.05)", fault, GRACE_TIMEOUT="15") for launcher in LAUNCHERS]
        cells = [f"{ended.seconds:.1f}{'' if ended.code and not ended.left else ' (not ended)'}" for ended in runs]
        print(f"| {framework}: {fault} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
