"""Build the site into `site/`: write a page per mechanism, module, command and example, then run Zensical.

A new file in `src/unrolled/` gets its page without a change here. The pages that this writes are git-ignored.
"""

import ast
import importlib
import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path
from types import ModuleType

from latex2mathml.converter import convert
from typer.main import get_command
from typer.testing import CliRunner

import unrolled
from unrolled import alignment, attention, cli
from unrolled.cli.list import markdown_table, pattern_image, pattern_of
from unrolled.contract import UnsupportedError

DOCS = Path(__file__).parent
MECHANISMS = DOCS / "attention"
ALIGNMENTS = DOCS / "alignment"
REFERENCE = DOCS / "reference"
EXAMPLES = DOCS.parent / "examples"
GALLERY = DOCS / "examples.md"
SITE = DOCS.parent / "site"
EQUATIONS = tomllib.loads((DOCS / "equations.toml").read_text(encoding="utf-8"))
BLOCK = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)  # an indented block of a docstring
LATEX = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
NEEDS_NPM = {"web_page.py"}
# Modules that serve the library alone.
INTERNAL = {"checks", "extras", "files", "folders", "registry", "state_checks", "threads"}
DRAWN = {  # options that make a pattern of 64 tokens worth looking at
    "bigbird": {"block_size": 4, "seed": 0},
    "longformer": {"window": 8, "global_tokens": [0, 30]},
    "sparse_transformer": {"stride": 8, "summary": 2},
    "spatiotemporal": {"shape": [4, 4, 4]},
    "window": {"window": 8, "dilation": [1, 1, 2, 4]},
}


def main() -> int:
    """Write the generated pages and build everything; a broken link is an error."""
    for folder in (MECHANISMS, ALIGNMENTS, REFERENCE, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    write_mechanisms()
    write_alignments()
    write_modules()
    write_commands()
    write_examples()
    zensical = Path(sys.executable).with_name("zensical")
    failed = subprocess.run([zensical, "build", "--clean", "--strict"], cwd=DOCS.parent).returncode
    for page in SITE.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        page.write_text(with_mathml(html), encoding="utf-8")
    return failed


def write_mechanisms() -> None:
    """Write one page per file of `attention/`, and an index with the table of what each can do."""
    for name in attention.names():
        write_file_of("attention", name, MECHANISMS, markdown_table([name], link="index.md"), drawn(name))
    write(
        MECHANISMS / "index.md",
        "Mechanisms",
        "One file or folder each. Choose one by its name, with `unrolled.attention.load` or in a config.",
        markdown_table(link="{}.md"),
        "The columns are explained in [The contract](../guide/contract.md#what-a-mechanism-declares).",
        "## Shared by all",
        directive("unrolled.attention.base.MultiHeadAttention", level=3),
        directive("unrolled.contract.Supports", level=3),
        directive("unrolled.attention.names", level=3),
    )


def write_alignments() -> None:
    """Write one page per file of `alignment/`, and an index."""
    rows = ["| alignment | |", "| --- | --- |"]
    for name in alignment.names():
        sentence = write_file_of("alignment", name, ALIGNMENTS)
        rows.append(f"| [{name}]({name}.md) | {sentence} |")
    write(
        ALIGNMENTS / "index.md",
        "Alignments",
        inspect.getdoc(alignment) or "",
        "\n".join(rows),
        "## Shared by all",
        directive("unrolled.alignment.base.Alignment", level=3),
        directive("unrolled.alignment.names", level=3),
    )


def write_file_of(room: str, name: str, folder: Path, *shown: str) -> str:
    """Write the page of one file or folder: its docstring, its classes and functions.

    Returns:
        the first sentence.
    """
    module = importlib.import_module(f"unrolled.{room}.{name}")
    files = pkgutil.iter_modules(getattr(module, "__path__", []), f"{module.__name__}.")
    parts = [module, *(importlib.import_module(file.name) for file in files)]
    found = [directive for part in parts for directive in members(part)]
    title, body = title_and_body(module)
    head, _, sentence = title.partition(": ")
    sentence = sentence[:1].upper() + sentence[1:]
    write(folder / f"{name}.md", head, sentence, *shown, enriched(with_latex(name, body)), *found)
    return sentence


def drawn(name: str) -> str:
    """Draw what a mechanism reads, where that can be drawn, and return the line that shows it."""
    try:
        pattern = pattern_of(name, 64, DRAWN.get(name, {}))
    except UnsupportedError:
        return ""
    path = MECHANISMS / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pattern_image(pattern))
    options = "".join(f", {key}={value}" for key, value in DRAWN.get(name, {}).items())
    return f"![Which keys each query reads]({path.name})\n\n64 tokens{options}."


def write_modules() -> None:
    """Write one page per public module that has none yet, a folder per package."""
    rows = []
    for found in pkgutil.walk_packages(unrolled.__path__, "unrolled."):
        path = found.name.split(".")[1:]
        internal = any(part.startswith("_") or part in INTERNAL for part in path)
        if internal or path[0] in ("alignment", "attention", "cli"):
            continue
        module = importlib.import_module(found.name)
        title, body = title_and_body(module)
        file = "/".join(path) + ("/index.md" if found.ispkg else ".md")
        write(REFERENCE / file, ".".join(path), title, enriched(body), *members(module))
        rows.append(f"| [{'.'.join(path)}]({file}) | {title} |")
    table = "\n".join(["| module of `unrolled` | |", "| --- | --- |", *rows])
    write(REFERENCE / "index.md", "Reference", table)


def write_commands() -> None:
    """Write one page with the help of every command."""
    parts = []
    for command in ("", *get_command(cli.app).commands):
        called = f"unrolled {command}".rstrip()
        options = {"prog_name": "unrolled", "env": {"COLUMNS": "88"}}
        text = CliRunner().invoke(cli.app, [*called.split()[1:], "--help"], **options).output
        text = re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip()
        parts += [f"## {called}" if command else "", f"```text\n{text}\n```"]
    write(REFERENCE / "command-line.md", "Command line", *parts)


def write_examples() -> None:
    """Write the gallery: what each example is about, what it prints, and its source.

    Each is run for that, and it is an error if one fails, warns, prints nothing or leaves files behind.
    """
    files = sorted(EXAMPLES.glob("*.py"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(shown, files))
    sentence = "Each is a file in `examples/` and runs on a CPU. Below is what it printed for this page."
    write(GALLERY, "Examples", sentence, *parts)


def shown(file: Path) -> str:
    """Run an example, in a folder of its own; show its first sentence, its output and its source."""
    source = file.read_text(encoding="utf-8")
    sentence = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    if file.name in NEEDS_NPM and shutil.which("npm") is None:
        output = "(not run: there was no npm)"
    else:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-W", "error", file]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True)
            if left := [path.name for path in Path(folder).iterdir()]:
                raise ValueError(f"{file.name} leaves behind {left}")
        if not (output := done.stdout.decode().strip()):
            raise ValueError(f"{file.name} prints nothing")
    folded = textwrap.indent(f"```python\n{source.strip()}\n```", "    ")
    return f'## {file.name}\n\n{sentence}\n\n```text\n{output}\n```\n\n??? note "The program"\n\n{folded}'


def write(path: Path, title: str, *parts: str) -> None:
    """Write a page of paragraphs under a title."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join([f"# {title}", *parts]) + "\n", encoding="utf-8")


def title_and_body(module: ModuleType) -> tuple[str, str]:
    """Return the first paragraph of a module's docstring, on one line, and the rest."""
    title, _, body = (inspect.getdoc(module) or "").partition("\n\n")
    return " ".join(title.split()), body


def with_latex(name: str, body: str) -> str:
    """Put the equations of a mechanism in the place of the first indented blocks of its docstring."""
    equations = iter(EQUATIONS[name].strip().split("\n\n") if name in EQUATIONS else ())

    def replaced(block: re.Match[str]) -> str:
        equation = next(equations, None)
        return block[0] if equation is None else f"$$\n{equation}\n$$\n"

    body = BLOCK.sub(replaced, body + "\n")
    if left := list(equations):
        raise ValueError(f"equations.toml has more equations of {name} than its docstring: {left}")
    return body


def with_mathml(html: str) -> str:
    """Write the LaTeX that a page shows as MathML, which browsers draw by themselves."""

    def drawn(found: re.Match[str]) -> str:
        latex = unescape(found[2]).strip()
        mathml = convert(latex, display="inline" if found[1] == "span" else "block")
        if "\\" in mathml or "<mi>&</mi>" in mathml:
            raise ValueError(f"{latex!r} has a LaTeX command that latex2mathml does not know")
        return mathml if found[1] == "span" else f'<div class="equation">{mathml}</div>'

    return LATEX.sub(drawn, html)


def enriched(text: str) -> str:
    """Link citations, and give the lines on cost, limits and equality a paragraph each."""
    text = re.sub(r"\barXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)
    return re.sub(r"\n+(Cost|Cannot|Equals)\b", r"\n\n**\1**", text)


def members(module: ModuleType) -> Iterator[str]:
    """Name what a module makes public, in its order, each once, for mkdocstrings to describe.

    That is what it defines itself, and what it takes from private files of its own.
    """
    names: list[str] = []
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            names.append(node.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{module.__name__}._"):
            names += [alias.name for alias in node.names if alias.name in getattr(module, "__all__", ())]
    return (directive(f"{module.__name__}.{name}") for name in dict.fromkeys(names))


def directive(name: str, level: int = 2) -> str:
    """Return what mkdocstrings replaces by the description of an object."""
    return f"::: {name}\n    options: {{ heading_level: {level} }}"


if __name__ == "__main__":
    sys.exit(main())
