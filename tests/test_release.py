"""The release workflow: what it calls exists, and nothing but a tag that has passed everything is published."""

import re
import tomllib

import pytest
import yaml
from documents import ROOT

pytestmark = pytest.mark.checkout

WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
JOBS = WORKFLOW["jobs"]


def test_only_publishing_has_rights_and_it_waits_for_every_other_job() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert [name for name, job in JOBS.items() if "permissions" in job] == ["publish"]
    publish = JOBS["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["if"] == "github.ref_type == 'tag'"
    assert set(publish["needs"]) == JOBS.keys() - {"publish"}


def test_every_wheel_that_is_published_has_been_tested() -> None:
    for name in JOBS.keys() - {"publish"}:
        commands = [step.get("run", "") for step in JOBS[name]["steps"]]
        assert any(re.match(r"(make test-wheel WHEEL=|python \.ci/test_wheel\.py) ?\S", x) for x in commands)
    assert re.search(r"^test-wheel:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_a_wheel_is_built_for_each_machine() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert len(project["tool"]["cibuildwheel"]["build"]) == len(JOBS["wheel"]["strategy"]["matrix"]["runner"])
