"""`make fuzz`: the property tests with new examples, round after round, until the time is over.

Each round has a seed, which is printed: ``--seed`` runs it again. It ends with the first failure, and says how many
examples each property was tried with.
"""

import argparse
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
TESTS = [HERE / "fuzz", HERE / "exchange" / "test_extremes.py"]


def counts(output: str) -> Counter[str]:
    """Examples per property, of what Hypothesis says."""
    found: Counter[str] = Counter()
    test = ""
    for line in output.splitlines():
        if re.match(r"\S+::\S+:$", line):
            test = line[:-1].partition("::")[2]
        number = re.search(r"(\d+) passing(?: examples)?, (\d+) failing", line)
        if number and test:
            found[test] += int(number[1]) + int(number[2])
    return found


def main() -> int:
    """Run rounds; the exit code is pytest's of the last one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="of the only round")
    parser.add_argument("-k", default="", help="which properties, as for pytest")
    options = parser.parse_args()
    end, tried, code, rounds = time.monotonic() + 60 * options.minutes, Counter[str](), 0, 0
    while code == 0 and (not rounds or (options.seed is None and time.monotonic() < end)):
        seed, rounds = options.seed if options.seed is not None else random.randrange(2**32), rounds + 1
        print(f"round {rounds}: seed {seed}", flush=True)
        command = [sys.executable, "-m", "pytest", *map(str, TESTS), "-x", "-k", options.k, "-p", "no:cacheprovider"]
        command += [f"--hypothesis-seed={seed}", "--hypothesis-show-statistics", "--timeout=3600"]
        done = subprocess.run(command, env={**os.environ, "GRACE_FUZZ": "1"}, capture_output=True, text=True)
        code = done.returncode
        tried += counts(done.stdout)
        if code:
            print(done.stdout, done.stderr, sep="\n")
    for test, number in sorted(tried.items()):
        print(f"{number:9,}  {test}")
    print(f"{sum(tried.values()):,} examples of {len(tried)} properties in {rounds} rounds; exit code {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
