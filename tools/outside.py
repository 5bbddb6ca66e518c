"""Runs tests of torch and of Accelerate with Grace's hook in every DistributedDataParallel model; see `make outside`.

The hook sends gradients uncompressed, so that what these tests expect of DDP must hold. They are in torch's and
Accelerate's wheels; torch's own need the package expecttest. Tests of fully_shard are in no wheel, and so not here.
"""

import os
import re
import runpy
import subprocess
import sys
import tempfile
import unittest
from importlib.util import find_spec

import torch
from torch.nn.parallel import DistributedDataParallel

import grace

DDP = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_ddp_create_graph",
)
"""Tests of ``DistributedTest`` that run on CPUs and make a DDP model. One more, of DDP's log, expects no hook."""
SCRIPTS = ("test_sync", "test_script")
"""Scripts of ``accelerate.test_utils``. One more, test_ddp_comm_hook, registers hooks of its own."""


def put_in_hook() -> None:
    """Let every DistributedDataParallel model have Grace's hook from its start."""
    make = DistributedDataParallel.__init__

    def make_with_hook(self, *args, **options):
        """Make the model, and register the hook."""
        make(self, *args, **options)
        grace.torch.register_ddp_hook(self, "none")

    DistributedDataParallel.__init__ = make_with_hook


def run_torchs_test(name: str) -> None:
    """Run one test of torch's in this process, which starts the ranks."""
    folder = tempfile.mkdtemp()
    os.environ.update(BACKEND="gloo", WORLD_SIZE="2", TEMP_DIR=folder)
    for part in ("barrier", "test_dir"):
        os.mkdir(os.path.join(folder, part))
    unittest.main(module="tools.outside_torch", argv=["outside", f"TestDDP.{name}"])


def passed(command: list[str], environment: dict[str, str]) -> bool:
    """Run a command; print the end of what it says if it fails; return True if it passed."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    said = done.stdout + done.stderr
    skipped = re.search(r"OK \(skipped=", said)
    if done.returncode or skipped:
        print(said[-3000:])
    return not (done.returncode or skipped)


def main() -> int:
    """Run all suites, print the count of those that passed, and return the exit code."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    commands = {
        **{f"torch: {name}": [sys.executable, "-m", "tools.outside", "torch", name] for name in DDP},
        **{f"accelerate: {name}": [*ranks, "-m", "tools.outside", "accelerate", name] for name in SCRIPTS},
    }
    found = {}
    for what, command in commands.items():
        found[what] = passed(command, environment)
        print(f"{what}: {'passed' if found[what] else 'FAILED'}", flush=True)
    print(f"{sum(found.values())} of {len(found)} passed (torch {torch.__version__})")
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    if len(sys.argv) == 1:
        missing = [package for package in ("expecttest", "accelerate") if find_spec(package) is None]
        sys.exit(f"install {' and '.join(missing)} first" if missing else main())
    suite, name = sys.argv[1:]
    if suite == "torch":
        run_torchs_test(name)
    else:
        put_in_hook()
        runpy.run_module(f"accelerate.test_utils.scripts.{name}", run_name="__main__")
