"""The folder of what Grace keeps for a user from run to run."""

import os
from pathlib import Path


def user_cache() -> Path:
    """Return the folder of Grace's files in the user's cache; one that cannot be made where the user has no home.

    >>> user_cache().name
    'grace'
    """
    try:
        home = Path.home()
    except RuntimeError:  # a container's user whom nobody has named
        home = Path(os.devnull)
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache", "grace")
