"""Runs tests of torch and of Accelerate that lie in their wheels, with Grace in every model; see `make outside`.

The hook sends gradients uncompressed, so that what these tests expect of DDP must hold. torch's need the package
expecttest; its tests of fully_shard are in no wheel: tests/in_torch/test_fully_shard_training.py has their pattern.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
PARTS = {
    "torch": ("expecttest", ["tools.outside_torch"]),
    "test_ddp_comm_hook": ("accelerate", [*TORCHRUN, "tools.outside_accelerate", "test_ddp_comm_hook"]),
    "test_sync": ("accelerate", [*TORCHRUN, "tools.outside_accelerate", "test_sync"]),
    "test_script": ("accelerate", [*TORCHRUN, "tools.outside_accelerate", "test_script"]),
}
"""The package that a part needs, and the module that runs its tests, with arguments."""
COUNTS = re.compile(r"\d+ of \d+ passed")


def run(part: str, names: list[str]) -> str:
    """Run the tests of a part, or those of these names alone, and print what they print.

    Returns:
        How many tests passed, of how many; or why none did.
    """
    package, command = PARTS[part]
    if not find_spec(package):
        return f"FAILED: install {package} first"
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment["ACCELERATE_USE_CPU"] = "true"
    counts = "no count"
    line = [sys.executable, "-m", *command, *names]
    with subprocess.Popen(line, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for said in process.stdout:
            print(said, end="", flush=True)
            counts = said.strip() if COUNTS.match(said) else counts
    return counts if process.returncode == 0 else f"FAILED: {counts}"


def main() -> int:
    """Run all parts, or the one that is named first, print the counts, and return the exit code."""
    found = {part: run(part, sys.argv[2:]) for part in sys.argv[1:2] or PARTS}
    for part, counts in found.items():
        print(f"{part}: {counts}")
    return 1 if any(counts.startswith("FAILED") for counts in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
