"""The README does what it says: its Python runs, its commands and links exist, its table is that of the classes."""

import hashlib
from dataclasses import replace

import pytest
from documents import ROOT, broken_links, check_command, commands, run
from typer.testing import CliRunner

from unrolled import cli
from unrolled.cli.list import cells_table, markdown_table
from unrolled.data.text import KNOWN

README = ROOT / "README.md"

pytestmark = pytest.mark.checkout


@pytest.mark.documents
def test_the_python_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(README)


def test_the_commands_exist():
    found = commands(README)
    assert ["make", "demo"] in found
    assert ["make", "test"] in found
    for words in found:
        check_command(words)


@pytest.mark.documents
def test_the_commands_of_the_library_run_as_written(tmp_path, monkeypatch):
    """The others are make targets, which run this very test or take minutes; pages are for `make test-web`.

    `unrolled serve` runs until it is stopped, as the test of its guide does.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNROLLED_DATA", str(tmp_path))
    play = b"ROMEO:\nOnce upon a time there was a book.\n" * 200
    (tmp_path / "input.txt").write_bytes(play)
    known = replace(KNOWN["tiny-shakespeare"], sha256=hashlib.sha256(play).hexdigest())
    monkeypatch.setitem(KNOWN, "tiny-shakespeare", known)
    for words in commands(README):
        if words[0] == "unrolled" and words[1] != "serve" and "--web" not in words:
            fewer = ["train.steps=2", "model.d_model=16"] if words[1] == "train" else []
            result = CliRunner().invoke(cli.app, [*words[1:], *fewer])
            assert result.exit_code == 0, result.output
    assert (tmp_path / "runs" / "plays" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        "make nothing",
        "unrolled nothing",
        "unrolled list --nothing",
        "unrolled train model.nothing=1 run_dir=x",
        "unrolled train data.name=text data.nothing=1 run_dir=x",
        "pip install '.[nothing]'",
        "python nothing.py",
        "nothing",
    ],
)
def test_the_check_of_commands_can_fail(wrong):
    import shlex

    with pytest.raises(Exception, match="nothing"):
        check_command(shlex.split(wrong))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "benchmarks/LOG.md"])
def test_the_links_lead_somewhere(page):
    assert broken_links(ROOT / page) == []


@pytest.mark.parametrize(("name", "expected"), [("mechanisms", markdown_table), ("cells", cells_table)])
def test_the_tables_are_those_of_the_classes(name, expected):
    _, _, rest = README.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    table, end, _ = rest.partition(f"\n<!-- /{name} -->")
    assert end
    header, line, *rows = expected().splitlines()
    shown = table.splitlines()
    assert shown[:2] == [header, line]
    # A new mechanism is in the table after `make format`; none of its own tests waits for that.
    assert set(shown[2:]) <= set(rows)
    assert shown[2:] == sorted(shown[2:], key=lambda row: row.partition("]")[0])  # by name
