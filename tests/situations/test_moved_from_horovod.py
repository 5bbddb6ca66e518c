"""A script for Horovod that moves by one search and replace; and one whose ranks do not see each other."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engine_pools import available, environment
from tests.support.limits import HANGS
from tests.support.pools import launched
from tests.support.training import digest, weights

pytestmark = pytest.mark.ranks

PAGE = Path(__file__).parents[2] / "docs" / "from-horovod.md"


def moved():
    """The page's script, as it runs on every engine."""
    (program,) = (
        text for text in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.S | re.M) if "digits" in text
    )
    return program


def horovods():
    """The script that it was before: Horovod's."""
    return moved().replace("import grace\n", "import horovod.torch as hvd\n").replace("grace.", "hvd.")


def trained(program):
    """Return a hash of the weights that a rank has trained, and the accuracy that all ranks averaged."""
    names = {}
    exec(compile(program, str(PAGE), "exec"), names)
    return digest(weights(names["model"])), names["accuracy"]


def test_the_pages_search_and_replace_makes_this_script_of_horovods():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("sed ")]
    replaced = horovods()
    for old, new in re.findall(r"-e 's/(.*?)/(.*?)/g?'", lines[0]):
        replaced = re.sub(old, new, replaced)
    assert replaced == moved()
    assert "hvd" not in replaced


@functools.cache
def trained_by_horovod():
    return launched("horovodrun-gloo", 2).run(trained, horovods())


@pytest.mark.parametrize("engine", ["gloo", "mpirun-mpi", "horovodrun-gloo"])
def test_it_trains_on_every_engine_what_horovods_trains(engine):
    wanted, got = trained_by_horovod(), launched(engine, 2).run(trained, moved())
    assert got == wanted
    assert wanted[0] == wanted[1]
    assert wanted[0][1] > 0.8


SEES_ONE = """
import horovod.torch as hvd, torch, grace
hvd.init()
model = torch.nn.Linear(3, 2)
try:
    grace.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compressor="fp16")
except grace.ConfigError as error:
    print(error)
"""


@pytest.mark.skipif(not available("mpirun-horovod"), reason="Horovod is not installed (make horovod)")
def test_ranks_of_an_mpi_that_horovod_was_not_built_for_are_refused():
    # https://github.com/horovod/horovod/issues/1756, 2588: hvd.size() is 1 under another MPI's mpirun, and under srun
    done = subprocess.run(
        [sys.executable, "-c", SEES_ONE],
        env={**environment(), "PMI_SIZE": "4", "PMI_RANK": "3"},
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert done.stdout.startswith("mpiexec or srun (PMI) has started 4 ranks (PMI_SIZE=4), and Horovod sees 1 ("), done
    assert "start the program by horovodrun or mpirun" in done.stdout
