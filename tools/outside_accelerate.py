"""Accelerate's own test scripts, with Grace in every `prepare`; tools/outside.py runs them by torchrun."""

import importlib
import itertools
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator, DDPCommunicationHookType, __version__

from grace.integrations import accelerate as integration

METHODS = {
    DDPCommunicationHookType.NO: "none",
    DDPCommunicationHookType.FP16: "fp16",
    DDPCommunicationHookType.BF16: "bf16",
    DDPCommunicationHookType.POWER_SGD: "powersgd(rank=1)",
    DDPCommunicationHookType.BATCHED_POWER_SGD: "powersgd(rank=1)",
}
"""Grace's methods in place of torch's hooks that Accelerate registers."""


def put_in_integration() -> None:
    """Let Accelerate's ``prepare`` be Grace's, with the method in place of the hook that its arguments ask for."""
    plain = Accelerator.prepare

    def prepare(self: Accelerator, *objects: Any, **options: Any) -> Any:
        """Prepare objects, and register Grace's hook for a model among them."""
        if not any(isinstance(each, torch.nn.Module) for each in objects):
            return plain(self, *objects, **options)
        method = "none"
        if self.ddp_handler is not None:
            method = METHODS[self.ddp_handler.comm_hook]
            self.ddp_handler.comm_hook = DDPCommunicationHookType.NO
        with patch.object(Accelerator, "prepare", plain):
            return integration.prepare(self, *objects, compressor=method, **options)

    Accelerator.prepare = prepare


def stay_on_cpu() -> None:
    """Let DistributedDataParallel models that are made for a GPU stay on the CPU."""
    kind = torch.nn.parallel.DistributedDataParallel
    make = kind.__init__

    def make_on_cpu(self, module, device_ids=None, output_device=None, **options):
        """Make the model."""
        make(self, module, **options)

    kind.__init__ = make_on_cpu


def cases_for_gpus(script: ModuleType) -> dict[str, Callable[[], None]]:
    """Return the cases of ``test_sync`` that it runs on GPUs alone, by name. They do not need any."""
    found = {}
    for function in ("test_gradient_accumulation", "test_gradient_accumulation_with_opt_and_scheduler"):
        for given in itertools.product((False, True), repeat=3):
            found[f"{function}({', '.join(map(str, given))})"] = partial(getattr(script, function), *given)
    return found


def main() -> int:
    """Run a script, print how its parts ended and the count of those that passed, and return the exit code."""
    name = sys.argv[1]
    put_in_integration()
    stay_on_cpu()
    script = importlib.import_module(f"accelerate.test_utils.scripts.{name}")
    tests = cases_for_gpus(script) if name == "test_sync" else {}
    tests[name] = script.main  # last, as it ends the process group
    passed = 0
    first = os.environ["RANK"] == "0"
    try:
        for test, call in tests.items():
            call()
            passed += 1
            if first:
                print(f"{test}: passed", flush=True)
    except Exception:
        traceback.print_exc(file=sys.stdout)
        print(f"{test}: FAILED", flush=True)
    if first:
        print(f"{passed} of {len(tests)} passed (accelerate {__version__})", flush=True)
    return 0 if passed == len(tests) else 1


if __name__ == "__main__":
    sys.exit(main())
