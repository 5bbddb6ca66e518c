"""An Open MPI from a wheel knows where it is only if its own mpirun started the process, and else ends it in MPI_Init.

Import this before mpi4py is imported, by whomever: it tells Open MPI.
"""

import os
import sys
from pathlib import Path

if Path(sys.prefix, "lib", "libmpi.so.40").exists():
    os.environ.setdefault("OPAL_PREFIX", sys.prefix)
