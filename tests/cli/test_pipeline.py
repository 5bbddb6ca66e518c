"""``grace pipeline``: plan, show and check, on one of PipeDream's profiles."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from grace.bench.common.text import of_bytes
from grace.pipeline.planning.graph import Graph
from grace.pipeline.planning.pipeline_plan import PipelinePlan
from grace.pipeline.planning.search import SearchOptions, search_plan
from grace.planner.network import Links
from tests.pipeline.graphs import chain
from tests.support.bench_results import pictures
from tests.support.command import grace_command

pytestmark = pytest.mark.slow

SVG_TEXT = "{http://www.w3.org/2000/svg}text"
PROFILE = str(Path(__file__).parents[1] / "pipeline" / "profiles" / "gnmt.json")


def run(folder, *args, code=0):
    found, out, err = grace_command("pipeline", *args, folder=folder, columns=140)
    assert found == code, err
    return err if code else out


def test_a_pipeline_is_planned_shown_and_checked(tmp_path):
    asked = ("-n", "4", "--profile", PROFILE, "--memory", "16GB", "--bandwidth", "1gbit", "--schedule", "1f1b")
    said = run(tmp_path, "plan", *asked, "--compressor", "topk(ratio=0.01)", "-o", "plan.json")
    plan = PipelinePlan.load(tmp_path / "plan.json")
    assert (plan.world_size, plan.schedule, plan.batch, plan.limit) == (4, "1f1b", 128, 16e9)
    assert f"Wrote plan.json: {len(plan.stages)} stages for 4 ranks" in said
    shown = run(tmp_path, "show", "plan.json")
    assert shown.strip() in said
    assert plan.summary in shown
    cells = [cell for row in plan.cells() for cell in row]
    assert all(cell in shown and cell in str(plan) for cell in cells)
    assert run(tmp_path, "check", "plan.json", "--profile", PROFILE, "-n", "4").startswith("plan.json: ")
    assert "for 4 ranks, and there are 3" in run(tmp_path, "check", "plan.json", "-n", "3", code=2)
    other = PROFILE.replace("gnmt", "vgg16")
    assert "another model" in run(tmp_path, "check", "plan.json", "--profile", other, code=2)


def test_data_parallelism_is_named_where_it_is_faster(tmp_path):
    resnet, alexnet = (PROFILE.replace("gnmt", name) for name in ("resnet18", "alexnet"))
    said = run(tmp_path, "plan", "-n", "8", "--profile", resnet, "--bandwidth", "10gbit", "--blocks", "32")
    assert "Data parallelism alone is faster: " in said
    said = run(tmp_path, "plan", "-n", "8", "--profile", alexnet, "--bandwidth", "10gbit", "--blocks", "32", "--fewer")
    assert "Data parallelism alone is faster: " not in said
    assert "of the 8 devices: more would be slower" in said


def test_what_is_given_is_kept(tmp_path):
    asked = ("-n", "4", "--profile", PROFILE, "--batch", "64", "--microbatches", "4-8", "-o", "plan.json")
    run(tmp_path, "plan", *asked, "--replicas", "1,2,1", "--recompute", "--nodes", "2", "--inside", "100gbit")
    plan = PipelinePlan.load(tmp_path / "plan.json")
    assert (plan.replicas, plan.batch, plan.recompute) == ((1, 2, 1), 64, True)
    assert plan.microbatches in (4, 8)
    run(tmp_path, "plan", *asked, "--cut", "node12,node23", "--replicas", "1-2", "--schedule", "gpipe", "--keep")
    plan = PipelinePlan.load(tmp_path / "plan.json")
    assert [stage.nodes[-1] for stage in plan.stages][:2] == ["node12", "node23"]
    assert plan.recompute is False
    run(tmp_path, "plan", *asked, "--stages", "2,4", "--schedule", "gpipe,1f1b", "--layout", "stages")
    plan = PipelinePlan.load(tmp_path / "plan.json")
    assert (plan.layout, len(plan.stages) in (2, 4), len(set(plan.replicas))) == ("stages", True, 1)


def test_stages_exchanges_are_planned_with_a_strategy(tmp_path):
    """None costs what no strategy does, a method less, and auto what the shorter of its two methods does."""
    (tmp_path / "rules.yaml").write_text("{version: 1, rules: [{match: {}, sync: {type: allreduce}}]}")
    sparse = "topk(ratio=0.01)"
    one = ["-n", "4", "--profile", PROFILE, "--bandwidth", "1gbit", "--stages", "2", "--replicas", "2"]
    one += ["--cut", "node12"]

    def planned(*choice):
        run(tmp_path, "plan", *one, "--schedule", "gpipe", "--keep", *choice, "-o", "plan.json")
        plan = PipelinePlan.load(tmp_path / "plan.json")
        return plan.compressor, [stage.exchange for stage in plan.stages]

    plain, quick = planned(), planned("--compressor", sparse)
    assert sum(plain[1]) > 3 * sum(quick[1])
    spec = f"uniform(compressor={sparse}, communicator=allgather)"
    name, exchanges = planned("--strategy", spec)
    assert name == spec
    assert sum(plain[1]) > 2 * sum(exchanges)
    assert planned("--strategy", "rules.yaml") == ("a strategy's", pytest.approx(plain[1], rel=0.1))
    assert planned("--strategy", f"auto(methods=['{sparse}'])")[1] == quick[1]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_plan_is_drawn(tmp_path, schedule):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    asked = ("-n", "4", "--profile", PROFILE, "--memory", "16GB")
    run(tmp_path, "plan", *asked, "--schedule", schedule, "-o", "plan.json")
    plan = PipelinePlan.load(tmp_path / "plan.json")
    assert "Wrote plan.html" in run(tmp_path, "show", "plan.json", "--html", "plan.html")
    page = (tmp_path / "plan.html").read_text()
    drawings = [ElementTree.fromstring(svg) for svg in pictures(page)]
    assert len(drawings) == 2
    texts = [["".join(text.itertext()) for text in drawing.iter(SVG_TEXT)] for drawing in drawings]
    assert sum(text.startswith("rank") for text in texts[0]) == len({stage.ranks for stage in plan.stages})
    assert [text.split("  ")[0] for text in texts[1] if text.startswith("rank ")] == [f"rank {n}" for n in range(4)]
    for stage in plan.stages[:-1]:
        assert f"{of_bytes(stage.sent)}, {of_bytes(stage.returned)} back" in page
    assert plan.summary in page
    assert not re.search(r'(src|href)="(?!#|data:)', page), "it loads nothing"


def test_figures_have_units_of_their_own_and_say_what_is_there(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    graph = chain(4, parameters=1e4, nbytes=8.0, rows=8)
    made = search_plan(graph, 2, 8, Links(1e9), SearchOptions(stages=2, memory=16e9))
    assert made.summary.endswith("; the fullest rank has 70 kB of 16 GB")
    made.save(tmp_path / "plan.json")
    run(tmp_path, "show", "plan.json", "--html", "plan.html")
    page = (tmp_path / "plan.html").read_text()
    schedule, memory = (
        ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter(SVG_TEXT)] for svg in pictures(page)
    )
    assert {"rank 0", "rank 1"} <= set(schedule)
    assert "kB" in memory
    assert "The dashed line" not in page  # beside it no bar would be seen
    assert "A device has 16.0 GB" in page


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["plan", "-n", "2"], "say which model, in one way: --model"),
        (["plan", "-n", "2", "--profile", PROFILE, "--memory", "much"], "16GB, not 'much'"),
        (["plan", "-n", "2", "--profile", PROFILE, "--latency", "5min"], "50us, not '5min'"),
        (["plan", "-n", "2", "--profile", PROFILE, "--stages", "few"], "--stages must be a number"),
        (["plan", "-n", "2", "--profile", PROFILE, "--stages", "4-2"], "--stages: the range 4-2 has 0 numbers"),
        (["plan", "-n", "2", "--profile", PROFILE, "--blocks", "1-999999999"], "1-999999999 has 999,999,999 numbers"),
        (["plan", "-n", "2", "--profile", PROFILE, "--replicas", "9" * 5000], "--replicas must be a number"),
        (["plan", "-n", "2", "--profile", PROFILE, "--nodes", "3"], "2 devices cannot be on 3 nodes"),
        (["plan", "-n", "2", "--profile", PROFILE, "--memory", "1GB"], "MB are missing"),
        (["plan", "-n", "2", "--profile", "none.json"], "none.json: cannot be read: No such file"),
        (["plan", "-n", "2", "--profile", "none.json", "-o", "no/p.json"], "cannot write no/p.json: No such file"),
        (["graph", "--profile", "none.json", "-o", "no/g.json"], "cannot write no/g.json: No such file"),
        (["show", "none.json", "--html", "no/p.html"], "cannot write no/p.html: No such file"),
        (["show", "none.json", "--html", "./none.json"], "none.json is a file that is read"),
        (["plan", "-n", "2", "--profile", "none.json", "-o", "./none.json"], "none.json is a file that is read"),
        (["graph", "--profile", "none.json", "-o", "./none.json"], "none.json is a file that is read"),
        (["plan", "-n", "2", "--profile", PROFILE, "--strategy", "s.yaml"], "s.yaml: cannot be read: No such file"),
        (["plan", "-n", "2", "--profile", PROFILE, "--strategy", "quickest"], "unknown builder 'quickest'"),
        (["plan", "-n", "2", "--profile", PROFILE, "--strategy", "auto", "--compressor", "topk"], "leave one out"),
        (["plan", "-n", "2", "--profile", PROFILE, "--strategy", "bad.yaml"], "this one has no parameter 'w'"),
        (["show", "bad.json"], "no plan of version"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, args, says):
    (tmp_path / "bad.json").write_text(json.dumps({"stages": []}))
    (tmp_path / "bad.yaml").write_text("{version: 1, variables: {w: {}}}")
    assert says in run(tmp_path, *args, code=2)


MODELS = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 8)
        self.one, self.two = torch.nn.Linear(8, 8), torch.nn.Linear(8, 100)

    def forward(self, x, scale=1.0):
        y = self.embedding(x)
        return self.two(y + torch.tanh(self.one(y)) * scale)

def net():
    return Net(), torch.zeros(4, 6, dtype=torch.long)

def keywords():
    return Net(), ((torch.zeros(4, 6, dtype=torch.long),), {"scale": torch.ones(4, 6, 1)})

def meta():
    with torch.device("meta"):
        return Net(), torch.zeros(4, 6, dtype=torch.long)

def alone():
    return Net()

def looks():
    class Looks(Net):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x
    return Looks(), torch.zeros(4, 6, dtype=torch.long)
"""


@pytest.fixture
def models(tmp_path):
    (tmp_path / "nets_of_a_test.py").write_text(MODELS)
    return tmp_path


def test_a_models_graph_is_shown_and_planned_with_elsewhere(models):
    said = run(models, "graph", "--model", "nets_of_a_test:net", "--longest", "2", "-o", "g.json")
    assert re.search(r"^6 nodes \(2 Linear, .*\), 5 parameters of 7.\d+ kB, [\d.]+ \+ [\d.]+ ms$", said, re.M), said
    assert len(re.findall(r"nets_of_a_test.py:\d+", said)) == 2
    graph = Graph.load(models / "g.json")
    assert (graph.rows, graph.variable("two.weight").shape) == (4, (100, 8))
    assert all(node.forward > 0 for node in graph.nodes)
    run(models, "plan", "--profile", "g.json", "-n", "2", "--stages", "2", "-o", "p.json")
    assert run(models, "check", "p.json", "--model", "nets_of_a_test:net", "-n", "2").startswith("p.json: 2 stages")


@pytest.mark.parametrize("made", ["meta", "keywords"])
def test_a_plan_of_a_dry_run_is_for_the_model_that_is_run(models, made):
    name = f"nets_of_a_test:{made}"
    run(models, "plan", "--model", name, "--dry", "-n", "4", "--stages", "2", "-o", "p.json")
    plan = PipelinePlan.load(models / "p.json")
    assert (len(plan.stages), plan.batch, plan.versions["torch"][:2]) == (2, 16, "2.")
    real = "net" if made == "meta" else made
    assert run(models, "check", "p.json", "--model", f"nets_of_a_test:{real}").startswith("p.json: 2 stages for 4")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--model", "nets_of_a_test:alone"), "must make (model, example inputs)"),
        (("--model", "nets_of_a_test:looks"), "torch.export cannot take Looks at "),
        (("--model", "nets_of_a_test:net", "--profile", PROFILE), "in one way"),
        (("--profile", PROFILE, "--dry"), "--dry is for --model"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(models, asked, said):
    assert said in run(models, "plan", "-n", "2", *asked, code=2)
