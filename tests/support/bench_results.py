"""Results of all kinds of benchmarks, as they could have been measured: the same in every run."""

import base64
import random
import re
from typing import Any

from grace.bench.common.results import Results
from grace.bench.common.text import scenario

KINDS = ("kernels", "step", "train")
"""Kinds of results whose rows are methods."""

# method: (bits per element, codec ms, vNMSE, loss of accuracy, encode copies, decode copies, memory copies)
METHODS = {
    "none": (32.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    "cast": (16.0, 9.0, 4e-8, 0.0, 0.7, 0.6, 0.0),
    "dynamic8": (8.0, 31.0, 4e-4, 0.001, 2.4, 1.4, 0.0),
    "natural": (8.0, 28.0, 0.125, 0.003, 2.2, 1.0, 0.0),
    "qsgd": (8.063, 60.0, 2e-3, 0.002, 5.0, 1.6, 0.0),
    "terngrad": (2.0, 33.0, 4.1, 0.011, 3.1, 0.9, 0.0),
    "signsgd": (1.0, 22.0, 1.9, 0.03, 1.0, 0.8, 0.0),
    "efsignsgd": (1.0, 41.0, 0.36, 0.006, 1.2, 0.8, 2.0),
    "onebit": (1.0, 43.0, 0.36, 0.007, 1.5, 0.9, 2.0),
    "topk(ratio=0.01)": (0.48, 120.0, 0.93, 0.012, 9.0, 0.4, 2.1),
    "randomk(ratio=0.01)": (0.32, 18.0, 0.99, 0.035, 0.3, 0.3, 2.1),
    "powersgd(rank=4)": (0.256, 35.0, 0.81, 0.004, 2.0, 1.1, 2.2),
    "topk(ratio=0.01) | qsgd(levels=127)": (0.25, 126.0, 0.93, 0.014, 9.4, 0.5, 2.1),
}
# name: (bits per element, ms that the codec hides in the exposed time)
BASELINES = {"DDP": (32.0, 0.0), "DDP fp16 hook": (16.0, 10.0), "DDP PowerSGD hook (rank 4)": (0.256, 38.0)}
BANDWIDTHS = (1e8, 1e9, 1e10)
PARAMETERS = 25_557_032
COMPUTE_MS = 210.0
MACHINE = {
    "platform": "Linux-6.8.0-x86_64-with-glibc2.36",
    "processor": "A processor at 2.60GHz",
    "cores": 16,
    "memory_bytes": 64 << 30,
    "gpus": [],
}
VERSIONS = {"python": "3.11.9", "grace": "0.5.0", "torch": "2.13.0", "numpy": "2.2.1"}


def pictures(page: str) -> list[str]:
    """The SVG pictures inside a report."""
    return [base64.b64decode(data).decode() for data in re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', page)]


def results(kind: str, **changed: Any) -> Results:
    """Whole ones of a kind; arguments are those of :func:`kernels`, :func:`step` or :func:`train`."""
    return {"kernels": kernels, "step": step, "train": train}[kind](**changed)


def kernels(methods: Any = METHODS, tensors: Any = ("gaussian", "heavy-tailed", "captured"), slower: float = 1.0):
    """Every method on every tensor; ``slower`` multiplies the times of encoding."""
    rng, copy_ms, elements = random.Random(0), 4.2, 25_000_000
    rows = []
    for method in methods:
        bits, _, vnmse, _, encode, decode, memory = METHODS[method]
        for i, tensor in enumerate(tensors):
            noise = rng.uniform(0.95, 1.05)
            times = {"encode": encode * noise * slower, "decode": decode * noise, "memory": memory * noise}
            rows.append(
                {
                    "method": method,
                    "tensor": tensor,
                    "elements": elements,
                    "device": "cpu",
                    "copy_ms": copy_ms,
                    **{f"{key}_ms": value * copy_ms for key, value in times.items()},
                    **{f"{key}_copies": value for key, value in times.items()},
                    "encode_gbps": 4e-6 * elements / (times["encode"] * copy_ms) if times["encode"] else None,
                    "decode_gbps": 4e-6 * elements / (times["decode"] * copy_ms) if times["decode"] else None,
                    "bits_per_element": bits,
                    "vnmse": vnmse * (1, 1.6, 0.5)[i % 3] if vnmse < 0.2 else vnmse * (1, 0.9, 0.6)[i % 3],
                    "aggregate_vnmse": vnmse / 4,
                    "bias": 0.001,
                    "peak_extra_bytes": 2 * elements,
                }
            )
    settings = {"elements": elements, "device": "cpu", "threads": 4, "repeats": 20, "copy_gbps": 23.8}
    return _whole("kernels", settings, rows)


def step(methods: Any = METHODS, bandwidths: Any = BANDWIDTHS, ranks: Any = (2, 4), slower: Any = None) -> Results:
    """Baselines, the bound and the methods; ``slower`` says by name what to multiply times with."""
    rng, rows, slower, verdict = random.Random(1), [], slower or {}, {}
    for count in ranks:
        for rate in bandwidths:
            some: list[dict[str, Any]] = []
            for name, (bits, hidden) in BASELINES.items():
                some.append(_step_row(rng, name, "baseline", bits, hidden, count, rate, slower.get(name, 1)))
            some.append(_step_row(rng, "no communication", "bound", 0, 0, count, rate, 1))
            for name in methods:
                bits, codec = METHODS[name][:2]
                some.append(_step_row(rng, name, "grace", bits, codec, count, rate, slower.get(name, 1)))
            plain = some[0]["step_ms"]
            for row in some:
                row["speedup"] = plain / row["step_ms"]
                row["pays"] = row["step_high_ms"] < some[0]["step_low_ms"] if row["kind"] == "grace" else None
            rows += some
            pays = [row["name"] for row in some if row["pays"]]
            verdict[scenario(count, rate)] = (
                f"{len(pays)} of {len(methods)} methods pay: {', '.join(pays[:3])} are the fastest."
                if pays
                else "no method pays: encoding takes longer than the bytes that it saves."
            )
    settings = {
        "model": "resnet50",
        "parameters": PARAMETERS,
        "engine": "torch",
        "batch": 32,
        "optimizer": "SGD",
        "rounds": 3,
        "threads": 4,
        "device": "cpu",
        "ranks": list(ranks),
        "bandwidths": list(bandwidths),
        "verdict": verdict,
    }
    return _whole("step", settings, rows)


def _step_row(rng, name, kind, bits, codec, ranks, rate, slower) -> dict[str, Any]:
    sent = PARAMETERS * bits / 8 * 2 * (ranks - 1) / ranks
    wire = 8e3 * sent / rate if rate else None
    exposed = (max(0.0, (wire or 5) - 120) + 4) if bits else 0.0
    compute = COMPUTE_MS * rng.uniform(0.99, 1.01)
    grace = kind == "grace"
    total = (compute + codec + exposed) * slower
    spread = total * rng.uniform(0.005, 0.03)
    return {
        "name": name,
        "kind": kind,
        "method": name if grace else None,
        "engine": "torch",
        "ranks": ranks,
        "bandwidth": rate,
        "step_ms": total,
        "step_low_ms": total - spread,
        "step_high_ms": total + 1.3 * spread,
        "compute_ms": compute,
        "codec_ms": codec if grace else None,
        "exposed_ms": total - compute - (codec if grace else 0),
        "sent_bytes": round(sent),
        "received_bytes": round(sent),
        "wire_ms": wire,
        "samples_per_s": 32e3 * ranks / total,
        "speedup": 1.0,
        "steps": 60,
        "pays": None,
        "times_ms": [total - spread, total, total + spread],
    }


def train(methods: Any = METHODS, bandwidths: Any = (1e9,), seeds: Any = (0, 1, 2), worse: Any = None) -> Results:
    """Accuracy after 20 epochs; ``worse`` says by method what to take from it."""
    rng, epochs, ranks, rows, worse = random.Random(2), 20, 4, [], worse or {}
    for rate in bandwidths:
        for method in methods:
            bits, codec, _, lost = METHODS[method][:4]
            sent = PARAMETERS * bits / 8 * 1.5
            step_ms = COMPUTE_MS + codec + (max(4.0, 8e3 * sent / rate - 120) if rate else 6)
            final = 0.962 - lost - worse.get(method, 0)
            curve = [
                [e, e * 100 * sent, e * 0.1 * step_ms, final - 0.6 * 0.72**e + rng.uniform(-1, 1) * 0.002]
                for e in range(1, epochs + 1)
            ]
            reached = next((point for point in curve if point[3] >= 0.94), None)
            rows.append(
                {
                    "method": method,
                    "optimizer": "sgd",
                    "bandwidth": rate,
                    "ranks": ranks,
                    "lr": 0.1,
                    "quality": curve[-1][3],
                    "quality_spread": 0.002 if len(seeds) > 1 else 0.0,
                    "sent_bytes_per_step": sent,
                    "bits_per_element": bits,
                    "codec_ms": codec,
                    "step_ms": step_ms,
                    "samples_per_s": 64e3 / step_ms,
                    "train_seconds": curve[-1][2],
                    "reached": len(seeds) if reached else 0,
                    "seconds_to_target": reached and reached[2],
                    "curve": curve,
                    "runs": [{"seed": seed, "quality": curve[-1][3], "curve": curve} for seed in seeds],
                }
            )
        plain = [row for row in rows if row["bandwidth"] == rate]
        for row in plain:
            has = plain[0]["method"] == "none"
            row["shortfall"] = (plain[0]["quality"] - row["quality"]) / 0.86 if has else None
    settings = {
        "task": "digits",
        "about": "scikit-learn's digits",
        "metric": "accuracy",
        "unit": "%",
        "scale": 100.0,
        "higher_is_better": True,
        "target": 0.94,
        "ranks": ranks,
        "epochs": epochs,
        "seeds": list(seeds),
        "framework": "torch",
        "parameters": PARAMETERS,
    }
    return _whole("train", settings, rows)


def _whole(kind: str, settings: dict[str, Any], rows: list[dict[str, Any]]) -> Results:
    return Results(
        kind,
        settings,
        rows,
        command=f"grace bench {kind}",
        complete=True,
        when="2026-01-02T03:04:05Z",
        seconds=1234.5,
        machine=dict(MACHINE),
        versions=dict(VERSIONS),
    )
