"""The server's page: its files, and the headers that they come with."""

from pathlib import Path

import pytest
from serving.clients import client

from unrolled.serving.page_files import PAGE, TYPES, page_files


def test_every_file_is_served_under_the_policy():
    with client() as http:
        for name, path in page_files().items():
            answer = http.get("/" if name == "index.html" else f"/page/{name}")
            assert answer.status_code == 200, name
            assert answer.content == path.read_bytes()
            assert answer.headers["content-type"] == TYPES[path.suffix]
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
            assert "unsafe" not in policy


@pytest.mark.parametrize("name", ["", "absent.js", "../page_files.py", "..%2fpage_files.py"])
def test_nothing_else_is(name):
    with client() as http:
        assert http.get(f"/page/{name}").status_code == 404


def test_every_module_that_is_imported_is_there():
    files = page_files()
    for name, path in files.items():
        lines = path.read_text(encoding="utf-8").splitlines()
        asked = {line.split('"')[1] for line in lines if line.startswith("import ")}
        assert {Path(x).name for x in asked} <= set(files), name
    assert set(files) >= {path.name for path in PAGE.iterdir()}
