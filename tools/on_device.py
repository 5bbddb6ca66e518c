"""Try and measure Grace on one GPU, in less than nine minutes, with the Python that is there: `make device`.

Needs torch, Triton, NumPy, Numba, pytest and rich; nothing is installed, and nothing outside of --out is written, but
for what Triton compiles. Each part runs in processes of its own, with a time limit: what fails, crashes or hangs is
written down, and the rest goes on. DIR/on_device.md (tables for BENCHMARKS.md, goals marked as met or missed) and
DIR/on_device.json are written anew every few seconds, so that a run that is cut off tells what it has.
"""

import argparse
import importlib.util
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.device.parts import PARTS, Part

SIZES, TINY = "25M,1048576,268435456", "4096,1024"
TRAINED = "none,block(bits=4),qsgd,efsignsgd,topk(ratio=0.01),powersgd(rank=4)"
FEW_BITS = ["block(bits=4)", "block(bits=2)"]
"""Measured beside every method's default."""
PATIENCE = 20.0
"""Times as long as on a GPU the parts may take in the interpreter."""
EVERY = 60
"""Number of tests of which the interpreter runs one."""
NEEDED = ("torch", "triton", "numpy", "numba", "pytest", "rich")


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    looks = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="on_device.py", description=__doc__, formatter_class=looks)
    parts = "\n".join(f"  {part.name:<10} {part.about}; {part.seconds:.0f} s" for part in PARTS)
    given = {
        "--out": ("DIR", "folder for results; default out/device"),
        "--only": ("PARTS", f"parts to run, separated by commas; default all, in this order:\n{parts}"),
        "--methods": ("SPECS", f"compressors, separated by commas; default all, and in steps {TRAINED}"),
        "--sizes": ("N", f"elements to measure at, that of the goal first; default {SIZES}"),
        "--patience": ("F", "times as long as usual each part may take; default 1"),
    }
    for name, (value, about) in given.items():
        parser.add_argument(name, metavar=value, help=about)
    interpret = f"no GPU: Triton's interpreter on the CPU, {TINY} elements, every {EVERY}th test;\n"
    interpret += "it tries this program, and times mean nothing"
    parser.add_argument("--interpret", action="store_true", help=interpret)
    return parser


def absent() -> list[str]:
    """The packages that are needed and not there."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def main() -> int:
    """Run what is asked for; 0 if nothing failed, 1 if something did, 2 if it cannot be run, 130 if interrupted."""
    parser = options()
    given = parser.parse_args()
    if missing := absent():
        parser.error(f"it needs {', '.join(missing)}, and this Python ({sys.executable}) has none")
    if given.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

    from rich.console import Console

    from grace.bench.common import options as read
    from grace.bench.common.clocks import missing as no_gpu
    from grace.core.registry import make
    from grace.errors import ConfigError
    from tools.device.driver import Run

    if os.environ.get("TRITON_INTERPRET") == "1" and not given.interpret:
        parser.error("TRITON_INTERPRET=1 is set, and nothing would run on the GPU: unset it, or say --interpret")
    if not given.interpret and (why := no_gpu()):
        parser.error(f"{why}. To try the program itself on the CPU: --interpret")
    names = [part.name for part in PARTS]
    only = read.split(given.only) if given.only is not None else names
    if unknown := [name for name in only if name not in names]:
        parser.error(f"--only {unknown[0]}: there is no such part; parts are {', '.join(names)}")
    try:
        methods, trained = (read.methods(given.methods or default) for default in ("all", TRAINED))
        methods += [method for method in FEW_BITS if given.methods is None]
        if given.interpret and given.methods is None:
            methods.remove("threshold")  # whose payloads have their room on devices only
        sizes = [read.size(part) for part in read.split(given.sizes or (TINY if given.interpret else SIZES))]
        for method in methods:
            make("compressor", method)
        patience = float(given.patience or (PATIENCE if given.interpret else 1))
    except (ConfigError, ValueError) as error:
        parser.error(str(error))
    chosen = [adapted(part, patience, given.interpret) for part in PARTS if part.name in only]
    settings = {"methods": methods, "trained": trained, "sizes": sizes, "every": EVERY if given.interpret else 1}
    console, out = Console(highlight=False, soft_wrap=True), Path(given.out or "out/device")
    try:
        run = Run(chosen, settings, out, console)
    except OSError as error:
        parser.error(f"--out {out}: {error}")
    code = run()
    for goal, (state, by) in run.report["goals"].items():
        console.print(f"{goal}: {state} ({by})", markup=False)
    console.print(f"Wrote on_device.md and on_device.json to {out} after {run.report['seconds']:.0f} s.", markup=False)
    return code


def adapted(part: Part, patience: float, interpreted: bool) -> Part:
    """A part that may take so many times as long, by one process where kernels are interpreted."""
    workers = 1 if interpreted else part.workers
    return part._replace(seconds=patience * part.seconds, limit=patience * part.limit, workers=workers)


if __name__ == "__main__":
    sys.exit(main())
