"""What the commands with `--lengths` share."""


def parse_lengths(text: str, least: int = 1) -> tuple[int, ...]:
    """Return the lengths in a text such as "256,1024", ascending, each once; at least `least` of them.

    Raises:
        ValueError: the text is another one.
    """
    try:
        found = tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        found = ()
    if len(found) < least or found[0] < 1:
        count = "two or more positive integers" if least == 2 else "positive integers"
        raise ValueError(f"--lengths is {text!r}, but must be {count} with commas, as in 256,1024")
    return found
