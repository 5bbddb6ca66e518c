"""Rows and the picture that README and pages quote: ``python -m benchmarks.readme_figures``.

Each part is one run of ``grace bench step``, ``train`` or ``kernels``; its ``results.json`` becomes
``benchmarks/results/PART.json``. Parts that are there are left out, so a call goes on where an interrupted one ended;
``--again`` measures them anew. ``--list`` shows the parts and their commands, ``--only steps`` takes those whose names
begin so. Emulated links need root, and times a machine that does nothing else. At the end, or with ``--draw`` alone,
the picture is drawn from the rows that are there: docs/_static/step-times.svg.

    python -m benchmarks.readme_figures --list
    python -m benchmarks.readme_figures --only steps
    python -m benchmarks.readme_figures --smallest --folder out/readme --picture out/readme/step-times.svg
"""

import argparse
import dataclasses
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from grace.bench.common.results import Results, load
from grace.core.atomic_files import atomic_write

ROOT = Path(__file__).parent.parent
RESULTS, PICTURE = ROOT / "benchmarks" / "results", ROOT / "docs" / "_static" / "step-times.svg"
METHODS = (
    "none",
    "fp16",
    "block(bits=8)",
    "block(bits=4)",
    "block(bits=2)",
    "efsignsgd",
    "powersgd(rank=4)",
    "topk(ratio=0.01)",
)
BEST = ("none", "fp16", "block(bits=4)", "block(bits=2)", "powersgd(rank=4)", "topk(ratio=0.01)")
"""Methods of the longer runs."""
STRATEGIES = ('diloco(period=20, compressor="block(bits=4)", optimizer="nesterov(lr=0.7, momentum=0.6)")',)
"""Strategies' builders that are measured beside the methods."""
OUTER = (
    "none",
    "topk(ratio=0.01)",
    "diloco(period=15, optimizer=none)",
    'diloco(period=15, compressor="block(bits=4)", optimizer="nesterov(lr=0.7, momentum=0.6)")',
    'diloco(period=50, compressor="block(bits=4)", optimizer="nesterov(lr=0.7, momentum=0.6)")',
    "sparseloco(period=15)",
)
"""Methods of the table of outer optimizers, beside which every-step methods stand."""
OPTIMIZERS = ("adamw", "sgd")
RATES = "1gbit,100mbit"
TASKS = ("digits-cnn", "recommender")
PICTURED = {
    "DDP": ("DDP", "none"),
    "DDP fp16 hook": ("DDP, torch's fp16 hook", "fp16"),
    "DDP PowerSGD(4) hook": ("DDP, torch's PowerSGD hook", None),
    "fp16": ("fp16", "fp16"),
    "block(bits=4)": ("block(bits=4)", "block(bits=4)"),
    "powersgd(rank=4)": ("powersgd(rank=4)", "powersgd(rank=4)"),
    "topk(ratio=0.01)": ("topk(ratio=0.01)", "topk(ratio=0.01)"),
    **{f"strategy {spec}": ("outer Nesterov each 20 steps", spec) for spec in STRATEGIES},
}
"""Rows of the picture: the label of each, and the method whose loss stands beside it, if such a method is trained."""
LOSSES = {
    "chargpt-adamw": ("train-chargpt-adamw-seconds", "train-chargpt-adamw"),
    "chargpt-sgd": ("few_bits_sgd", "train-chargpt-sgd"),
    **{f"{task}-{o}": (f"train-{task}-{o}-seconds", f"train-{task}-{o}") for task in TASKS for o in OPTIMIZERS},
    "outer": ("train-outer-seconds", "train-outer"),
}
"""Files ``losses-NAME.json`` of mean losses, and those with the runs of each."""
PANELS = {"steps-transformer-1gbit": "1 Gbit/s", "steps-transformer-100mbit": "100 Mbit/s"}


@dataclasses.dataclass(frozen=True)
class Part:
    """One run of ``grace bench``.

    Attributes:
        name: the name of its file of results.
        arguments: what follows ``grace bench``, without the folder.
    """

    name: str
    arguments: tuple[str, ...]


def parts(smallest: bool = False) -> list[Part]:
    """Return all parts; in their smallest form each takes seconds, and its rows tell nothing but that it runs.

    >>> [part.name for part in parts()][:4]
    ['steps-transformer-1gbit', 'steps-transformer-100mbit', 'steps-transformer-10gbit', 'steps-resnet50-1gbit']
    """
    found = [_steps(f"transformer-{rate}", METHODS, "transformer", rate) for rate in ("1gbit", "100mbit", "10gbit")]
    found += [
        _steps("resnet50-1gbit", BEST, "resnet50", "1gbit"),
        _steps("transformer-4-ranks-1gbit", BEST, "transformer", "1gbit", ranks=4),
    ]
    found += [
        _training(f"{task}-{optimizer}-seconds", methods, task, optimizer, "1", "--bandwidth", RATES)
        for task, methods in (("chargpt", METHODS), ("digits-cnn", BEST), ("recommender", BEST))
        for optimizer in OPTIMIZERS
        if (task, optimizer) != ("chargpt", "sgd")  # whose steps take as long
    ]
    found.append(_training("outer-seconds", OUTER, "chargpt", "adamw", "1", "--epochs", "6", "--bandwidth", "100mbit"))
    # More seeds, for losses alone: they depend on no network, and may be measured on a busy machine.
    found += [
        _training("chargpt-adamw", METHODS, "chargpt", "adamw", "1,2"),
        _training("chargpt-sgd", ["block(bits=8)"], "chargpt", "sgd", "3"),
        *(_training(f"{task}-{o}", BEST, task, o, "1,") for task in TASKS for o in OPTIMIZERS),
        _training("outer", OUTER, "chargpt", "adamw", "1,", "--epochs", "6"),
    ]
    found.append(Part("codecs", ("kernels", "--methods", ",".join(METHODS), "--size", "25M", "--tensors", "gaussian")))
    return [_smallest(part) for part in found] if smallest else found


def _steps(name: str, methods: Sequence[str], model: str, rate: str, ranks: int = 2) -> Part:
    strategies = [word for spec in STRATEGIES for word in ("--strategy", spec)]
    return Part(
        f"steps-{name}",
        (
            *("step", "--model", model, "--ranks", str(ranks), "--bandwidth", rate, "--baselines", "ddp"),
            *("--methods", ",".join(methods), *strategies),
        ),
    )


def _training(name: str, methods: Sequence[str], task: str, optimizer: str, seeds: str, *more: str) -> Part:
    names = ",".join(dict.fromkeys([*methods, *STRATEGIES]))
    words = ("train", "--task", task, "--optimizer", optimizer, "--seeds", seeds, *more, "--methods", names)
    return Part(f"train-{name}", words)


def _smallest(part: Part) -> Part:
    """Return a part of few methods, and of a small model, few steps or a small tensor."""
    changed = {
        "step": {"--model": "mlp", "--rounds": "1", "--methods": "none,block(bits=4)"},
        "train": {"--task": "digits-cnn", "--epochs": "1", "--seeds": "1", "--methods": "none,block(bits=4)"},
        "kernels": {"--size": "4096", "--repeats": "1", "--methods": "none,block(bits=4)"},
    }[part.arguments[0]]
    options = dict(zip(part.arguments[1::2], part.arguments[2::2], strict=True)) | changed
    return Part(part.name, (part.arguments[0], *(word for option in options.items() for word in option)))


def command(part: Part, folder: Path) -> list[str]:
    """Return the command line of a part."""
    return ["grace", "bench", *part.arguments, "--out", str(folder)]


def measure(part: Part, results: Path) -> int:
    """Run a part; if it ends well, keep its results. Return its exit code."""
    folder = ROOT / "out" / "readme" / part.name
    program, *words = command(part, folder)
    code = subprocess.run([Path(sys.executable).with_name(program), *words], cwd=ROOT, check=False).returncode
    if code == 0:
        results.mkdir(parents=True, exist_ok=True)
        with atomic_write(results / f"{part.name}.json") as draft:
            draft.write_text(json.dumps(json.loads((folder / "results.json").read_text()), separators=(",", ":")))
    return code


DEFAULTS = {"block(bits=2, scale=max)": "block(bits=2)"}
"""Methods of older rows that spell out what is the default."""


def write_losses(results: Path) -> None:
    """Write the mean losses over all seeds that were run, half of their range, and the part of the fall of the loss
    without compression that a method lacks, from the runs that are there."""
    for name, files in LOSSES.items():
        paths = [results / f"{file}.json" for file in files]
        if not all(path.exists() for path in paths):
            continue
        found: dict[str, dict[int, dict]] = {}
        for row in (row for path in paths for row in load(path).rows):
            method = DEFAULTS.get(str(row["method"]), str(row["method"]))
            found.setdefault(method, {}).update({run["seed"]: run for run in row["runs"]})
        plain = statistics.fmean(run["quality"] for run in found["none"].values())
        start = statistics.fmean(run["curve"][0][-1] for run in found["none"].values())
        rows = []
        for method, runs in found.items():
            qualities = [run["quality"] for run in runs.values()]
            mean = statistics.fmean(qualities)
            rows.append(
                {
                    "method": method,
                    "quality": mean,
                    "spread": (max(qualities) - min(qualities)) / 2,
                    "lacking": 100 * (mean - plain) / (start - plain),  # percent of the fall of the loss
                    "seeds": len(runs),
                    "bits_per_element": statistics.fmean(run["bits_per_element"] for run in runs.values()),
                }
            )
        with atomic_write(results / f"losses-{name}.json") as draft:
            draft.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def draw(results: Path, picture: Path) -> bool:
    """Draw the picture of the README, if the rows that it shows are there; return True if they are.

    One bar is the time of a step; beside it stands the loss after equal steps.
    """
    files = {name: results / f"{name}.json" for name in (*PANELS, "losses-chargpt-adamw")}
    if not all(path.exists() for path in files.values()):
        return False
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    recorded = json.loads(files["losses-chargpt-adamw"].read_text())["rows"]
    losses = {row["method"]: row["quality"] for row in recorded}
    runs = {title: load(files[name]) for name, title in PANELS.items()}
    with rc_context({"svg.hashsalt": "step-times", "svg.fonttype": "none", "font.size": 10}):
        drawing = Figure(figsize=(9, 3.4), layout="constrained", facecolor="white")
        for axes, (title, run) in zip(drawing.subplots(1, len(runs), sharey=True), runs.items(), strict=True):
            rows = {row["name"]: row for row in run.rows if row["name"] in PICTURED}
            names = [name for name in PICTURED if name in rows]
            seconds = [rows[name]["step_ms"] / 1e3 for name in names]
            colors = ["#818B98" if rows[name]["kind"] == "baseline" else "#0072B2" for name in names]
            bars = axes.barh(range(len(names)), seconds, color=colors)
            axes.bar_label(bars, [_label(name, rows[name], losses) for name in names], padding=4)
            axes.set_yticks(range(len(names)), [PICTURED[name][0] for name in names])
            axes.set_xlim(0, 1.9 * max(seconds))
            axes.set_title(title, loc="left", fontsize=11)
            axes.set_xlabel("seconds of a training step")
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.tick_params(left=False)
        axes.invert_yaxis()
        drawing.supxlabel(_about(next(iter(runs.values()))), fontsize=8, color="#59636E")
        picture.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(picture, format="svg", metadata={"Date": None})
    return True


def draw_outer(results: Path, picture: Path) -> bool:
    """Draw loss against bytes and against seconds over 100 Mbit/s, if these rows are there; return True if they are."""
    path = results / "train-outer-seconds.json"
    if not path.exists():
        return False
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = [row for row in load(path).rows if row["method"] in OUTER]
    with rc_context({"svg.hashsalt": "outer", "svg.fonttype": "none", "font.size": 10}):
        drawing = Figure(figsize=(9, 3.8), layout="constrained", facecolor="white")
        by_bytes, by_seconds = drawing.subplots(1, 2, sharey=True)
        for row in rows:
            _, sent, seconds, losses = zip(*row["curve"][1:], strict=True)
            first = next(i for i, count in enumerate(sent) if count)  # before it no round was sent
            by_bytes.plot([count / 1e6 for count in sent[first:]], losses[first:], label=_short(row["method"]))
            by_seconds.plot(seconds, losses)
        by_bytes.set_xscale("log")
        by_bytes.set_xlabel("megabytes that a rank has sent")
        by_seconds.set_xlabel("seconds of training over 100 Mbit/s")
        by_bytes.set_ylabel("held-out loss")
        by_bytes.set_ylim(1.15, 3.0)
        for axes in (by_bytes, by_seconds):
            axes.spines[["top", "right"]].set_visible(False)
        drawing.legend(loc="outside lower center", ncols=3, frameon=False)
        picture.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(picture, format="svg", metadata={"Date": None})
    return True


def _short(method: str) -> str:
    """Return a method's label in a legend.

    >>> _short('diloco(period=15, compressor="block(bits=4)", optimizer="nesterov(lr=0.7, momentum=0.6)")')
    'Nesterov each 15 steps, block(bits=4)'
    >>> _short("diloco(period=15, optimizer=none)"), _short("sparseloco(period=15)"), _short("none")
    ('average each 15 steps', 'sparseloco(period=15)', 'none')
    """
    found = re.fullmatch(r'diloco\(period=(\d+)(?:, compressor="(.*?)")?, optimizer="?(\w+).*', method)
    if found is None:
        return method
    period, compressor, optimizer = found.groups()
    kind = "average" if optimizer == "none" else optimizer.capitalize()
    return f"{kind} each {period} steps" + (f", {compressor}" if compressor else "")


def _label(name: str, row: dict, losses: dict[str, float]) -> str:
    """Return the text beside a bar: seconds, and the loss after equal steps, if it was measured."""
    loss = losses.get(PICTURED[name][1] or "", math.nan)
    seconds = row["step_ms"] / 1e3
    return f"{seconds:.2f} s" + ("" if math.isnan(loss) else f", loss {loss:.2f}")


def _about(run: Results) -> str:
    """Return what was measured where and when, in one line."""
    settings, machine = run.settings, run.machine
    ranks = f"{settings['ranks'][0]} ranks" if settings.get("ranks") else ""
    return (
        f"{settings['model']}, {settings['parameters'] / 1e6:.1f} M parameters, {ranks} on {machine['cores']} cores of "
        f"{machine['processor']}, {run.when[:10]}; loss: a character GPT after equal steps with AdamW"
    )


def main() -> int:
    """Measure the parts that are not there, and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="parts whose names begin so (default: all)")
    parser.add_argument("--list", action="store_true", help="show parts and commands, and measure nothing")
    parser.add_argument("--draw", action="store_true", help="draw the picture, and measure nothing")
    parser.add_argument("--again", action="store_true", help="measure what is there, too")
    parser.add_argument("--smallest", action="store_true", help="few methods, small models: to see that all runs")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where rows are kept (default: %(default)s)")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="(default: %(default)s)")
    given = parser.parse_args()
    if given.smallest and given.folder == RESULTS:
        parser.error("--smallest is for another --folder: its rows are not to be quoted")
    chosen = [part for part in parts(given.smallest) if part.name.startswith(given.only)]
    if not chosen:
        parser.error(f"no part begins with {given.only!r}; --list shows them")
    for part in [] if given.draw else chosen:
        there = (given.folder / f"{part.name}.json").exists()
        print(f"{part.name}{' (is there)' if there else ''}", flush=True)
        if given.list:
            print(f"    {shlex.join(command(part, Path('out/readme') / part.name))}")
        elif given.again or not there:
            code = measure(part, given.folder)
            if code:
                return code
    if not given.list:
        write_losses(given.folder)
        drawn = draw(given.folder, given.picture)
        draw_outer(given.folder, given.picture.with_name("outer.svg"))
        needed = ", ".join([*PANELS, *LOSSES["chargpt-adamw"]])
        print(f"Drew {given.picture}." if drawn else f"The picture needs {needed}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
