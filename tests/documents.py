"""The project's Markdown: its code blocks, its links, and whether a shell command in it could run."""

import importlib.util
import re
import shlex
import textwrap
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from typer.main import get_command

from unrolled import cli, data
from unrolled.cli.run_config import JOBS, read, resolve
from unrolled.models import KINDS

ROOT = Path(__file__).parent.parent
GUIDE = [ROOT / "docs" / "index.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
FENCE = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)|\bsrc=\"([^\"]+)\"")


class Block(NamedTuple):
    """A fenced block; `line` is where its text begins in the page."""

    language: str
    text: str
    line: int


def blocks(page: Path, *languages: str) -> list[Block]:
    """List the fenced blocks of a page in these languages."""
    markdown = page.read_text(encoding="utf-8")
    found = [
        Block(match[2], textwrap.dedent(match[3]), markdown.count("\n", 0, match.start(3)) + 1)
        for match in FENCE.finditer(markdown)
    ]
    return [block for block in found if block.language in languages]


def run(page: Path, server: str = "") -> None:
    """Run the Python of a page from top to bottom in one namespace, under the page's own line numbers.

    Args:
        page: of Markdown.
        server: an address, in the place of the one that `unrolled serve` has by default.
    """
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        text = block.text.replace("http://127.0.0.1:8000", server) if server else block.text
        exec(compile("\n" * (block.line - 1) + text, page, "exec"), namespace)


def commands(page: Path) -> list[list[str]]:
    """List the shell commands of a page, in words, without environment variables and comments."""
    found = []
    for block in blocks(page, "sh", "console"):
        for line in block.text.replace("\\\n", " ").splitlines():
            if block.language == "console" and not line.startswith("$ "):
                continue  # what a command prints
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and re.match(r"\w+=", words[0]):
                words.pop(0)
            if words:
                found.append(words)
    return found


def check_command(words: list[str]) -> None:
    """Fail unless the command exists and takes these arguments; nothing is run."""
    program, arguments = Path(words[0]).name, words[1:]
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(arguments) <= set(targets), f"the Makefile has no target for {words}"
    elif program == "unrolled":
        _check_unrolled(arguments)
    elif program == "torchrun":
        start = arguments.index("-m")
        assert arguments[start + 1] == "unrolled"
        _check_unrolled(arguments[start + 2 :])
    elif program == "python" and arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]), f"there is no module {arguments[1]}"
    elif program == "python":
        assert (ROOT / arguments[0]).is_file(), f"there is no file {arguments[0]}"
    elif program == "pip":
        _check_pip(arguments)
    else:
        assert program in ("cd", "git", "pytest", "serve", "ulimit"), (
            f"{program} is not a command that the tests know"
        )


def broken_links(page: Path) -> list[str]:
    """List the relative links and pictures of a page that lead nowhere."""
    targets = ["".join(match) for match in LINK.findall(page.read_text(encoding="utf-8"))]
    return [x for x in targets if ":" not in x and not (page.parent / x).exists()]


def _check_unrolled(arguments: list[str]) -> None:
    group = get_command(cli.app)
    if arguments == ["--help"]:
        return
    with group.make_context("unrolled", [*arguments]) as context:
        name, command, rest = group.resolve_command(context, arguments)
        given = command.make_context(name, rest, parent=context).params
    if name == "train":
        values = read(None, given["overrides"] or [])
        options, model = dict(values.get("data", {})), dict(values.get("model", {}))
        if (dataset := options.pop("name", None)) is not None:
            kind = data.dataset_type(dataset)
            known = {field.name for field in fields(kind)}
            assert options.keys() <= known, f"{arguments}: the data set takes {known}"
            if (
                kind.task != "tokens"
            ):  # made of files that may not be here, so the names are all there is to check
                config_type = KINDS[model.pop("name", JOBS[kind.task].kinds[0])].config_type
                assert model.keys() <= {field.name for field in fields(config_type)}, arguments
                return
        resolve({**values, "data": {"name": "copy"}, "run_dir": "unused"})  # any data set without a file


def _check_pip(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for expected in re.findall(r"\[([\w,]+)\]", " ".join(arguments)):
        missing = set(expected.split(",")) - project["optional-dependencies"].keys()
        assert not missing, f"pyproject.toml has no extras {missing}"
