"""The examples run as their first lines say, alone and under every launcher."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.drawing import THOROUGH
from tests.support.engine_pools import ENGINES, available, command, environment
from tests.support.frameworks import OFFLINE
from tests.support.limits import HANGS

pytestmark = pytest.mark.ranks

EXAMPLES = Path(__file__).parent.parent / "examples"
EXAMPLE = EXAMPLES / "torch" / "digits.py"
TENSORFLOW = [EXAMPLES / "tensorflow" / f"digits_{way}.py" for way in ("keras", "tape")]
PLAIN = [sys.executable]
TORCHRUN = command("torchrun", 2)


def run(launcher, *args, example=EXAMPLE):
    env = {**os.environ, "OMP_NUM_THREADS": "1", **OFFLINE}
    return subprocess.run([*launcher, str(example), *args], capture_output=True, text=True, env=env, timeout=HANGS)


def run_under(name, example):
    """On two ranks of an engine; what both printed."""
    if not available(name):
        pytest.skip(f"{name}: its packages are not installed (make horovod)")
    env = environment()
    if name == "mpirun-mpi":  # where Horovod is installed, mpirun means Horovod
        env["GRACE_BACKEND"] = "mpi"
    program = command(name, 2, str(example), "--compressor", "topk(ratio=0.05)", "--epochs", "3")
    done = subprocess.run(program, capture_output=True, text=True, env=env, timeout=HANGS)
    assert done.returncode == 0, done.stdout + done.stderr
    engine = {"horovodrun-gloo": "Horovod (Gloo)", "mpirun-mpi": "MPI (Open MPI)"}.get(name, "Horovod (MPI)")
    assert done.stdout.count(f"topk(ratio=0.05) on {engine}, rank 0 of 2") == 1, done.stdout
    assert float(re.search(r"test accuracy ([\d.]+)%", done.stdout).group(1)) > 60
    return done


BLOCK, ALONE = "block(bits=4)", "local, rank 0 of 1"
RUNS = [
    (TORCHRUN, EXAMPLE.with_name("outer.py"), "block(bits=4)", "torch.distributed (gloo), rank 0 of 2"),
    (PLAIN, TENSORFLOW[1], BLOCK, ALONE),
]
IDS = ["outer", "tape"]
if THOROUGH:  # these two run under other launchers, too
    RUNS += [(TORCHRUN, EXAMPLE, "powersgd(rank=2)", "torch.distributed (gloo), rank 0 of 2")]
    RUNS += [(PLAIN, example, BLOCK, ALONE) for example in (EXAMPLE, TENSORFLOW[0])]
    IDS += ["torchrun", "python", "keras"]


def need(example):
    if example in TENSORFLOW:
        pytest.importorskip("tensorflow", exc_type=ImportError)


@pytest.mark.every
@pytest.mark.parametrize(("launcher", "example", "method", "engine"), RUNS, ids=IDS)
def test_an_example_trains_and_prints_once_which_engine_it_is_on(launcher, example, method, engine):
    need(example)
    done = run(launcher, "--compressor", method, "--epochs", "4", example=example)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == f"{method} on {engine}"
    accuracy, sent = re.fullmatch(r"test accuracy ([\d.]+)%, ([\d,]+) bytes sent by this rank", second).groups()
    assert float(accuracy) > 85
    assert (sent == "0") == (engine == ALONE)


LAUNCHED = [("mpirun-mpi", EXAMPLE), ("horovodrun-gloo", TENSORFLOW[0])]
if THOROUGH:
    LAUNCHED = [(name, example) for name in ENGINES for example in (EXAMPLE, *TENSORFLOW)]


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize(("name", "example"), LAUNCHED, ids=lambda value: getattr(value, "stem", value))
def test_an_example_runs_unchanged_under_every_launcher(name, example):
    need(example)
    assert "AutoGraph" not in run_under(name, example).stderr  # which is not to translate Grace


@pytest.mark.parametrize("example", [EXAMPLE, *TENSORFLOW], ids=lambda path: path.stem)
def test_the_difference_to_an_ordinary_script_is_six_lines(example):
    marked = [line for line in example.read_text().splitlines() if line.endswith("# +")]
    assert len(marked) == 6
    rest = [line for line in example.read_text().split('"""', 2)[2].splitlines() if line not in marked]
    uses = [line for line in rest if re.search(r"\bgrace\b", line)]
    assert uses == [line for line in uses if "help=" in line or "print(" in line]


UNDER = {
    "trainer": ("transformers", TORCHRUN),
    "lightning_digits": ("lightning", PLAIN, "--devices", "2"),  # it starts the other rank; where MPI is, it asks MPI
    "accelerate_digits": ("accelerate", TORCHRUN),
}


@pytest.mark.parametrize("name", UNDER)
def test_a_frameworks_example_trains_on_two_ranks(name, tmp_path):
    package, launcher, *options = UNDER[name]
    pytest.importorskip(package)
    example = EXAMPLES / "torch" / f"{name}.py"
    done = run(launcher, "--steps", "20", "--output", str(tmp_path), *options, example=example)
    assert done.returncode == 0, done.stderr
    loss, ratio = re.search(r"loss ([\d.]+) after 20 steps, (\d+) times fewer bytes", done.stdout).groups()
    assert float(loss) < 5
    assert int(ratio) >= 7  # 32 bits by 4.06, where the method takes all variables
    marked = [line for line in example.read_text().splitlines() if line.endswith("# +")]
    assert len(marked) == 2


PIPELINE = EXAMPLES / "torch" / "pipeline.py"


@pytest.mark.skipif(not THOROUGH, reason="left to `make thorough`: tests/in_torch/pipeline has it in stages")
@pytest.mark.parametrize(
    ("launcher", "ranks", "asked"),
    [("torchrun", 4, ("--stages", "2")), ("mpirun-mpi", 3, ("--replicas", "1", "2"))],
    ids=["2 x 2", "1 and 2"],
)
def test_the_pipelines_example_trains_in_stages_with_replicas(launcher, ranks, asked):
    if launcher != "torchrun" and not available(launcher):
        pytest.skip("mpi4py is not installed (make horovod)")
    program = command(launcher, ranks, str(PIPELINE), *asked, "--steps", "20", "--vocabulary", "512")
    env = {**environment(), "GRACE_BACKEND": "torch"}
    done = subprocess.run(program, capture_output=True, text=True, env=env, timeout=HANGS)
    assert done.returncode == 0, done.stdout + done.stderr
    (loss,) = re.findall(r"loss ([\d.]+) nats after 20 steps", done.stdout)
    assert float(loss) < 4.0  # ln 512 is 6.2
