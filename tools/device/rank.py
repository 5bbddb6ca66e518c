"""One rank of a whole step on the one GPU: ``grace bench step``'s, over gloo, since NCCL takes no two ranks on one.

Usage: python -m tools.device.rank FOLDER ENGINE
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from grace.bench.ranks.rank_program import append_line
from grace.bench.step import step_rank
from tools.device import place


def main(folder: str, engine: str) -> None:
    """Join the others, measure, and tell what the first rank's memory came to."""
    place.prepare()
    first = os.environ["RANK"] == "0"
    if os.environ["WORLD_SIZE"] != "1":
        dist.init_process_group("gloo")
    step_rank.main(folder, engine)
    if first and torch.cuda.is_available():
        append_line(Path(folder, "events.jsonl"), {"scenario": {"peak_bytes": torch.cuda.max_memory_allocated()}})


if __name__ == "__main__":
    main(*sys.argv[1:])
