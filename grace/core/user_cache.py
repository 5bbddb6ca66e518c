"""The folder of the files that Grace keeps for a user from run to run."""

import os
from pathlib import Path


def user_cache() -> Path:
    """Return the folder of Grace's files in the user's cache; a folder that cannot be made if the user has no home.

    >>> user_cache().name
    'grace'
    """
    try:
        home = Path.home()
    except RuntimeError:  # a container's user may have a number, but no name and no home
        home = Path(os.devnull)
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache", "grace")
