"""``grace pipeline``: plan, show and check, on a profile of PipeDream's."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from grace.partition.plan import Plan
from tests.support.command import grace_command

PROFILE = str(Path(__file__).parents[1] / "partition" / "profiles" / "gnmt.json")


def run(folder, *args, code=0):
    found, out, err = grace_command("pipeline", *args, folder=folder, columns=140)
    assert found == code, err
    return err if code else out


def test_a_pipeline_is_planned_shown_and_checked(tmp_path):
    asked = ("-n", "4", "--profile", PROFILE, "--memory", "16GB", "--bandwidth", "1gbit", "--schedule", "1f1b")
    said = run(tmp_path, "plan", *asked, "--compressor", "topk(ratio=0.01)", "--compare", "-o", "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert (plan.world_size, plan.schedule, plan.batch, plan.limit) == (4, "1f1b", 128, 16e9)
    assert f"Wrote plan.json: {len(plan.stages)} stages for 4 ranks" in said
    others = dict(re.findall(r"^(equal \w+|data parallelism alone): ([\d.]+) ms a step$", said, re.M))
    assert set(others) == {"equal layers", "equal parameters", "equal time", "data parallelism alone"}
    assert plan.seconds * 1e3 <= min(map(float, others.values()))
    shown = run(tmp_path, "show", "plan.json")
    assert shown.strip() in said
    assert plan.summary in shown
    assert run(tmp_path, "check", "plan.json", "--profile", PROFILE, "-n", "4").startswith("plan.json: ")
    assert "for 4 ranks, and there are 3" in run(tmp_path, "check", "plan.json", "-n", "3", code=2)
    other = PROFILE.replace("gnmt", "vgg16")
    assert "another model" in run(tmp_path, "check", "plan.json", "--profile", other, code=2)


def test_what_is_given_is_kept(tmp_path):
    asked = ("-n", "4", "--profile", PROFILE, "--batch", "64", "--microbatches", "4-8", "-o", "plan.json")
    run(tmp_path, "plan", *asked, "--replicas", "1,2,1", "--recompute", "--nodes", "2", "--inside", "100gbit")
    plan = Plan.load(tmp_path / "plan.json")
    assert (plan.replicas, plan.batch, plan.recompute) == ((1, 2, 1), 64, True)
    assert plan.microbatches in (4, 8)
    run(tmp_path, "plan", *asked, "--cut", "node12,node23", "--replicas", "1-2", "--schedule", "gpipe", "--keep")
    plan = Plan.load(tmp_path / "plan.json")
    assert [stage.nodes[-1] for stage in plan.stages][:2] == ["node12", "node23"]
    assert plan.recompute is False
    run(tmp_path, "plan", *asked, "--stages", "4,8", "--schedule", "zbv,interleaved", "--layout", "stages")
    assert Plan.load(tmp_path / "plan.json").schedule in ("zbv", "interleaved")


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_plan_is_drawn(tmp_path, schedule):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    asked = ("-n", "4", "--profile", PROFILE, "--memory", "16GB")
    run(tmp_path, "plan", *asked, "--schedule", schedule, "-o", "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert "Wrote plan.html" in run(tmp_path, "show", "plan.json", "--html", "plan.html")
    page = (tmp_path / "plan.html").read_text()
    drawings = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.S)]
    assert len(drawings) == 3
    texts = [["".join(text.itertext()) for text in drawing.iter("text")] for drawing in drawings]
    assert sum(" there, " in text for text in texts[0]) == len(plan.stages) - 1
    assert sum(text.startswith("ranks ") for text in texts[1]) == len({stage.ranks for stage in plan.stages})
    assert [text for text in texts[2] if text.startswith("rank ")] == [f"rank {rank}" for rank in range(4)]
    assert plan.summary in page
    assert not re.search(r'(src|href)="(?!#)', page), "it loads nothing"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["plan", "-n", "2"], "say which model: --profile"),
        (["plan", "-n", "2", "--profile", PROFILE, "--memory", "much"], "16GB, not 'much'"),
        (["plan", "-n", "2", "--profile", PROFILE, "--latency", "5min"], "50us, not '5min'"),
        (["plan", "-n", "2", "--profile", PROFILE, "--stages", "few"], "--stages must be a number"),
        (["plan", "-n", "2", "--profile", PROFILE, "--nodes", "3"], "2 devices cannot be on 3 nodes"),
        (["plan", "-n", "2", "--profile", PROFILE, "--memory", "1GB"], "GB are missing"),
        (["plan", "-n", "2", "--profile", "none.json"], "none.json: No such file"),
        (["show", "bad.json"], "no plan of version"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, args, says):
    (tmp_path / "bad.json").write_text(json.dumps({"stages": []}))
    assert says in run(tmp_path, *args, code=2)
