"""The documents do what they say: their Python runs, their commands exist."""

import importlib.util
import sys

import pytest
import torch
from documents import GUIDE, ROOT, blocks, broken_links, check_command, commands, run

from unrolled import attention

PAGES = [*GUIDE, ROOT / "CONTRIBUTING.md"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # examples write files, and some switch gradients off
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.stem)
def test_the_python_runs(page):
    run(page)


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


def test_the_worked_example_passes_its_own_test(example):
    names = {}
    exec(example, names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


def test_a_new_mechanism_gets_its_page(example, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("build_docs", ROOT / "docs" / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    monkeypatch.setattr(build, "MECHANISMS", tmp_path / "pages")
    build.write_mechanisms()
    page = (tmp_path / "pages" / "simplex.md").read_text()
    assert page.startswith("# Simplex attention\n")
    assert "(https://arxiv.org/abs/2006.16236)" in page
    assert "::: unrolled.attention.simplex.SimplexAttention" in page
    assert "[simplex](simplex.md)" in (tmp_path / "pages" / "index.md").read_text()
