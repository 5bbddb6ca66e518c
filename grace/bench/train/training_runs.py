"""Training runs of several methods over real ranks: the rows of ``grace bench train``."""

import itertools
import statistics
from collections.abc import Callable

from grace.bench.common.quality import shortfall
from grace.bench.common.results import Results, Row
from grace.bench.ranks.rank_program import Event
from grace.bench.ranks.scenario import run_scenario
from grace.bench.train.train_settings import TrainSettings

MEANS = (
    "quality", "sent_bytes_per_step", "bits_per_element", "codec_ms", "step_ms", "samples_per_s", "train_seconds",
)  # fmt: skip
"""Keys whose values are averaged over seeds."""


def run(settings: TrainSettings, results: Results, watch: Callable[[float | None, Event], None]) -> None:
    """Train with every method and seed over ranks on this machine; each run is added to the results when it ends.

    ``watch`` gets a bandwidth and each event of its ranks, see :mod:`grace.bench.train.train_rank`.

    Raises:
        LinkError: a network cannot be emulated here.
        WorkerError: a rank failed.
    """
    for rate in settings.bandwidths:
        _train(settings, results, rate, watch)


def _train(
    settings: TrainSettings,
    results: Results,
    rate: float | None,
    watch: Callable[[float | None, Event], None],
) -> None:
    before, runs = list(results.rows), list[Row]()

    def receive(event: Event) -> None:
        if "run" in event:
            runs.append(event["run"])
            results.settings["parameters"] = event["run"]["parameters"]
            results.rows = [*before, *summarize(runs, settings, rate)]
        watch(rate, event)

    run_scenario(["-m", "grace.bench.train.train_rank"], settings, [], settings.ranks, rate, receive)


def summarize(runs: list[Row], settings: TrainSettings, rate: float | None = None) -> list[Row]:
    """Return a row for each method and optimizer with runs over this bandwidth: means, beside those of ``none``."""
    about = settings.about()
    rows = []
    for optimizer, method in itertools.product(settings.optimizers, settings.methods):
        own = [run for run in runs if (run["method"], run["optimizer"]) == (method, optimizer)]
        if own:
            qualities = [run["quality"] for run in own]
            facts = {"bandwidth": rate, "ranks": settings.ranks, "lr": own[0]["lr"]}
            compared = dict.fromkeys(("shortfall", "relative_volume", "relative_throughput"))
            means = {key: statistics.fmean(run[key] for run in own) for key in MEANS}
            spread = {"quality_spread": (max(qualities) - min(qualities)) / 2}
            reached = _to_target(own, about["target"], about["higher_is_better"])
            curve = _mean_curve([run["curve"] for run in own])
            row = {"method": method, "optimizer": optimizer, **facts, **means, **spread, **compared, **reached}
            rows.append({**row, "curve": curve, "runs": own})
    plains = {row["optimizer"]: row for row in rows if row["method"] == "none"}
    for row in rows:
        plain = plains.get(row["optimizer"])
        if plain is not None:
            row["shortfall"] = shortfall(about, row["quality"], plain["quality"], plain["curve"][0][-1])
            row["relative_throughput"] = row["samples_per_s"] / plain["samples_per_s"]
            if plain["sent_bytes_per_step"]:
                row["relative_volume"] = row["sent_bytes_per_step"] / plain["sent_bytes_per_step"]
    return rows


def _mean_curve(curves: list[list[list[float]]]) -> list[list[float]]:
    points = zip(*curves, strict=True)
    return [[statistics.fmean(values) for values in zip(*point, strict=True)] for point in points]


def _to_target(runs: list[Row], target: float | None, higher_is_better: bool) -> Row:
    """Return the epochs, bytes and seconds until the target was first reached: means over the runs, if all reached it.

    >>> run = {"curve": [[0.5, 10, 1.0, 0.8], [1, 20, 2.0, 0.9], [2, 40, 4.0, 0.7]]}
    >>> _to_target([run], 0.85, True)
    {'reached': 1, 'epochs_to_target': 1.0, 'bytes_to_target': 20.0, 'seconds_to_target': 2.0}
    >>> _to_target([run], 0.95, True)
    {'reached': 0, 'epochs_to_target': None, 'bytes_to_target': None, 'seconds_to_target': None}
    """
    sign = 1 if higher_is_better else -1
    firsts = []
    for run in runs if target is not None else []:
        good = [point for point in run["curve"] if sign * (point[-1] - target) >= 0]
        firsts += good[:1]
    all_did = bool(runs) and len(firsts) == len(runs)
    names = ("epochs_to_target", "bytes_to_target", "seconds_to_target")
    means = {name: statistics.fmean(p[i] for p in firsts) if all_did else None for i, name in enumerate(names)}
    return {"reached": len(firsts), **means}
