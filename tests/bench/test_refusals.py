"""Refusals of ``grace bench`` and the programs of benchmarks/: in a line, before anything starts."""

import sys

import pytest
import torch

from benchmarks import planning_time, readme_figures
from tests.support.command import grace_command

MINE = """
import torch
from grace.bench.workloads import InTorch

def number(): return 7

class Few(InTorch):
    about, metric, lr, epochs, batch, count = "few examples", "error", 0.1, 1, 8, 7
    network = loss = quality = None
"""
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
REFUSED = {
    "kernels": [
        (["--size", "25MB"], "as in 4096, 1e6, 2.5M or 25M, not '25MB'"),
        (["--size", "10"], "--size is between 1,000 and 2,147,483,647 elements, not 10"),
        (["--size", "3G"], "not 3,000,000,000"),
        (["--device", "tpu"], "--device is cpu or cuda, not 'tpu'"),
        (["--tensors", "real"], "unknown tensor 'real'; known: gaussian, heavy-tailed, captured"),
        (["--tensors", ","], "--tensors: at least one is needed"),
        (["--methods", "topq"], "did you mean 'topk'?"),
        (["--methods", ""], "--methods: at least one is needed"),
        (["--methods", "qsgd", "--memory", "dgc"], "memory dgc cannot serve qsgd"),
        (["--repeats", "0"], "--repeats must be at least 1, not 0"),
        (["--threads", "-1"], "--threads must be at least 1, not -1"),
        (["--threads", "1000000"], "--threads must be at most 1024, not 1000000"),
        (["--out", __file__], "cannot write to"),
        pytest.param(["--device", "cuda"], "--device cuda: torch sees no GPU here", marks=NO_GPU),
    ],
    "link": [
        (["--bandwidth", "fast"], "as in 800kbit, 100mbit or 2.5gbit, not 'fast'"),
        (["--bandwidth", "1gbit,"], "not ''"),
        (["--ranks", "1"], "--ranks is 1"),
        (["--seconds", "0"], "--seconds is above 0"),
    ],
    "step": [
        (["--model", "vgg"], "unknown model 'vgg'; known: transformer, resnet, resnet50, gpt2, lstm, ncf, mlp, or"),
        (["--model", "mine:nothing"], "mine has no function 'nothing'"),
        (["--model", "nowhere:f"], "cannot import nowhere"),
        (["--engine", "smoke"], "unknown engine 'smoke'; known: torch, horovod, mpi"),
        (["--methods", "topq"], "did you mean 'topk'?"),
        (["--bandwidth", "1gb"], "a bandwidth is a number"),
        (["--baselines", "nccl"], "unknown baseline 'nccl'; known: ddp, horovod, or none"),
        (["--baselines", "none", "--methods", ""], "nothing is to be compared"),
        (["--strategy", "nothere"], "unknown builder 'nothere'; known: "),
        (["--strategy", "nothere.yaml"], "there is no strategy file nothere.yaml"),
        (["-n", "two"], "--ranks are whole numbers separated by commas"),
        (["-n", "0"], "--ranks must be between 1 and 1000, not 0"),
        (["--rounds", "0"], "--rounds must be at least 1, not 0"),
        (["-n", "4", "--sharded", "3"], "--sharded 3 must divide the 4 ranks into two replicas or more"),
        (["-n", "2", "--sharded", "2"], "--sharded 2 must divide the 2 ranks into two replicas or more"),
        (["-n", "4", "--sharded", "-1"], "--sharded -1 must divide"),
        (["-n", "4", "--sharded", "2", "--ddp-hook"], "--ddp-hook is not for --sharded"),
        (["-n", "4", "--sharded", "2", "--bucket-bytes", "9"], "--bucket-bytes is not for --sharded"),
        (["-n", "4", "--sharded", "1", "--reduce-scatter", "block"], "shard groups of 2 ranks or more"),
        (["-n", "4", "--sharded", "2", "--reduce-scatter", "blok"], "did you mean 'block'?"),
        (["-n", "4", "--reduce-scatter", "block"], "--reduce-scatter is for --sharded"),
        (["--device", "tpu"], "--device is cpu or cuda, not 'tpu'"),
        (["--device", "cuda", "--sharded", "2"], "over a simulated wire: leave out --sharded"),
        (["--device", "cuda", "--engine", "mpi"], "leave out --engine mpi"),
        (["--device", "cuda", "--baselines", "ddp"], "leave out --baselines"),
        pytest.param(["--device", "cuda"], "--device cuda: torch sees no GPU here", marks=NO_GPU),
    ],
    "train": [
        (["--optimizer", "lion"], "unknown optimizer 'lion'; known: sgd, adamw"),
        (["--optimizer", "adamw,sgd", "--lr", "none=0.1"], "is for one optimizer"),
        (["--size", "10k"], "the model of the task digits has one size"),
        (["--task", "mine:Lines"], "mine has no function 'Lines'"),
        (["--task", "nothere:Line"], "cannot import nothere"),
        (["--task", "mine:torch.nn"], "mine has no function"),
        (["--task", "mine:Few"], "mine:Few() has 7 examples, and a batch has 8"),
        (["-n", "65"], "--ranks 65: a batch of digits has 64 samples to share"),
        (["--task", "mine:number"], "must return a grace.bench.workloads.Task, not int"),
        (
            ["--task", "mnist"],
            "unknown task 'mnist'; known: chargpt, charlm, digits, digits-cnn, recommender, or module:",
        ),
        (["--lr", "qsgd"], "METHOD=RATE, as in signsgd=0.001, not 'qsgd'"),
        (["--lr", "signum=0.1"], "for 'signum', which is not among the methods"),
        (["--lr", "qsgd=-1"], "the learning rate of qsgd must be above 0 and finite, not -1"),
        (["--lr", "qsgd=inf"], "the learning rate of qsgd must be above 0 and finite, not inf"),
        (["--ranks", "0"], "--ranks must be between 1 and 1000, not 0"),
        (["--epochs", "0"], "--epochs must be at least 1, not 0"),
        (["--methods", "none,topq(ratio=1)"], "unknown compressor 'topq' (did you mean 'topk'?)"),
        (["--methods", ","], "no method is named in ','"),
        (["--seeds", "9" * 400], "--seeds must be at most 10000, not 999"),
        (["--seeds", "0,x"], "seeds are whole numbers separated by commas, as in 0,1,2, not '0,x'"),
        (["--seeds", "0,-1"], "seeds must be in [0, 2**32)"),
        (["--seeds", "0"], "--seeds must be at least 1, or seeds separated by commas, not 0"),
        (["--methods", "auto(quality=best)"], "quality must be one of 'exact', 'half', 'unbiased', 'feedback'"),
    ],
    "all": [
        (["--task", "mnist"], "unknown task 'mnist'"),
        (["--out", "/dev/null/here"], "cannot write to /dev/null/here"),
    ],
}
CASES = [
    pytest.param(command, *getattr(case, "values", case), marks=getattr(case, "marks", ()))
    for command, cases in REFUSED.items()
    for case in cases
]


@pytest.mark.parametrize(("command", "args", "says"), CASES)
def test_a_mistake_is_one_line_before_anything_starts(tmp_path, command, args, says):
    (tmp_path / "mine.py").write_text(MINE)
    out = [] if "--out" in args or command == "link" else ["--out", "new"]
    code, said, err = grace_command("bench", command, *args, *out, folder=tmp_path)
    assert (code, said) == (2, "")
    assert says in " ".join(err.split())
    assert err.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("program", "words", "says"),
    [
        (planning_time, ["--variables", "0"], "error: "),
        (planning_time, ["--ranks", "0"], "error: "),
        (planning_time, ["--bandwidth", "slow"], "error: "),
        (readme_figures, ["--only", "nothing"], "error: "),
        (readme_figures, ["--smallest", "--folder", str(readme_figures.RESULTS)], "error: "),
    ],
)
def test_a_programs_mistake_is_told(monkeypatch, capsys, program, words, says):
    monkeypatch.setattr(sys, "argv", ["program", *words])
    with pytest.raises(SystemExit) as caught:
        program.main()
    assert caught.value.code == 2
    assert says in capsys.readouterr().err
