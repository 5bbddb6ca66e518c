"""Pipelines in ``grace trace``."""

import json
import re
import subprocess
import sys
from collections import Counter

import pytest

from tests.support import TESTS
from tests.support.limits import HANGS

pytestmark = pytest.mark.ranks
GRACE = [sys.executable, "-m", "grace.cli.main"]


def test_stages_micro_batches_and_waiting_of_an_example_that_learns_are_shown(tmp_path):
    """The example is run here, and not with the others, which are in tests/test_examples.py."""
    program = [sys.executable, str(TESTS.parent / "examples/torch/pipeline.py"), "--stages", "2", "--steps", "20"]
    program += ["--vocabulary", "512"]
    traced = [*GRACE, "trace", "-n", "2", "--engine", "torch", "--steps", "3", "--skip", "1"]
    traced += ["--out", "trace.json", "--"]
    done = subprocess.run([*traced, *program], cwd=tmp_path, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    (loss,) = re.findall(r"loss ([\d.]+) nats after 20 steps", done.stdout)
    assert float(loss) < 4.0  # ln 512 is 6.2
    assert "forward and backward of the rank's stages" in " ".join(done.stdout.split())
    assert "waiting for other stages" in " ".join(done.stdout.split())
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    seen = Counter((one["pid"], one["name"], one["args"]["microbatch"]) for one in events if one.get("cat") == "stage")
    ranks = {rank for rank, _, _ in seen}
    assert len(ranks) == 2
    for rank in ranks:
        stages = {name for owner, name, _ in seen if owner == rank}
        assert stages in [{f"forward of stage {n}", f"backward of stage {n}"} for n in (0, 1)]
        for name in stages:
            assert [seen[rank, name, chunk] for chunk in range(4)] == [3] * 4
    assert sum("forward of stage 0" in {name for owner, name, _ in seen if owner == rank} for rank in ranks) == 1
