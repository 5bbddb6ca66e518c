"""A process of one part: ``python -m tools.device.worker RUN FOLDER NAME NUMBER COUNT LIMIT``."""

import json
import sys
from pathlib import Path

from grace.bench.common.user_functions import load_function
from tools.device import place
from tools.device.events import Log


def main(run: str, folder: str, name: str, number: str, count: str, limit: str) -> None:
    """Run this process's share of a part."""
    place.prepare()
    settings = json.loads(Path(folder, "settings.json").read_text())
    file = Path(folder, "events", f"{name}.{number}.jsonl")
    load_function(run, "part", [])(Log(file, int(number), int(count), float(limit), settings))


if __name__ == "__main__":
    main(*sys.argv[1:])
