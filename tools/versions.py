"""Tries Grace with other releases of torch and of Python: each in an environment of its own, below out/versions.

    python tools/versions.py --torch 2.6.0 2.14.1 --python python3.10 python3.13

With a torch all fast tests run, and torch's tests over ranks; before 2.13 those of pipelines and FSDP2 do not, which
refuse it, nor what its Triton and compiler cannot pass. With a Python all fast tests run that need no framework.
A table at the end says what passed, and the exit code is 1 if anything failed. Releases are those of constraints.txt,
except for torch and what torch itself pins.
"""

import argparse
import dataclasses
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "out" / "versions"
OF_TORCH = re.compile(r"(torch|triton|sympy|setuptools|nvidia-[\w-]+|cuda-[\w-]+)==")
"""Pins in constraints.txt that another torch may contradict."""
TESTING = ["pytest", "pytest-timeout", "pytest-xdist", "coverage", "hypothesis", "scipy"]
"""Packages of the extra ``dev`` that tests need; its Triton is one that an older torch does not take."""
FAST = ["-m", "not slow and not ranks"]
RANKS = ["-m", "ranks and not alone", "tests/in_torch", "tests/session", "tests/exchange"]
NEEDS_213 = ["all_gather", "fsdp", "fsdp_outer", "fully_shard_training", "reduce_scatter", "torchs_checkpoints"]
"""Files of tests/in_torch about FSDP2, which needs torch 2.13, as pipelines do: older ones are tried without them."""
WITHOUT_213 = [f"--ignore=tests/in_torch/test_{name}.py" for name in NEEDS_213]
WITHOUT_213 += [f"--ignore={path}/pipeline" for path in ("grace", "tests", "tests/in_torch")]
WITHOUT_213 += ["--ignore=tests/cli/test_pipeline.py", "--ignore=tests/bench/test_pipeline_cuts.py"]
WITHOUT_213 += ["--ignore=tests/bench/test_scenarios.py", "--ignore=benchmarks/pipeline_cuts.py"]
WITHOUT_213 += ["-k", "not sharded_models and not hooks_tell_as_optimizers_do"]
WITHOUT_213 += ["--ignore=tests/kernels/test_triton_compiled.py"]  # it asks Triton what the assembler says
COMPILED = "tests/in_torch/test_compiled.py::test_"
# the last bit may differ if torch 2.6 compiles an optimizer's step
WITHOUT_213 += [f"--deselect={COMPILED}compiled_is_uncompiled_bit_for_bit[optimizer, model and step-powersgd(rank=2)]"]
WITHOUT_213 += [f"--deselect={COMPILED}a_whole_step_may_be_compiled_with_clipping_and_an_exchange_that_is_dropped"]
# there DDP's C++ reducer serves a backward that is not compiled, and waits for the gradients of all parameters
WITHOUT_213 += [f"--deselect={COMPILED}a_step_of_the_python_reducer_ends_where_the_optimizer_makes_one"]
NO_FRAMEWORK = ["-p", "tests.support.no_framework", "--doctest-ignore-import-errors"]
NO_FRAMEWORK += [f"--ignore={path}" for path in ("tests/cli", "tests/bench/test_one_command.py", "grace/__init__.py")]
# these start programs that import torch, or import it inside a test
NO_FRAMEWORK += ["--ignore=tests/backends/test_runtime.py", "--ignore=tests/bench/test_readme_figures.py"]
NO_FRAMEWORK += ["--ignore=grace/bench/workloads/tasks.py"]


@dataclasses.dataclass(frozen=True)
class Trial:
    """Environment, and the runs of pytest in it.

    Attributes:
        name: the name of its folder.
        python: the interpreter that makes it.
        packages: what pip installs.
        runs: arguments of pytest, by what they try.
    """

    name: str
    python: str
    packages: list[str]
    runs: dict[str, list[str]]

    def install(self) -> Path:
        """Make the environment, if it is not there; return its interpreter.

        Raises:
            subprocess.CalledProcessError: the interpreter is missing, or pip failed.
        """
        folder = OUT / self.name
        inside = folder / "bin" / "python"
        done = folder / "installed"
        if not done.exists():
            print(f"{self.name}: installing, which takes minutes", flush=True)
            subprocess.run([self.python, "-m", "venv", "--clear", folder], check=True)
            pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not OF_TORCH.match(line)]
            constraints = folder / "constraints.txt"
            constraints.write_text("\n".join(pins))
            pip = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints]
            subprocess.run([*pip, *self.packages], check=True, cwd=ROOT)
            done.touch()
        return inside

    def run(self, inside: Path) -> list[tuple[str, str, bool]]:
        """Return of each run its name, pytest's last line and whether it passed."""
        found = []
        for kind, arguments in self.runs.items():
            log = OUT / f"{self.name}-{kind}.log"
            print(f"{self.name}: {kind} tests, log in {log}", flush=True)
            begin = time.monotonic()
            with log.open("w") as file:
                command = [inside, "-m", "pytest", "-n", "2", "-rf", *arguments]
                code = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT).returncode
            last = log.read_text().strip().splitlines()[-1].strip("= ")
            found.append((kind, f"{last} ({time.monotonic() - begin:.0f} s)", code == 0))
        return found


def version_of(python: str) -> str:
    """Return an interpreter's version; its program may be called python like all others.

    Raises:
        OSError: there is no such program.
        subprocess.CalledProcessError: it is no Python.
    """
    said = [python, "-c", "import platform; print(platform.python_version())"]
    return subprocess.run(said, check=True, capture_output=True, text=True).stdout.strip()


def trials(torches: list[str], pythons: list[str]) -> list[Trial]:
    """Return the trials of some releases of torch, and of some interpreters.

    Raises:
        OSError, subprocess.CalledProcessError: an interpreter cannot be run.
    """
    extras = "strategy,bench"
    found = []
    for release in torches:
        packages = ["-e", f".[torch,{extras}]", f"torch=={release}", *TESTING]
        older = tuple(map(int, release.split(".")[:2])) < (2, 13)
        left_out = WITHOUT_213 if older else []
        runs = {"fast": [*FAST, *left_out], "ranks": [*RANKS, *left_out]}
        found.append(Trial(f"torch-{release}", sys.executable, packages, runs))
    for python in pythons:
        packages = ["-e", f".[{extras}]", "numba", *TESTING]
        found.append(Trial(f"python-{version_of(python)}", python, packages, {"fast": [*FAST, *NO_FRAMEWORK]}))
    return found


def main() -> None:
    """Run the trials that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="*", default=[], metavar="RELEASE", help="releases of torch, such as 2.14.1")
    parser.add_argument("--python", nargs="*", default=[], metavar="PROGRAM", help="interpreters, such as python3.13")
    given = parser.parse_args()
    try:
        found = trials(given.torch, given.python)
    except (OSError, subprocess.CalledProcessError) as error:
        parser.error(str(error))  # before hours of trials
    OUT.mkdir(parents=True, exist_ok=True)
    failed = False
    table = []
    for trial in found:
        try:
            rows = trial.run(trial.install())
        except (OSError, subprocess.CalledProcessError) as error:
            rows = [("install", str(error), False)]
        table += [(trial.name, *row) for row in rows]
        failed |= not all(passed for *_, passed in rows)
    for name, kind, text, passed in table:
        print(f"{name:<16} {kind:<8} {'ok' if passed else 'FAILED':<7} {text}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
