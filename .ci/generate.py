"""Write what follows from other files: tables in the README, the page of claims, and the stubs of `load`.

The stubs, `__init__.pyi` beside each registry, tell editors the class that a literal name loads.
"""

import re
from pathlib import Path
from types import ModuleType

from unrolled import alignment, attention, recurrent
from unrolled.cli import _claims
from unrolled.cli.list import cells_table, markdown_table

ROOT = Path(__file__).parent.parent
REGISTRIES = {
    alignment: "Alignment",
    attention: "MultiHeadAttention[Any, Any]",
    recurrent: "RecurrentLayer[Any]",
}
"""The registries, and what their classes derive from."""


def main() -> None:
    """Write them all."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    for name, table in (("mechanisms", markdown_table()), ("cells", cells_table())):
        text = re.sub(
            f"(<!-- {name} -->\\n).*?(\\n<!-- /{name} -->)", rf"\g<1>{table}\g<2>", text, flags=re.DOTALL
        )
    readme.write_text(text, encoding="utf-8")
    (ROOT / "docs" / "guide" / "claims.md").write_text(_claims.page(), encoding="utf-8")
    for registry in REGISTRIES:
        path = Path(registry.__path__[0]) / "__init__.pyi"
        path.write_text(stub(registry), encoding="utf-8")


def stub(registry: ModuleType) -> str:
    """Return the stub of a registry: its public names, and an overload of `load` for each file."""
    package = registry.__name__
    imports, overloads = [], []
    for name in registry.names():
        kind = registry.load(name).__name__
        imports.append(f"from {package}.{name} import {kind}")
        overloads.append(f'@overload\ndef load(name: Literal["{name}"]) -> type[{kind}]: ...')
    public = [name for name in registry.__all__ if name not in ("load", "names")]
    imports += [f"from {vars(registry)[name].__module__} import {name} as {name}" for name in public]
    parts = [
        "# Written by `make format`.",
        "from typing import Any, Literal, overload\n",
        "\n".join(imports) + "\n",
        "def names() -> list[str]: ...",
        *overloads,
        f"@overload\ndef load(name: str) -> type[{REGISTRIES[registry]}]: ...",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
