"""``grace bench step --sharded``, run as a user does: 2 shard groups of 2 ranks, with a link between the groups."""

import pytest

from grace.bench.step.step_settings import SHARDS_ALONE
from tests.bench.test_step import REASON, run
from tests.support.engine_pools import command

pytestmark = pytest.mark.ranks

LAYERS = """
import torch

def layers():  # 180,600 parameters, in two modules of FSDP2's
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.ReLU(), torch.nn.Linear(300, 300))
    return model, lambda model: model(torch.ones(2, 300)).square().mean(), 2
"""
BYTES = 4 * 180_600


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(LAYERS)
    return tmp_path


def test_what_crosses_between_shard_groups_is_compared_with_torchs_own(folder):
    args = ["--model", "mine:layers", "-n", "4", "--sharded", "2", "--methods", "none,topk", "--rounds", "1"]
    linked = [] if REASON else ["--bandwidth", "50mbit"]
    out, err, results = run(folder, *args, *linked, "--reduce-scatter", "block")
    rows = {row["name"]: row for row in results.rows}
    own = [f"{spec}{also} under FSDP2" for spec in ("none", "topk") for also in ("", " + block")]
    assert list(rows) == [SHARDS_ALONE, "HSDP", "HSDP bf16", *own]
    assert err == ""
    assert "mine:layers, 4 ranks" in out
    assert "in shard groups of 2" in out
    assert rows["HSDP"]["speedup"] == 1
    assert {row["engine"] for row in results.rows} == {"torch"}
    assert rows[own[0]]["sent_bytes"] == pytest.approx(BYTES, rel=0.02)
    assert rows[own[2]]["sent_bytes"] < 0.1 * BYTES
    if not REASON:  # a group's two ranks share its link: each exchanges half of the model with its replica
        assert rows["HSDP"]["sent_bytes"] == pytest.approx(BYTES, rel=0.02)
        assert rows["HSDP bf16"]["sent_bytes"] == pytest.approx(BYTES / 2, rel=0.02)
        assert rows["HSDP"]["wire_ms"] == pytest.approx(8e3 * BYTES / 50e6, rel=0.02)
        assert rows[SHARDS_ALONE]["sent_bytes"] < 10_000  # what shards exchange stays within their group
        assert min(rows["HSDP"]["times_ms"]) > 0.9 * rows["HSDP"]["wire_ms"]
        assert results.settings["verdict"]["4 ranks at 50mbit"].count("Without an exchange between replicas") == 1


def test_ranks_that_a_launcher_has_started_form_shard_groups(folder):
    torchrun = command("torchrun", 4, "--no-python")
    args = ["--model", "mine:layers", "--sharded", "2", "--methods", "topk", "--baselines", "none", "--rounds", "1"]
    *_, results = run(folder, *args, launcher=torchrun)
    assert [(row["name"], row["ranks"]) for row in results.rows] == [(SHARDS_ALONE, 4), ("topk under FSDP2", 4)]
    assert results.complete
