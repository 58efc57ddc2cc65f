"""The structs and enums that the C++ kernels take, read from the C header itself.

The library holds the text of the header that it was compiled from (`native/arguments.h`). This header is the
only declaration of the structs, so what Python writes is what the kernels read. Packing a struct as bytes
takes a fraction of the time of filling a `ctypes.Structure`, which matters where a kernel runs for a few
microseconds.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from struct import Struct, calcsize

_POINTER = "P"  # formats of the module `struct`
_FORMATS = {"int32_t": "i", "int64_t": "q", "float": "f", "double": "d"}


class Layout:
    """The fields of one C struct.

    Attributes:
        fields: the format of each field by its name, in the order of the header.
        format: the format of the whole struct, with nested structs expanded in place.
        pack: takes every field by its name, a nested struct as a tuple, and returns the struct as bytes.
    """

    def __init__(self, fields: Mapping[str, str]):
        self.fields = dict(fields)
        scalars = "".join(fields.values())
        # "0q" adds the padding that aligns what follows to a q: a struct is aligned like its widest scalar.
        align = f"0{max(re.sub('[^a-zA-Z]', '', scalars), key=calcsize)}"
        self.format = align + scalars + align
        # A function whose parameters are the fields, so that Python checks their names as part of the call.
        values = (name if len(kind) == 1 else f"*{name}" for name, kind in fields.items())
        source = f"lambda *, {', '.join(fields)}: pack({', '.join(values)})"
        self.pack: Callable[..., bytes] = eval(source, {"pack": Struct(self.format).pack})


def layouts(header: str) -> dict[str, Layout]:
    """Read the layout of every `struct NAME { TYPE field, *pointer; };` of a header."""
    found: dict[str, Layout] = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", code(header), re.DOTALL):
        found[name] = Layout(
            {field: kind for declaration in body.split(";") for field, kind in _fields(declaration, found)}
        )
    return found


def enums(header: str) -> dict[str, dict[str, int]]:
    """Read the values of every `enum NAME : TYPE { FIRST, SECOND };` of a header, which count from 0."""
    found = re.findall(r"enum (?:\[\[\w+\]\] )?(\w+) : \w+ \{(.*?)\};", code(header), re.DOTALL)
    return {name: {value: i for i, value in enumerate(re.findall(r"\w+", body))} for name, body in found}


def code(header: str) -> str:
    """Return a header without its comments."""
    return re.sub(r"//.*", "", header)


def _fields(declaration: str, known: Mapping[str, Layout]) -> Iterator[tuple[str, str]]:
    """Yield the names and formats of `const TYPE a, *b`."""
    kind = next((word for word in re.findall(r"\w+", declaration) if word != "const"), "")
    for declarator in declaration.split(",") if kind else ():
        name = re.findall(r"\w+", declarator)[-1]
        yield name, _POINTER if "*" in declarator else _FORMATS.get(kind) or known[kind].format
