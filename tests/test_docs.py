"""The documents do what they say: their Python runs, their commands exist."""

import importlib
import importlib.util
import re
import subprocess
import sys
from html import escape

import pytest
import torch
from documents import GUIDE, ROOT, blocks, broken_links, check_command, commands, run

from unrolled import alignment, attention

PAGES = [*GUIDE, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "LOG.md"]

pytestmark = pytest.mark.checkout


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # examples write files, and some switch gradients off
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.mark.documents
@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.stem)
def test_the_python_runs(page):
    if page.stem != "serving":
        run(page)
        return
    command = [sys.executable, "-m", "unrolled", "serve", "--demo", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            [address] = re.findall(
                "serving text, digits at (.*)", process.stderr.readline() + process.stderr.readline()
            )
            run(page, server=address)
        finally:
            process.terminate()
    assert process.returncode == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_exist(page):
    for words in commands(page):
        check_command(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_pictures_exist(page):
    assert [x for x in broken_links(page) if not x.endswith(".md")] == []  # pages are checked by the build


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "docs" / ".nav.yml").read_text()
    for page in GUIDE:
        assert str(page.relative_to(ROOT / "docs")) in navigation


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Put the mechanism of CONTRIBUTING's worked example beside the real ones; give its test."""
    mechanism, test = (block.text for block in blocks(ROOT / "CONTRIBUTING.md", "python"))
    assert mechanism.startswith("# src/unrolled/attention/simplex.py\n")
    (tmp_path / "simplex.py").write_text(mechanism, encoding="utf-8")
    monkeypatch.setattr(attention, "__path__", [*attention.__path__, str(tmp_path)])
    yield test
    sys.modules.pop("unrolled.attention.simplex", None)


@pytest.mark.slow
def test_the_worked_example_passes_its_own_test(example):
    names = {}
    exec(example, names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("build_docs", ROOT / "docs" / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    return build


def test_a_new_mechanism_gets_its_page(example, build, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "MECHANISMS", tmp_path / "pages")
    build.write_mechanisms()
    page = (tmp_path / "pages" / "simplex.md").read_text()
    assert page.startswith("# Simplex attention\n")
    assert "(https://arxiv.org/abs/2006.16236)" in page
    assert "::: unrolled.attention.simplex.SimplexAttention" in page
    assert "[simplex](simplex.md)" in (tmp_path / "pages" / "index.md").read_text()


@pytest.mark.parametrize(
    ("room", "name"),
    [
        *(("attention", name) for name in attention.names()),
        *(("alignment", name) for name in alignment.names()),
    ],
)
def test_a_mechanism_has_its_equations_as_mathematics(room, name, build):
    body = build.title_and_body(importlib.import_module(f"unrolled.{room}.{name}"))[1]
    if name not in build.EQUATIONS:  # a new one, whose page shows the docstring's equations
        assert build.BLOCK.search(body)
        return
    shown = build.with_latex(name, body)
    equations = re.findall(r"\$\$\n(.*?)\n\$\$", shown, re.DOTALL)
    assert equations
    for equation in equations:
        html = build.with_mathml(f'<div class="arithmatex">\\[\n{escape(equation)}\n\\]</div>')
        assert html.startswith('<div class="equation"><math ')
        assert "arithmatex" not in html


def test_latex_that_cannot_be_drawn_stops_the_build(build):
    with pytest.raises(ValueError, match="a LaTeX command that latex2mathml does not know"):
        build.with_mathml(r'<p><span class="arithmatex">\(\wibble x\)</span></p>')


def test_equations_that_the_docstring_lacks_stop_the_build(build):
    with pytest.raises(ValueError, match="more equations of linear than its docstring"):
        build.with_latex("linear", "No indented block.")


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_labels_of_the_drawing_are_readable_on_a_phone(page):
    text = (ROOT / page).read_text()
    (name,) = re.findall(r'<source media="\(max-width: 600px\)" srcset="([^"]+)">', text)
    drawing = ((ROOT / page).parent / name).read_text()
    shown = 358 / float(re.search(r'viewBox="0 0 (\d+) ', drawing)[1])  # the text of a page 390 px wide
    assert min(map(float, re.findall(r'font-size="(\d+)"', drawing))) * shown >= 11


def test_what_a_package_takes_from_its_private_files_is_in_the_reference(build, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "REFERENCE", tmp_path)
    build.write_modules()
    page = (tmp_path / "recurrent" / "index.md").read_text()
    for name in importlib.import_module("unrolled.recurrent").__all__:
        assert page.count(f"::: unrolled.recurrent.{name}\n") == 1
    page = (tmp_path / "generation" / "index.md").read_text()
    assert ":::" not in page  # what it names is in public files, which have pages


def test_internals_are_not_in_the_reference(build, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "REFERENCE", tmp_path)
    build.write_modules()
    pages = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.md")}
    assert {"models/decoder.md", "ops/masks.md"} <= pages
    assert not {"models/checks.md", "ops/checks.md"} & pages
    assert "checks.md" not in (tmp_path / "index.md").read_text()


def test_the_gallery_shows_what_an_example_prints(build, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "EXAMPLES", tmp_path)
    monkeypatch.setattr(build, "GALLERY", tmp_path / "examples.md")
    (tmp_path / "sums.py").write_text('"""Adds two numbers.\n\nSlowly.\n"""\n\nprint("it is", 1 + 1)\n')
    build.write_examples()
    page = (tmp_path / "examples.md").read_text()
    assert "## sums.py\n\nAdds two numbers.\n\n```text\nit is 2\n```" in page
    assert '    print("it is", 1 + 1)' in page
