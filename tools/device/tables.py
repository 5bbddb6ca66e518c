"""The page that is written: goals and parts, a table of figures for each part, and what failed."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from grace.bench.common.text import digits, of_bytes

COPY = 0.75
"""Share of a copy's bandwidth that every codec of whole buckets is to reach at the first size."""
SHOWN = 12
"""Lines of a traceback."""
PARTS = ("encode", "memory", "decode", "exchange")
Row = dict[str, Any]


def page(report: Row) -> str:
    """Return the whole report in Markdown."""
    found = {part["name"]: part for part in report["parts"]}
    lines = [f"## On a GPU: {card(found)}", "", f"    {report['command']}", ""]
    lines += [f"{report['when']}, {report['seconds']:.0f} s, {ENDED[report['ended']]}.", ""]
    lines += table(["goal", "", "by"], [[name, *told] for name, told in report["goals"].items()])
    lines += table(
        ["part", "state", "items", "seconds"],
        [[part["name"], part["state"], counted(part), f"{part.get('seconds', 0):.0f}"] for part in report["parts"]],
    )
    for name, write in FIGURES.items():
        rows = told(found[name]) if name in found else []
        if rows:
            about = found[name]["about"]
            lines += [f"### {about[0].upper()}{about[1:]}", "", *write(rows)]
    for part in report["parts"]:
        alike: dict[str, list[Row]] = {}
        for item in failed(part):
            alike.setdefault(last(item.get("error", "")), []).append(item)
        for items in alike.values():
            said = items[0].get("error", "").strip().splitlines()[-SHOWN:]
            names = "; ".join(item["item"] for item in items)
            lines += [f"### {part['name']} failed: {names}", "", *(f"    {line}" for line in said), ""]
    return "\n".join(lines)


ENDED = {"whole": "to the end", "interrupted": "interrupted", "cut off": "not to its end (yet)"}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines, and an empty one.

    >>> print(*table(["a", "b"], [["1", "x | y"]]), sep="\\n")
    | a | b |
    | --- | --- |
    | 1 | x \\| y |
    <BLANKLINE>
    """
    cells = [list(head), ["---"] * len(head), *([" ".join(c.replace("|", "\\|").split()) for c in row] for row in rows)]
    return [*(f"| {' | '.join(row)} |" for row in cells), ""]


def done(part: Row) -> list[Row]:
    """Return the items that ended well."""
    return [item for item in part["items"] if item["state"] == "done"]


def told(part: Row) -> list[Row]:
    """Return the items that ended well, and those that have measured something before they failed."""
    return [item for item in part["items"] if item["state"] == "done" or item.get("rows")]


def failed(part: Row) -> list[Row]:
    """Return the items that failed, or did not end."""
    return [item for item in part["items"] if item["state"] == "failed"]


def counted(part: Row) -> str:
    """Return the numbers of a part's items that ended well, failed and were skipped.

    >>> counted({"items": [{"state": "done"}, {"state": "failed"}], "planned": 3})
    '1 of 3 done, 1 failed'
    """
    found = Counter(item["state"] for item in part["items"])
    others = [f", {found[state]} {state}" for state in ("failed", "skipped") if found[state]]
    return f"{found['done']} of {part.get('planned', 0)} done{''.join(others)}"


FACTS = ("gpu_driver", "gpu_runtime", "nccl", "torch", "triton", "python")


def card(found: dict[str, Row]) -> str:
    """Return the name of the GPU and the versions that matter."""
    facts = next(iter(found.get("versions", {}).get("items", [])), {})
    known = [f"{name} {facts[name]}" for name in FACTS if name in facts]
    return ", ".join([facts.get("gpu", "Triton's interpreter" if known else "not known yet"), *known])


def goals(report: Row) -> dict[str, tuple[str, str]]:
    """Return for each goal "met", "missed" or "not known", and the reason."""
    found = {part["name"]: part for part in report["parts"]}

    def judged(name: str, missed: Callable[[Row], str], look: Callable[[Row], bool] = bool) -> tuple[str, str]:
        part = found.get(name, {"items": [], "state": ""})
        rows = [row for row in done(part) if look(row)]
        bad = [f"{row['item']}: {why}" for row in rows if (why := missed(row))]
        bad += [f"{row['item']} failed" for row in failed(part)]
        whole = part["state"] == "done" and bool(rows)
        more = f"; and {len(bad) - 8} more" if len(bad) > 8 else ""
        return ("missed" if bad else "met" if whole else "not known"), "; ".join(bad[:8]) + more or counted(part)

    size = report["settings"].get("sizes", [0])[0]
    return {
        "kernels have the reference's bits": judged("bits", lambda row: ""),
        "the tests of a GPU pass": judged("tests", lambda row: ""),
        f"codecs of buckets reach {COPY:.0%} of a copy's bandwidth at {size:,} elements": judged(
            "bandwidth", slow, lambda row: row["at_once"] and row["size"] == size
        ),
        "the host waits at most once in a step, at its end": judged("waits", waiting),
        "a captured step is the eager one, bit for bit": judged("captured", unlike),
        "the host never waits in a captured step": judged("captured", lambda row: last(row["said"])),
    }


def slow(row: Row) -> str:
    """Return the parts of a method that are below the goal, with their shares."""
    found = {part: row.get(f"{part}_fraction", COPY) for part in PARTS}
    return ", ".join(f"{part} {share:.0%}" for part, share in found.items() if share < COPY)


def waiting(row: Row) -> str:
    """Return how often the host waits in a step, if that is more than once. Once is right: the headers of all buckets
    are read together, before weights are updated."""
    waits = max(row["waits_per_step"], row["reads_per_step"]) > 1
    return last(row["said"]) or (f"{row['waits_per_step']:g} waits, {row['reads_per_step']:g} reads" if waits else "")


def unlike(row: Row) -> str:
    """Return the fault of a captured step; empty if it is right."""
    return "" if row["equal"] and row["moved"] else "other numbers" if row["moved"] else "nothing was trained"


def last(said: str) -> str:
    """Return the last line of a traceback."""
    return said.strip().splitlines()[-1] if said.strip() else ""


def percent(value: float | None) -> str:
    """A fraction; what is below the goal is marked.

    >>> percent(0.8), percent(0.5), percent(None)
    ('80 %', '**50 %**', '')
    """
    said = "" if value is None else f"{100 * value:.0f} %"
    return said if value is None or value >= COPY else f"**{said}**"


def bandwidths(rows: list[Row]) -> list[str]:
    """Return a table of shares of a copy's bandwidth in the same run: encoding, with residuals, decoding."""
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    by = {(row["method"], row["size"]): row for row in rows}
    head = ["method", "bits", "way", *(f"{size:,}: {', '.join(PARTS)}; ms" for size in sizes)]
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = next(by[method, size] for size in sizes if (method, size) in by)
        cells = [f"`{method}`", digits(own["bits"]), "bucket" if own["at_once"] else "variable"]
        for size in sizes:
            row = by.get((method, size), {})
            times = ", ".join(digits(row.get(f"{part}_ms")) for part in PARTS)
            shares = ", ".join(percent(row.get(f"{part}_fraction")) for part in PARTS)
            cells.append(f"{shares}; {times}{'*' if row['eager'] else ''}" if row else "")
        lines.append(cells)
    fastest = {size: max(row["copy_gbps"] for row in rows if row["size"] == size) for size in sizes}
    speeds = "; ".join(f"{size:,}: {speed:,.0f} GB/s" for size, speed in fastest.items())
    said = (
        f"A copy moves {speeds}. Bold: below {COPY:.0%}. memory: encoding with residuals. decode of a bucket: what an "
    )
    said += "exchange takes beside encoding. *: it waits for the host, and was timed as it runs."
    return [*table(head, lines), said, ""]


def products(row: Row) -> list[str]:
    """Return the cells of PowerSGD's whole exchange beside torch's three products alone."""
    bmm = ", ".join(digits(row[f"{name}_ms"]) for name in ("m_q", "mt_p", "p_qt"))
    return [digits(row["exchange_ms"]), percent(row["exchange_fraction"]), bmm, digits(row["to_bmm"])]


def hosted(row: Row) -> list[str]:
    """Return the cells of one rank's step: calls and milliseconds, and the functions that took the host's time."""
    calls = [
        f"{digits(row[f'{name}_calls'])}: {digits(row[f'{name}_ms'])}" for name in ("launch", "to_device", "to_host")
    ]
    functions = ", ".join(f"`{name}` {digits(ms)}" for name, ms in row["functions"].items())
    return [digits(row["step_ms"]), *calls, functions]


def simple(head: Sequence[str], cells: Callable[[Row], Sequence[str]]) -> Callable[[list[Row]], list[str]]:
    """Return a function that makes a table with a line for each item."""
    return lambda rows: table(head, [[row["item"], *cells(row)] for row in rows])


def steps(rows: list[Row]) -> list[str]:
    """Return a table of whole steps: a line for each method and model. Peaks are of a rank that has a model for each
    method."""
    times = ("step_ms", "codec_ms", "exposed_ms")
    lines = []
    for row in rows:
        for one in row.get("rows", []):
            figures = [*(digits(one[key]) for key in times), of_bytes(one["sent_bytes"]), digits(one["samples_per_s"])]
            lines.append([row["model"], str(row["ranks"]), one["name"], *figures, of_bytes(row.get("peak_bytes"))])
    head = ["model", "ranks", "method", "step ms", "codec ms", "exposed ms", "sent", "samples / s", "peak of all"]
    left_out = {f"{row['model']}, {name}": why for row in rows for name, why in row.get("skipped", {}).items()}
    return [*table(head, lines), *(f"Left out: {name}: {why}\n" for name, why in left_out.items())]


FIGURES: dict[str, Callable[[list[Row]], list[str]]] = {
    "bandwidth": bandwidths,
    "products": simple(
        ["matrices", "exchange ms", "of copy", "torch.bmm: M Q, M^T P, P Q^T ms", "exchange / bmm"], products
    ),
    "waits": simple(
        ["method", "waits a step", "reads a step", "torch says"],
        lambda row: [digits(row["waits_per_step"]), digits(row["reads_per_step"]), last(row["said"])],
    ),
    "captured": simple(
        ["method, engine", "equal", "torch says"],
        lambda row: ["no" if unlike(row) else "yes", last(row["said"])],
    ),
    "host": simple(
        [
            "method",
            "step ms",
            "launches: ms",
            "copies to the device: ms",
            "copies back, waiting: ms",
            "most time in, ms",
        ],
        hosted,
    ),
    "steps": steps,
    "memory": simple(
        ["method", "held", "bytes an element"], lambda row: [of_bytes(row["bytes"]), digits(row["per_element"])]
    ),
    "compiling": simple(["method", "seconds"], lambda row: [digits(row["seconds"])]),
}
