"""Times of kernels, method by method: a row for each, in the units of ``grace bench kernels --device cuda``."""

import contextlib
import functools
import importlib.metadata
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from grace.bench.common import clocks, results
from grace.bench.kernels.fidelity import NAME, sent_bytes
from grace.bench.kernels.gradients import matrix
from grace.bench.kernels.timing import RESIDUAL, Exchanged, extra_bytes, floors, floors_of, fraction, times_ms, works_of
from grace.core.registry import make
from grace.errors import ConfigError
from tools.device import place
from tools.device.events import Log

REPEATS = 1 if place.INTERPRETED else 20
MATRICES = [(1, 4096, 4096), (12, 768, 3072), (48, 1024, 1024)]
"""A large matrix, the wide ones of GPT-2 small, and many."""
RANKS = (1,) if place.INTERPRETED else (1, 4, 8)


def versions(log: Log) -> None:
    """Tell what all the rest is of."""
    for item in log.left(["machine"]):
        with log.item(item) as found:
            if not place.INTERPRETED:
                found |= clocks.device_facts()
                card = torch.cuda.get_device_properties()
                found |= {"gpu_memory_bytes": card.total_memory, "gpu_processors": card.multi_processor_count}
                found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
            found |= {**results.machine(), **results.versions(), "torch": torch.__version__}
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found["transformers"] = importlib.metadata.version("transformers")


@functools.lru_cache(maxsize=1)
def gradient(n: int) -> torch.Tensor:
    """About so many numbers of N(0, 1), as a matrix."""
    return torch.randn(matrix(n), generator=torch.Generator(place.DEVICE).manual_seed(0), device=place.DEVICE)


def exchanged(method: str, xs: list[torch.Tensor]) -> dict[str, Exchanged]:
    """Steps of some gradients, by what is kept between them: "none", "residual", or "own" for what the method itself
    does; as far as they go together. Two steps were made, after which buckets go at once."""
    found, outs = dict[str, Exchanged](), [torch.empty_like(x) for x in xs]
    own = hasattr(make("compressor", method), "recall")
    for kept in ("own",) if own else ("none", "residual", "own"):
        if kept == "own" and found:
            break
        with warnings.catch_warnings(), contextlib.suppress(ConfigError):  # the two do not go together
            warnings.simplefilter("ignore")
            found[kept] = Exchanged(method, None if kept == "own" else kept, xs, outs)
            found[kept](), found[kept]()
    return found


def compiling(log: Log) -> None:
    """Compile what follows needs, by many processes at once; what they find is kept on the disk."""
    x = gradient(log.settings["sizes"][0])
    for method in log.left(log.settings["methods"]):
        with log.item(method):
            for made in exchanged(method, [x]).values():
                made.encode()
            torch.zeros(1, device=place.DEVICE).item()


def bandwidth(log: Log) -> None:
    """Time all methods at each size, the first one's first."""
    each = {f"{method} of {n:,}": (method, n) for n in log.settings["sizes"] for method in log.settings["methods"]}
    for item in log.left(list(each)):
        with log.item(item) as row:
            method, n = each[item]
            row |= {"method": method, "size": n, **measured(method, gradient(n))}


def measured(method: str, x: torch.Tensor) -> dict[str, Any]:
    """A method's times, and what the bytes that it cannot do without are of a copy's; of whole buckets where they go
    at once, and else variable by variable.

    encode is without a memory, memory is encoding with residuals, decode is what an exchange takes beside encoding, and
    exchange is both, with residuals if there are any. Of several rounds there are exchanges only.
    """
    made, compressor, out = exchanged(method, [x]), make("compressor", method), torch.empty_like(x)
    at_once = all(one.at_once for one in made.values())
    works: dict[str, Callable[[], Any]] = {"copy": functools.partial(out.copy_, x)}
    if at_once:
        bits = compressor.wire_bits(tuple(x.shape)) or 8 * sent_bytes(method, x) / x.numel()  # the data's, else
        floor = floors_of(compressor, bits, bits / 32)
        for kept, one in made.items():
            works |= {f"encode {kept}": one.encode, f"exchange {kept}": one}
    else:
        own, communicator = works_of(method, x, None, out)
        payload, _ = communicator.compressor.compress(x, NAME)
        bits = 8 * sum(tensor.nbytes for tensor in payload) / x.numel()
        floor = floors_of(compressor, bits, payload[0].numel() / x.numel())
        works |= {part: own[part] for part in ("encode", "decode", *["memory"] * communicator.stateful)}
    taken, eager = timed(works)
    copy = taken.pop("copy")
    if at_once:
        first, *_, last = [*made, *made]
        floor["exchange"] = floor["encode"] + floor["means"] + RESIDUAL * (last != "none")
        floor["decode"] = floor["means"]
        found = {"exchange": taken[f"exchange {last}"]}
        if compressor.traits.rounds == 1:
            if (beside := taken[f"exchange {first}"] - taken[f"encode {first}"]) > 0:  # else it is lost in noise
                found["decode"] = beside
            found |= {"encode" if kept == "none" else "memory": taken[f"encode {kept}"] for kept in made}
        taken = found
    elif "memory" in taken:
        taken["memory"] += taken["encode"]
    row: dict[str, Any] = {"elements": x.numel(), "at_once": at_once, "bits": bits, "eager": eager}
    row |= {"copy_ms": copy, "copy_gbps": 8 * x.numel() / copy / 1e6}
    for part, ms in taken.items():
        row |= {f"{part}_ms": ms, f"{part}_fraction": fraction(floor[part], x.numel(), ms, copy)}
    return row


def timed(works: dict[str, Callable[[], Any]]) -> tuple[dict[str, float], list[str]]:
    """Median times of functions that take turns, in ms; and which of them wait for the host."""
    clock, eager = place.clock(), list[str]()
    prepared = dict[str, Callable[[], Any]]()
    for name, work in works.items():
        prepared[name], replayed = clock.prepared(work)
        eager += [] if replayed else [name]
    taken = times_ms(prepared, REPEATS, clock)
    prepared.clear()
    if not place.INTERPRETED:
        clock.forget()
    return taken, eager


def products(log: Log) -> None:
    """Time PowerSGD's exchange of alike matrices, and torch's three products of as many."""
    shapes = [(2, 24, 16)] if place.INTERPRETED else MATRICES
    each = {f"{b} x {n} x {m}, rank {r}": (b, n, m, r) for b, n, m in shapes for r in RANKS}
    for item in log.left(list(each)):
        with log.item(item) as row:
            b, n, m, r = each[item]
            x, p, q = (torch.randn(b, *shape, device=place.DEVICE) for shape in ((n, m), (n, r), (m, r)))
            xs, out = list(x), torch.empty_like(x)
            made = Exchanged(f"powersgd(rank={r})", None, xs, list(out))
            made(), made()
            works = {
                "copy": functools.partial(out.copy_, x),
                "exchange": made,
                "m_q": functools.partial(torch.bmm, x, q),
                "mt_p": functools.partial(torch.bmm, x.mT, p),
                "p_qt": functools.partial(torch.bmm, p, q.mT),
            }
            taken, _ = timed(works)
            bmm = sum(taken[name] for name in ("m_q", "mt_p", "p_qt"))
            bits = 32 * r * (n + m) / (n * m)
            of_copy = fraction(floors(bits, reads=2.0)["exchange"], b * n * m, taken["exchange"], taken["copy"])
            row |= {f"{name}_ms": ms for name, ms in taken.items()}
            row |= {"bmm_ms": bmm, "to_bmm": taken["exchange"] / bmm, "exchange_fraction": of_copy}
            row["at_once"] = made.at_once


def memory(log: Log) -> None:
    """Count what two steps of a method hold at once beside a gradient and its mean."""
    x = gradient(log.settings["sizes"][0])
    for method in log.left(log.settings["methods"]):
        with log.item(method) as row:
            held = extra_bytes(method, x)
            row |= {"bytes": held, "per_element": None if held is None else held / math.prod(x.shape)}
