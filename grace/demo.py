"""``grace demo``."""


def demo() -> None:
    """x"""
