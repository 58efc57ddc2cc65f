"""Parsing of `--lengths`."""


def parse_lengths(text: str, least: int = 1) -> tuple[int, ...]:
    """Parse a text such as "256,1024" into its distinct lengths, in ascending order.

    Raises:
        ValueError: the text has another format, fewer than `least` distinct lengths, or a length below 1 or
            of 2^63 or more.
    """
    try:
        found = tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        found = ()
    if len(found) < least or found[0] < 1:
        count = "two or more positive integers" if least == 2 else "positive integers"
        raise ValueError(f"--lengths is {text!r}, but must be {count} separated by commas, as in 256,1024")
    if found[-1] >= 2**63:
        raise ValueError(f"--lengths is {text!r}, but must be below 2^63")
    return found
