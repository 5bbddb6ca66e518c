"""Draw training scripts from seeds and check each, for as long as one likes: `make soak MINUTES=30`.

Prints every seed that fails, and what is wrong; `python -m tests.soak --seed N` runs it again. Ends with 1 if any did.
"""

import argparse
import sys
import time

from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.support.pool import RankFailure
from tests.support.pools import launched, stop_all
from tests.support.scenarios import compared, drawn

ENGINES = ("gloo", "mpirun-mpi", "horovodrun-gloo", "horovodrun-mpi", "mpirun-horovod")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to go on (10)")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--start", type=int, default=int(time.time()) % 10**8, help="first seed (by the clock)")
    parser.add_argument("--ranks", type=int, default=2, help="how many processes (2)")
    parser.add_argument("--engine", choices=ENGINES, default="gloo", help="what moves bytes (gloo)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds after which a script hangs (120)")
    given = parser.parse_args()
    seed, failed, deadline = given.start if given.seed is None else given.seed, 0, time.time() + 60 * given.minutes
    columns = (TextColumn("seed {task.fields[seed]}"), MofNCompleteColumn(), TextColumn("{task.fields[failed]} failed"))
    with Progress(*columns, TimeElapsedColumn()) as progress:
        bar = progress.add_task("", total=None, seed=seed, failed=0)
        while True:
            progress.update(bar, seed=seed, failed=failed)
            try:
                wrong = set(launched(given.engine, given.ranks).run(compared, seed, timeout=given.timeout)) - {""}
            except RankFailure as failure:
                wrong = {f"{failure}\n{drawn(seed)}"}
            if wrong:
                failed += 1
                progress.console.print(f"seed {seed}", *sorted(wrong), sep="\n", markup=False)
            progress.advance(bar)
            if given.seed is not None or time.time() > deadline:
                break
            seed += 1
    stop_all()
    print(f"{failed} failed; the last seed was {seed}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
