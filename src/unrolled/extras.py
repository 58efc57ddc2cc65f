"""The libraries that only some parts need, in groups that `pip` calls extras."""


def how_to_install(extra: str) -> str:
    """Return the end of a message that a library is missing: the command that installs the extra it is in."""
    return f"run pip install '.[{extra}]' in a clone of unrolled"
