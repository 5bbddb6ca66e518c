"""What pytest leaves out where optional packages are not installed: their modules, whose doctests cannot run."""

from importlib.util import find_spec

MODULES = {
    "tensorflow": [
        "grace/tensorflow/*",
        "grace/kernels/tensorflow/*",
        "grace/backends/horovod_tensorflow.py",
        "grace/bench/*/*tensorflow*",
    ],
    "horovod": ["grace/backends/horovod_*.py", "grace/torch/horovod.py", "grace/torch/elastic.py"],
    "mpi4py": ["grace/backends/mpi.py"],
    "pydantic": ["grace/strategy/*", "grace/launch/*"],
}

collect_ignore_glob = [path for package, paths in MODULES.items() if find_spec(package) is None for path in paths]
