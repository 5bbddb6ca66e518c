"""The files of examples/clusters: what can be known of them where there is no Slurm and no Kubernetes."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from tests.support import ROOT
from tests.support.limits import HANGS

yaml = pytest.importorskip("yaml")
CLUSTERS = ROOT / "examples" / "clusters"
JOBS = sorted(CLUSTERS.glob("*.sbatch"))
TORCHRUN, MPI = CLUSTERS / "torchrun.sbatch", CLUSTERS / "mpi.sbatch"
IMAGE = "registry.example.com/grace:latest"


@pytest.fixture(scope="module")
def options() -> set[str]:
    """Return the options of the program that all files start."""
    program = (ROOT / "examples" / "torch" / "digits.py").read_text()
    return set(re.findall(r'add_argument\("(--[a-z-]+)"', program))


def check_program(words: list[str], options: set[str]) -> None:
    """The script is there, and has the options that it gets."""
    assert (ROOT / words[0]).is_file(), words
    given = [word for word in words[1:] if word.startswith("--")]
    assert given == ["--compressor", "--epochs"]
    assert set(given) <= options


# -- Slurm --------------------------------------------------------------------------------------------------------


def run(job: Path, folder: Path, **variables: str) -> list[str]:
    """Run a job's script by bash; what it gives to the launcher, for which a program stands in that prints it."""
    for name in ("srun", "mpirun"):
        (folder / name).write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@"\n')
    (folder / "scontrol").write_text('#!/bin/sh\n[ "$*" = "show hostnames node[1-2]" ] && printf "node1\\nnode2\\n"\n')
    for program in folder.iterdir():
        program.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "4812345", "SLURM_NNODES": "2", "SLURM_CPUS_PER_TASK": "2"}
    env = {"PATH": f"{folder}:{os.defpath}", "SLURM_JOB_NODELIST": "node[1-2]", **slurm, **variables}
    done = subprocess.run(["bash", str(job)], env=env, capture_output=True, text=True, timeout=HANGS)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_a_jobs_directives_are_slurms_and_stand_before_its_commands(job):
    lines = job.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert all(line.startswith("#SBATCH") is False for line in lines[first:])
    known = {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time", "output"}
    assert {re.fullmatch(r"--([a-z-]+)=\S+", text)[1] for text in directives} == known


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_shellcheck_finds_nothing(job):
    done = subprocess.run(["shellcheck", str(job)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("variables", "ranks", "head"),
    [({}, "2", "node1"), ({"SLURM_GPUS_ON_NODE": "4", "HEAD": "10.0.0.7"}, "4", "10.0.0.7")],
    ids=["cpus", "gpus"],
)
def test_srun_starts_a_torchrun_that_takes_its_options(tmp_path, options, variables, ranks, head):
    srun, kill, torchrun, *words = run(TORCHRUN, tmp_path, **variables)
    assert (srun, kill, torchrun) == ("srun", "--kill-on-bad-exit=1", "torchrun")
    args = get_args_parser().parse_args(words)
    assert (args.nnodes, args.nproc_per_node, args.rdzv_backend) == ("2", ranks, "c10d")
    assert (args.rdzv_id, args.rdzv_endpoint) == ("4812345", f"{head}:22345")
    check_program([args.training_script, *args.training_script_args], options)


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [({}, ["srun", "--mpi=pmix", "--kill-on-bad-exit=1"]), ({"LAUNCH": "mpirun"}, ["mpirun"])],
    ids=["srun", "mpirun"],
)
def test_the_ranks_of_mpi_are_started_by_either_launcher(tmp_path, options, variables, launcher):
    words = run(MPI, tmp_path, **variables)
    place = words.index("python")
    assert words[:place] == launcher
    check_program(words[place + 1 :], options)


# -- Kubernetes ---------------------------------------------------------------------------------------------------

REPLICA = {"replicas", "restartPolicy", "template"}
CONTAINER = {"name", "image", "command", "env", "resources"}
KINDS = {
    "trainjob": ("trainer.kubeflow.org/v1alpha1", "TrainJob", {"runtimeRef", "trainer"}),
    "pytorchjob": ("kubeflow.org/v1", "PyTorchJob", {"pytorchReplicaSpecs"}),
    "mpijob": (
        "kubeflow.org/v2beta1",
        "MPIJob",
        {"slotsPerWorker", "mpiImplementation", "runPolicy", "mpiReplicaSpecs"},
    ),
}


def read(name: str) -> dict:
    """A job's specification."""
    document = yaml.safe_load((CLUSTERS / f"{name}.yaml").read_text())
    version, kind, fields = KINDS[name]
    assert document.keys() == {"apiVersion", "kind", "metadata", "spec"}
    assert (document["apiVersion"], document["kind"]) == (version, kind)
    assert re.fullmatch(r"[a-z][a-z0-9-]{0,62}", document["metadata"]["name"])
    assert document["spec"].keys() == fields
    return document["spec"]


def check_pod(resources: dict, image: str, env: list[dict]) -> None:
    """Check the fields that every container has."""
    assert image == IMAGE
    assert resources.keys() == {"requests", "limits"}
    for amounts in resources.values():
        assert amounts.keys() == {"cpu", "memory"}
        assert re.fullmatch(r"\d+m?", amounts["cpu"])
        assert re.fullmatch(r"\d+[MG]i", amounts["memory"])
    assert all(one.keys() == {"name", "value"} and isinstance(one["value"], str) for one in env)


def containers(replicas: dict, kinds: set[str]) -> dict[str, dict]:
    """The only container of each kind of replica."""
    assert replicas.keys() == kinds
    found = {}
    for kind, replica in replicas.items():
        assert replica.keys() <= REPLICA
        assert replica["replicas"] >= 1
        (found[kind],) = replica["template"]["spec"]["containers"]
        assert found[kind].keys() <= CONTAINER
        check_pod(found[kind]["resources"], found[kind]["image"], found[kind].get("env", []))
        assert all(isinstance(word, str) for word in found[kind]["command"])  # Kubernetes takes no numbers there
    return found


def test_the_trainjob_starts_a_torchrun_that_takes_its_options(options):
    spec = read("trainjob")
    trainer = spec["trainer"]
    assert spec["runtimeRef"] == {"name": "torch-distributed"}
    assert trainer.keys() == {"image", "numNodes", "numProcPerNode", "command", "env", "resourcesPerNode"}
    check_pod(trainer["resourcesPerNode"], trainer["image"], trainer["env"])
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["command"][0]) == (2, 1, "torchrun")
    args = get_args_parser().parse_args(trainer["command"][1:])  # nodes, ranks and the rest come in the environment
    check_program([args.training_script, *args.training_script_args], options)


def test_the_pytorchjob_starts_the_program_in_each_pod(options):
    replicas = read("pytorchjob")["pytorchReplicaSpecs"]
    for container in containers(replicas, {"Master", "Worker"}).values():
        assert (container["name"], container["command"][0]) == ("pytorch", "python")
        check_program(container["command"][1:], options)
    assert replicas["Master"]["replicas"] == 1
    assert {replica["restartPolicy"] for replica in replicas.values()} == {"Never"}


def test_the_mpijob_starts_as_many_ranks_as_there_are_slots(options):
    spec = read("mpijob")
    assert spec["runPolicy"] == {"cleanPodPolicy": "Running", "backoffLimit": 0}
    found = containers(spec["mpiReplicaSpecs"], {"Launcher", "Worker"})
    command = found["Launcher"]["command"]
    assert command[:2] == ["mpirun", "--allow-run-as-root"]
    ranks = spec["mpiReplicaSpecs"]["Worker"]["replicas"] * spec["slotsPerWorker"]
    assert command[command.index("-np") + 1] == str(ranks)
    assert "GRACE_BACKEND=mpi" in command
    assert found["Worker"]["command"][0] == "/usr/sbin/sshd"
    check_program(command[command.index("python") + 1 :], options)


def test_the_image_is_built_of_what_is_there():
    text = (CLUSTERS / "Dockerfile").read_text()
    assert f"-t {IMAGE}" in text
    extras = re.search(r'"\.\[([a-z,]+)\]"', text)[1].split(",")
    assert all(f"\n{extra} =\n" in (ROOT / "setup.cfg").read_text() for extra in extras)


PAGES = [ROOT / "docs" / "clusters.md", CLUSTERS / "README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_a_page_names_are_there(page):
    text = page.read_text()
    assert all((ROOT / name).is_file() for name in re.findall(r"examples/[\w/]+\.\w+", text))
    assert all((CLUSTERS / name).is_file() for name in re.findall(r"^\| `([\w.]+)`", text, re.M))


def test_the_readme_names_every_file():
    text = (CLUSTERS / "README.md").read_text()
    assert [file.name for file in CLUSTERS.iterdir() if file.is_file() and f"`{file.name}`" not in text] == [
        "README.md"
    ]
