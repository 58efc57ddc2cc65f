"""Optional dependencies, in groups that `pip` calls extras."""


def how_to_install(extra: str) -> str:
    """Return the end of an error message: the command that installs an extra."""
    return f"run pip install '.[{extra}]' in a clone of unrolled"
