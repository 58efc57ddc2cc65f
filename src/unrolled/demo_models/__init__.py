"""Two small trained models that come with the library: characters of Shakespeare, and handwritten digits.

    from unrolled import decode, demo_models

    plan = decode.load(demo_models.path("text"))

Each is a folder that `unrolled quantize` wrote, with weights in int8. `README.md` beside this file has the
commands that trained them, their data and their losses.
"""

from pathlib import Path
from typing import Literal, get_args

Name = Literal["digits", "text"]
NAMES: tuple[Name, ...] = get_args(Name)


def path(name: Name) -> Path:
    """Return the folder of a model.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in NAMES:
        raise ValueError(f"name is {name!r}, but must be one of {', '.join(NAMES)}")
    return Path(__file__).with_name(name)
