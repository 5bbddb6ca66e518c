"""Runs torch's own tests of DistributedDataParallel with Grace's hook in every model; see `make outside`.

The hook sends gradients uncompressed, so that what these tests expect of DDP must hold. They are in torch's wheel, and
need the package expecttest. Tests of fully_shard are in no wheel, and so not here.
"""

import os
import re
import subprocess
import sys
import tempfile
import unittest
from importlib.util import find_spec

import torch
from torch.nn.parallel import DistributedDataParallel

import grace

TESTS = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
)
"""Tests of ``DistributedTest`` that run on CPUs and make a DDP model."""


def put_in_hook() -> None:
    """Let every DistributedDataParallel model have Grace's hook from its start."""
    make = DistributedDataParallel.__init__

    def make_with_hook(self, *args, **options):
        """Make the model, and register the hook."""
        make(self, *args, **options)
        grace.torch.register_ddp_hook(self, "none")

    DistributedDataParallel.__init__ = make_with_hook


def run_test(name: str) -> None:
    """Run one test in this process, which starts the ranks."""
    folder = tempfile.mkdtemp()
    os.environ.update(BACKEND="gloo", WORLD_SIZE="2", TEMP_DIR=folder)
    for part in ("barrier", "test_dir"):
        os.mkdir(os.path.join(folder, part))
    unittest.main(module="tools.outside_torch", argv=["outside", f"TestDDP.{name}"])


def passed(name: str) -> bool:
    """Run one test in a process of its own; print the end of what it says if it fails; return True if it passed."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tools.outside", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    said = done.stdout + done.stderr
    good = done.returncode == 0 and not re.search(r"OK \(skipped=", said)
    if not good:
        print(said[-3000:])
    return good


def main() -> int:
    """Run all tests, print the count of those that passed, and return the exit code."""
    found = []
    for name in TESTS:
        found.append(passed(name))
        print(f"{name}: {'passed' if found[-1] else 'FAILED'}", flush=True)
    print(f"{sum(found)} of {len(found)} passed (torch {torch.__version__})")
    return 0 if all(found) else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_test(sys.argv[1])
    else:
        sys.exit(main() if find_spec("expecttest") else "install expecttest first")
