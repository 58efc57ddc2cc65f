"""What `unrolled serve --replicas` and the app for Ray refuse."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from commands import error
from pydantic import ValidationError

from unrolled import demo_models
from unrolled.serving import opening
from unrolled.serving.model import Limits
from unrolled.serving.opening import Options
from unrolled.serving.ray import Arguments
from unrolled.serving.states import untold


@pytest.mark.parametrize("arguments", [["--demo"], [demo_models.path("text"), "--states", "memory:"]])
def test_replicas_do_not_share_memory(arguments: list[object]) -> None:
    found = error("serve", *arguments, "--replicas", 2)
    assert found.startswith("--states is memory:, which the 2 replicas of --replicas do not share")


def test_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    found = error("serve", demo_models.path("text"), "--replicas", 2, "--states", tmp_path / "states")
    assert found == "--replicas needs ray, which is missing: run pip install '.[ray]' in a clone of unrolled"


def test_options_are_read_as_on_a_command_line() -> None:
    found = Options(folders="a,/b", states="x", memory="2GB", ttl="2h", keys="k", rows="3")  # type: ignore[arg-type]
    assert (found.folders, found.memory, found.ttl, found.rows) == (
        [Path("a"), Path("/b")],
        2 * 10**9,
        7_200,
        3,
    )
    fields = found.from_the_root()
    assert fields["folders"] == [Path("a").absolute(), Path("/b")]
    assert fields["states"] == f"sqlite:{Path('x').absolute()}"
    assert fields["keys"] == Path("k").absolute()
    for url in ("memory:", "s3://bucket/path", "redis://host/0"):
        assert Options(folders=[Path("a")], states=url).from_the_root()["states"] == url


@pytest.mark.parametrize(
    ("field", "value"),
    [("folders", ""), ("states", ""), ("memory", "0"), ("ttl", "2y"), ("rows", 0), ("queues", 1)],
)
def test_wrong_options(field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        Options.model_validate({"folders": "a", "states": "b", field: value})


def test_a_wrong_folder_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises((ValueError, OSError), match=r"config\.json"):
        Options(folders=[tmp_path], states="memory:").check()


def test_a_wrong_setting_is_told_before_anything_starts() -> None:
    options = Options(folders=[Path(demo_models.path("text"))], states="memory:", rate="often")
    with pytest.raises(ValueError, match="rate is 'often'"):
        options.check()


def test_one_name_is_not_given_to_two_models() -> None:
    with pytest.raises(ValueError, match="name is 'mine', but there are 2 models"):
        Options(folders=[Path("a"), Path("b")], states="memory:", name="mine").models()


def test_the_app_refuses_a_memory_of_its_own() -> None:
    Arguments(folders=[Path("a")], states="memory:")
    for more in ({"replicas": 2}, {"most_replicas": 2}):
        with pytest.raises(ValidationError, match="states is memory:, which replicas do not share"):
            Arguments(folders=[Path("a")], states="memory:", **more)
    with pytest.raises(
        ValidationError, match="most_replicas is 2, but must be at least replicas, which is 3"
    ):
        Arguments(folders=[Path("a")], states="b", replicas=3, most_replicas=2)


def test_every_option_reaches_what_it_is_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(opening, "open_model", lambda folder, **options: opened.update(model=options))
    monkeypatch.setattr(opening, "open_store", lambda url, **options: opened.update(store=options))
    (tmp_path / "keys").write_text("secret\n")
    given: dict[str, Any] = {
        "folders": ["a"], "states": "x", "name": "mine", "host": "::1", "port": 9, "weights": "int8", "rows": 2,
        "memory": 3, "prefix_memory": 0, "queue": 4, "timeout": 5.0, "ttl": 7_200.0, "state_bytes": 6,
        "state_memory": 7, "deterministic": True, "keys": tmp_path / "keys", "rate": "8/minute", "origin": "http://page",
    }  # fmt: skip
    assert given.keys() == Options.model_fields.keys()
    options = Options(**given)
    options.models(threads=10)
    assert opened["model"] == {
        "name": "mine",
        "weights": "int8",
        "limits": Limits(rows=2, memory=3, prefix_memory=0, queue=4, threads=10),
        "deterministic": True,
    }
    states = options.open_states()
    assert opened["store"] == {"state_bytes": 6, "ttl": 7_200.0 + untold(7_200.0)}
    assert (states._recent, states._most) == (untold(7_200.0), 7)
    states = Options(**given | {"states": "memory:", "state_bytes": None}).open_states()
    assert opened["store"] == {"state_bytes": 7, "ttl": 7_200.0 + untold(7_200.0)}
    assert states._most == 0, "the store itself is in memory"
    settings = options.settings()
    assert (settings.host, settings.port, settings.keys, settings.rate) == ("::1", 9, ("secret",), "8/minute")
    assert (settings.origin, settings.timeout) == ("http://page", 5.0)
