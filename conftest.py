"""What pytest leaves out where optional packages are not installed: their modules, whose doctests cannot run."""

import contextlib
from importlib.util import find_spec

with contextlib.suppress(ImportError):
    import triton  # noqa: F401 - where TensorFlow was imported before, it ends the process: both bring an LLVM

MODULES = {
    "tensorflow": [
        "grace/tensorflow/*",
        "grace/kernels/tensorflow/*",
        "grace/backends/horovod_tensorflow.py",
        "grace/bench/*/*tensorflow*",
    ],
    "horovod": ["grace/backends/horovod_*.py", "grace/torch/horovod.py", "grace/torch/elastic.py"],
    "triton": ["grace/kernels/triton/*"],
    "mpi4py": ["grace/backends/mpi.py"],
    **{name: [f"grace/integrations/{name}.py"] for name in ("transformers", "lightning", "accelerate")},
    "pydantic": ["grace/strategy/*", "grace/launch/*"],
}

collect_ignore_glob = [path for package, paths in MODULES.items() if find_spec(package) is None for path in paths]
