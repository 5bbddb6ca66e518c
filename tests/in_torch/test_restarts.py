"""torchrun --max-restarts: a group whose rank has died goes on from the last checkpoint as if nothing had been."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from grace.torch.state_dict import unpack_state
from tests.support.drawing import THOROUGH
from tests.support.engine_pools import command, environment
from tests.support.limits import HANGS
from tests.support.training import same

pytestmark = pytest.mark.ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch" / "elastic.py"
DYING = """
import os, runpy, signal, sys
from torch.optim.optimizer import register_optimizer_step_post_hook

steps = 0

def die(*ignored):
    global steps
    steps += 1
    if steps == 50:  # in the middle of an epoch
        os.kill(os.getpid(), signal.SIGKILL)

if (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]) == ("0", "1"):
    register_optimizer_step_post_hook(die)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*program, checkpoint, period):
    """Run a program, and return what it printed, and its last checkpoint."""
    line = command("torchrun", 2, "--max-restarts", "1", *map(str, program), "--epochs", "2")
    line += ["--checkpoint", str(checkpoint), "--period", str(period)]
    done = subprocess.run(line, capture_output=True, text=True, env=environment(), timeout=HANGS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, torch.load(checkpoint, weights_only=True)


@pytest.mark.parametrize("period", [20, *([0] if THOROUGH else [])])
def test_a_run_whose_rank_died_ends_as_one_that_was_not_interrupted(period, tmp_path):
    """With outer rounds it dies, and goes on, within a period: an epoch has 29 steps. What an optimizer resumes without
    them is tests/session's."""
    dying = tmp_path / "dying.py"
    dying.write_text(DYING)
    said, wanted = run(EXAMPLE, checkpoint=tmp_path / "whole.pt", period=period)
    assert re.findall("begin with epoch .*", said) == ["begin with epoch 0, after 0 restarts"]
    said, found = run(dying, EXAMPLE, checkpoint=tmp_path / "restarted.pt", period=period)
    assert re.findall("begin with epoch .*", said) == [
        "begin with epoch 0, after 0 restarts",
        "begin with epoch 1, after 1 restarts",
    ]
    assert found["epochs"] == wanted["epochs"] == 2
    assert same(found["model"], wanted["model"])
    states, kept = (state["optimizer"]["grace"] for state in (found, wanted))
    assert same(states["state"], kept["state"])  # with what the ranks share
    assert len(states["ranks"]) == 2
    for mine, theirs in zip(states["ranks"], kept["ranks"], strict=True):
        assert same(mine, theirs)
        for kind in ("memory", "local")[: 1 + (period > 0)]:
            assert all(bool(value.any()) for value in mine[kind].values())
    inner = [list(map(unpack_state, state["optimizer"].get("grace.inner", []))) for state in (found, wanted)]
    assert len(inner[0]) == len(inner[1]) == (2 if period else 0)
    assert all(same(mine["state"], theirs["state"]) for mine, theirs in zip(*inner, strict=True))
