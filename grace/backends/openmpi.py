"""Location of an Open MPI from a wheel, which finds itself only if its own mpirun started the process.

Otherwise it ends the process in MPI_Init. Import this module before mpi4py is imported, by whomever: it sets
OPAL_PREFIX, which tells Open MPI where it is.
"""

import os
import sys
from pathlib import Path

if Path(sys.prefix, "lib", "libmpi.so.40").exists():
    os.environ.setdefault("OPAL_PREFIX", sys.prefix)
