"""tools/on_device.py in Triton's interpreter, with all parts in this one process, which imports everything once."""

import multiprocessing
import sys
from types import SimpleNamespace

from tools import on_device
from tools.device import driver, worker


class Here(driver.Worker):
    """A worker that has ended when it has started."""

    def _start(self) -> None:
        part = self.part
        worker.main(part.run, str(self.folder), part.name, str(self.number), str(part.workers), str(part.limit))
        self.process = SimpleNamespace(poll=lambda: 0, stdin=None)


if __name__ == "__main__":
    multiprocessing.set_executable(sys.executable)  # ranks that it spawns are forks, as it is
    driver.Worker = Here
    sys.exit(on_device.main())
