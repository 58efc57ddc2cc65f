"""The release workflow: what it calls exists, and nothing but a tag that has passed everything is published."""

import re
import tomllib
from typing import Any

import pytest
import yaml
from documents import ROOT

pytestmark = pytest.mark.checkout


@pytest.fixture
def workflow() -> Any:
    return yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))


def test_only_publishing_has_rights_and_it_waits_for_every_other_job(workflow: Any) -> None:
    jobs = workflow["jobs"]
    assert workflow["permissions"] == {"contents": "read"}
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish"]
    publish = jobs["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["if"] == "github.ref_type == 'tag'"
    assert set(publish["needs"]) == jobs.keys() - {"publish"}


def test_every_wheel_that_is_published_has_been_tested(workflow: Any) -> None:
    jobs = workflow["jobs"]
    for name in jobs.keys() - {"publish"}:
        commands = [step.get("run", "") for step in jobs[name]["steps"]]
        assert any(re.match(r"(make test-wheel WHEEL=|python \.ci/test_wheel\.py) ?\S", x) for x in commands)
    assert re.search(r"^test-wheel:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_a_wheel_is_built_for_each_machine(workflow: Any) -> None:
    jobs = workflow["jobs"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert len(project["tool"]["cibuildwheel"]["build"]) == len(jobs["wheel"]["strategy"]["matrix"]["runner"])
