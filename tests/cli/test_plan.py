"""``grace plan``: in this process, and what it writes in a run of real ranks."""

import json
import re
import sys
import time
from dataclasses import replace

import pytest

from grace.cli.calibration_file import Calibration, Key
from grace.planner.costs import CodecCost, Cost, Curve
from grace.planner.explain import Plan
from grace.planner.network import MeasuredNetwork
from tests.support.bench_results import pictures
from tests.support.command import grace_command, grace_program

pytest.importorskip("pydantic", reason="pydantic is not installed")

MODEL = """
import torch

def net():
    return torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))

def full():
    x, y = torch.ones(8, 64), torch.zeros(8, dtype=torch.long)
    return net(), lambda model: torch.nn.functional.cross_entropy(model(x), y), 8

def rows():
    model = torch.nn.Sequential(torch.nn.Embedding(100, 8, sparse=True), torch.nn.Flatten(), torch.nn.Linear(32, 64))
    x = torch.arange(8).reshape(2, 4)
    return model, lambda model: model(x).square().mean()

def wrong():
    return net(), lambda model: model(torch.ones(3, 3)), 1

def unlearned():
    return net(), lambda model: torch.ones(1, requires_grad=True).sum(), 1

def endless():
    return net(), lambda model: model(torch.full((1, 64), 1e38)).square().sum(), 1

def pair():
    return net(), 3

def frozen():
    return net().requires_grad_(False)

def empty():
    return torch.nn.ParameterList([torch.zeros(0)])

def ended():
    raise SystemExit(3)
"""
TRAIN = """
import sys, torch, grace, train
grace.init()
torch.manual_seed(0)
model, loss, _ = train.full()
opt = grace.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
for _ in range(4):
    opt.zero_grad(); loss(model).backward(); opt.step()
chosen = {name: p["compressor"] for name, p in opt.strategy.to_dict()["variables"].items()}
open(f"rank{grace.rank()}", "w").write(f"{chosen} {loss(model).item():.6f}")
opt.close()
"""
CLUSTER = """
nodes:
  - {address: 10.0.0.1, chief: true, cpus: [0], network_bandwidth: 10}
  - {address: 10.0.0.2, cpus: [0], network_bandwidth: 0.5, ssh_config: x}
ssh: {x: {username: me}}
"""
SLOW = ("-n", "2", "--bandwidth", "10mbit")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(MODEL)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    return tmp_path


def planned(folder, *args, model="net", codecs="usual", code=0):
    said = [*(["--codecs", codecs] if codecs else []), "--model", f"train:{model}"]
    found, out, err = grace_command("plan", *said, *args, folder=folder, columns=160)
    assert found == code, err
    return out if code == 0 else err


@pytest.mark.ranks
def test_a_planned_strategy_trains_real_ranks(folder):
    out = planned(folder, *SLOW, "--latency", "50us", "-o", "s.yaml", model="full")
    assert "Wrote s.yaml: 4 variables, for 2 ranks" in out
    assert re.search(r"^\* .*[0-9.]+ +[1-9][0-9.]+ ", out, re.M)  # the one that is taken, faster than plain
    assert re.search(r"^0.weight .* saves [0-9.]+ ms", out, re.M)
    (folder / "run.py").write_text(TRAIN)
    launch = ["launch", "-n", "2", "--engine", "torch", "--strategy", "s.yaml"]
    grace_program(*launch, "--", sys.executable, "run.py", cwd=folder)
    first, second = ((folder / f"rank{rank}").read_text() for rank in (0, 1))
    assert first == second
    code, shown, _ = grace_command("strategy", "show", "s.yaml", folder=folder, columns=160)
    assert code == 0
    compressor = re.search(r"'0.weight': '([a-z]+)", first)[1]
    assert compressor != "none"
    assert compressor in shown


def test_compute_and_methods_are_measured_on_the_models_own_steps(folder):
    out = planned(folder, *SLOW, "--methods", "fp16,topk(ratio=0.01)", "--json", "p.json", model="full", codecs=None)
    assert "compute: forward, backward, optimizer as measured here, on one process" in out
    assert "codecs:  as measured here, on the gradients of this model" in out
    document = json.loads((folder / "p.json").read_text())
    timeline = document["timeline"]
    assert set(timeline["ready"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert 0 <= timeline["ready"]["2.bias"] <= timeline["ready"]["0.weight"] <= timeline["backward"]
    assert timeline["optimizer"] > 0
    plan = Plan.from_dict(document["plan"])
    assert (plan.why, plan.compresses) == (document["why"], document["compresses"])
    assert {spec for one in plan.candidates for spec in one.methods} <= {"none", "cast", "topk"}
    assert document["strategy"]["variables"].keys() == timeline["ready"].keys()
    assert document["strategy"]["builder"]["params"]["bandwidth"] == "10mbit"


def test_rows_of_embeddings_are_counted(folder):
    planned(folder, *SLOW, "--methods", "topk", "--json", "p.json", model="rows", codecs="measure")
    plan = Plan.from_dict(json.loads((folder / "p.json").read_text())["plan"])
    row_bytes = 8 * (8 * 4 + 4)  # 8 of the 100 rows come
    assert row_bytes < plan.plain.prediction.sent < row_bytes + 4 * (32 * 64 + 64) + 200


def test_times_may_be_given_and_what_nobody_says_is_said_to_be_nothing(folder):
    out = planned(folder, *SLOW, "--forward", "10ms", "--backward", "0.02 s", "--json", "p.json")
    assert "compute: forward, backward as given; optimizer 0: let the function return (model, loss, samples)" in out
    timeline = json.loads((folder / "p.json").read_text())["timeline"]
    assert (timeline["forward"], timeline["backward"], timeline["optimizer"]) == (0.01, 0.02, 0.0)
    assert timeline["ready"]["2.bias"] < timeline["ready"]["0.weight"] == 0.02
    planned(folder, *SLOW, "--backward", "500ms", "--json", "q.json", model="full")
    scaled = json.loads((folder / "q.json").read_text())["timeline"]
    assert max(scaled["ready"].values()) <= scaled["backward"] == 0.5
    assert 0 < scaled["forward"] < 0.5  # measured


def test_over_fast_links_it_says_not_to_compress(folder):
    out = planned(folder, "-n", "2", "--bandwidth", "400gbit", "--latency", "1us", "-o", "s.json", "--report", "r.html")
    assert "do not compress: nothing is 3 % faster" in out
    assert re.search(r"^\* +plain all-reduce ", out, re.M)
    variables = json.loads((folder / "s.json").read_text())["variables"]
    assert {entry["compressor"] for entry in variables.values()} == {"none"}
    assert "No compression for 2 ranks" in (folder / "r.html").read_text()


def test_the_same_seed_writes_the_same_strategy(folder):
    for name in ("a.yaml", "b.yaml"):
        planned(folder, *SLOW, "--backward", "1ms", "--seed", "3", "-o", name)
    assert (folder / "a.yaml").read_text() == (folder / "b.yaml").read_text()


def test_quality_bounds_what_is_chosen(folder):
    for quality, allowed in (("exact", {"none"}), ("half", {"none", "cast", "cast(dtype='bf16')"})):
        planned(folder, *SLOW, "--quality", quality, "--json", "p.json")
        plan = Plan.from_dict(json.loads((folder / "p.json").read_text())["plan"])
        assert {spec for one in plan.candidates for spec in one.methods} <= allowed
    out = planned(folder, *SLOW, "--methods", "topk", "--reference", "topk(ratio=0.5)")
    assert "(matrices: the error of topk(ratio=0.5))" in " ".join(out.split())


def test_a_clusters_slowest_node_counts(folder):
    out = planned(folder, "-r", "cluster.yaml")
    assert "ranks:   2 on 2 nodes" in out
    assert "links:   500 Mbit/s between ranks, 50 us a message\n" in out
    assert "links:   1 Gbit/s between ranks, 20 us" in planned(
        folder, "-r", "cluster.yaml", "--bandwidth", "1gbit", "--latency", "20us"
    )


def test_the_report_holds_its_figures_and_loads_nothing(folder):
    out = planned(folder, "-n", "8", "--bandwidth", "100mbit", "--report", "r.html", model="full")
    assert "Wrote r.html (" in out
    page = (folder / "r.html").read_text()
    titles = re.findall(r"<h3>([^<]*)</h3>", page)
    assert titles == ["One step, as it is expected", "Step time against ranks and against bandwidth", "Memory"]
    step, scaling, _ = pictures(page)
    assert "encode and decode" in step
    for word in ("this plan", "none", "qsgd", "topk", "1000"):
        assert f">{word}" in scaling
    assert "plain all-reduce" in page
    assert not re.search(r'(src|href)="(?!#|data:)', page)
    assert "A plan for 8 ranks" in page


# -- calibrations ----------------------------------------------------------------------------------------------------


def calibrated(ranks=2, nodes=1, framework=None, curves=True, **key):
    """A calibration of slow links, and of the codecs of plain sums and fp16."""
    import torch

    framework = framework or f"torch {torch.__version__.partition('+')[0]}"
    hosts = {f"node{i}": ranks // nodes for i in range(nodes)}
    curve = Curve.through([(n, 1e-4 + n / 1e6) for n in (1e3, 1e5, 1e7)])
    cost = CodecCost(Cost(1e-5, 1e-6, 1e-9), Cost(1e-5), Cost(1e-5, 1e-6, 1e-9))
    return Calibration(
        Key(hosts, "torch.distributed (gloo)", framework, ranks, 1, **key),
        made=time.time(),
        network=MeasuredNetwork({"allreduce": curve}, ranks) if curves else None,
        codecs={"allreduce, none, none": cost, "allreduce, cast, none": cost},
    )


def test_a_calibration_tells_of_the_cluster_the_links_and_the_methods(folder):
    calibrated(4).write(folder / "c.json")
    out = planned(folder, "--calibration", "c.json", codecs=None)
    assert "ranks:   4 on 1 node" in out
    assert "links:   as measured over torch.distributed (gloo) by 4 ranks\n" in out
    assert "codecs:  as measured by grace calibrate, c.json" in out
    assert re.search(r"^\* +fp16 ", out, re.M)  # nothing else was measured
    assert "by 4 ranks; what 16 take follows by formula" in planned(
        folder, "--calibration", "c.json", "-n", "16", codecs=None
    )
    out = planned(folder, "--calibration", "c.json", "--bandwidth", "1gbit", "-n", "16", codecs=None)
    assert "links:   1 Gbit/s between ranks, 50 us" in out
    calibrated(4, nodes=2).write(folder / "d.json")
    assert "ranks:   8 on 4 nodes" in planned(
        folder, "--calibration", "d.json", "-n", "8", "--bandwidth", "1gbit", codecs=None
    )


@pytest.mark.parametrize(
    ("made", "args", "said"),
    [
        (lambda c: replace(c, made=c.made - 40 * 86400), (), "c.json: is 40 days old, and taken up to 30"),
        (lambda c: calibrated(framework="tensorflow 2.0"), (), "it has framework: 'tensorflow 2.0', and here 'torch "),
        (lambda c: calibrated(grace="0.0.1"), (), "it has grace: '0.0.1', and here"),
        (lambda c: calibrated(python="2.7"), (), "it has python: '2.7', and here"),
        (lambda c: c, ("-r", "cluster.yaml"), "c.json: is for another cluster: it has 2 ranks on 1 node, and there "),
        (lambda c: calibrated(curves=False), (), "c.json: was made by one rank alone"),
        (lambda c: c, ("--latency", "5us"), "--latency beside a calibration needs --bandwidth"),
        (lambda c: calibrated(4, 2), ("-n", "7"), "-n 7 does not say on how many nodes; name the cluster's file"),
    ],
)
def test_calibrations_of_others_are_refused_by_name(folder, made, args, said):
    made(calibrated()).write(folder / "c.json")
    assert said in planned(folder, "--calibration", "c.json", *args, codecs=None, code=2)


# -- what is wrong is said before anything long begins ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "say for how many ranks: -n 8, or the cluster's file: -r cluster.yaml"),
        (("-n", "1"), "one rank alone exchanges nothing"),
        (("-n", "2", "-r", "cluster.yaml"), "cluster.yaml says how many ranks there are"),
        (("-n", "2", "--bandwidth", "fast"), "bandwidth must be Gbit/s above 0, or text as '100mbit', not 'fast'"),
        (("-n", "2", "--latency", "-1us"), "latency must be seconds, or text as '50us', not '-1us'"),
        (("-n", "2", "--backward", "12"), "--backward is a time with its unit, as in 12ms or 0.5s, not '12'"),
        (("-n", "2", "--codecs", "all"), "--codecs is measure or usual, not 'all'"),
        (("-n", "2", "--quality", "best"), "quality must be one of 'exact', 'half', 'unbiased', 'feedback', not"),
        (("-n", "2", "--methods", "topkk"), "topkk"),
        (("-n", "2", "--methods", ""), "--methods: at least one is needed"),
        (("-n", "2", "--methods", "topk", "--quality", "half"), "methods names topk with the memory residual"),
        (("-n", "2", "--reference", "signsgd"), "votes"),
        (("-n", "2", "-o", "nowhere/s.yaml"), "cannot write nowhere/s.yaml: No such file or directory"),
        (("-n", "2", "--report", "."), "cannot write .: Is a directory"),
        (("-r", "c.yaml", "-o", "./c.yaml"), "c.yaml is a file that is read, and would be overwritten"),
        (("--calibration", "c.json", "--json", "./c.json"), "c.json is a file that is read, and would be"),
        (("-n", "2", "--calibration", "none.json"), "none.json"),
        (("-r", "none.yaml"), "none.yaml"),
    ],
)
def test_what_is_wrong_is_said(folder, args, said):
    assert said in planned(folder, *args, codecs=None if "--codecs" in args else "usual", code=2)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("nett", "train has no function 'nett'"),
        ("wrong", "a step of the model failed: loss(model): RuntimeError: "),
        ("unlearned", "backward reached none of the model's parameters"),
        ("endless", "is not finite after"),
        ("pair", "loss takes the model, and is no int"),
        ("frozen", "train:frozen has no trainable variable"),
        ("empty", "all trainable variables of train:empty are empty"),
        ("ended", "'train:ended' makes no model: SystemExit: 3"),
    ],
)
def test_models_that_cannot_be_planned_are_refused(folder, model, said):
    assert said in planned(folder, *SLOW, model=model, code=2)


def test_a_script_that_ends_when_it_is_imported_is_refused(folder):
    """The usage of the script's own argparse was all that was said."""
    (folder / "train.py").write_text("import argparse\nargparse.ArgumentParser().parse_args(['--data'])\n")
    said = planned(folder, *SLOW, code=2)
    assert "'train:net': cannot import train: SystemExit: 2. Put what it does as a script under if __name__" in said


def test_names_of_the_benchmarks_models_do_too(folder):
    code, out, err = grace_command("plan", "--model", "mlp", *SLOW, "--codecs", "usual", folder=folder, columns=160)
    assert code == 0, err
    assert "model:   6 variables, 1.20 MB of gradients" in out
    code, _, err = grace_command("plan", "--model", "vgg", *SLOW, folder=folder)
    assert code == 2
    assert "unknown model 'vgg'; known: transformer, " in err


@pytest.mark.slow
def test_keras_models_are_planned_too(folder):
    pytest.importorskip("keras", reason="TensorFlow is not installed")
    (folder / "theirs.py").write_text(
        "import keras, numpy\n"
        "def net():\n"
        "    layers = keras.layers\n"
        "    middle = [layers.Embedding(50, 3), layers.Flatten()]\n"
        "    model = keras.Sequential([layers.Input((4,)), *middle, layers.Dense(2)])\n"
        "    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)\n"
        "    x, y = numpy.array([[1, 2, 3, 1]]), numpy.array([1])\n"
        "    return model, lambda model: loss(y, model(x)), 1\n"
    )
    args = ("plan", "--model", "theirs:net", *SLOW, "--methods", "topk", "--json", "p.json", "-o", "s.yaml")
    code, out, err = grace_command(*args, folder=folder, columns=160)
    assert code == 0, err
    assert "compute: forward, backward, optimizer as measured here" in out
    document = json.loads((folder / "p.json").read_text())
    assert set(document["timeline"]["ready"].values()) == {document["timeline"]["backward"]}
    row_bytes = 3 * (3 * 4 + 4)  # of the 50 rows 3 come
    assert document["plan"]["candidates"][0]["prediction"]["sent"] < row_bytes + 4 * (24 + 2) + 200
