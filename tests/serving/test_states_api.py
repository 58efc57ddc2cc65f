"""/v1/states and /v1/sessions."""

from typing import Any

import pytest
import torch
from serving.clients import client, error, post
from serving.fakes import DIGEST, FakeEngine, FakeStates, served

from unrolled.contract import UnsupportedError
from unrolled.serving.jobs import EngineError, TimedOutError
from unrolled.serving.snapshot import MOST, Snapshot
from unrolled.serving.states import States
from unrolled.serving.store import StateTooLargeError, open_store


def snapshot(**changes: Any) -> Snapshot:
    fields = {"model": DIGEST, "length": 3, "pending": 97, "tensors": {"s": torch.tensor([3.0])}}
    return Snapshot(**{**fields, **changes})


def test_a_state_moves_to_another_server() -> None:
    first, second = client(), client()
    id = post(first, prompt="a", keep=True)["state"]
    answer = first.get(f"/v1/states/{id}")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert error(second.get(f"/v1/states/{id}"), 404)["code"] == "unknown_state"
    assert second.put(f"/v1/states/{id}", content=answer.content).status_code == 201
    assert second.put(f"/v1/states/{id}", content=answer.content).status_code == 200
    assert post(second, prompt="b", state=id)
    assert second.delete(f"/v1/states/{id}").status_code == 204
    assert error(second.delete(f"/v1/states/{id}"), 404)["code"] == "unknown_state"


@pytest.mark.parametrize("method", ["get", "put", "delete"])
@pytest.mark.parametrize("id", ["x", "0" * 63, "A" * 64, "0" * 65])
def test_ids_are_64_digits(method: str, id: str) -> None:
    assert error(getattr(client(), method)(f"/v1/states/{id}"), 400)["param"] == "id"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"model": "cd" * 32}, "foreign_state"),
        ({"pending": 256}, "damaged_state"),
        ({"held": (256,)}, "damaged_state"),
        ({"tensors": {"other": torch.zeros(1)}}, "damaged_state"),
    ],
)
def test_states_that_no_model_here_has_made(changes: dict[str, Any], code: str) -> None:
    wrong, states = snapshot(**changes), FakeStates()
    answer = client(states=states).put(f"/v1/states/{wrong.id}", content=wrong.to_bytes())
    assert error(answer, 400)["code"] == code
    assert not states.kept


def test_a_state_has_read_all_tokens_but_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, checked, id = FakeEngine(), list[int](), snapshot(length=3).id
    monkeypatch.setattr(engine.runner, "state", lambda tensors, tokens: checked.append(tokens))
    answer = client(served(engine)).put(f"/v1/states/{id}", content=snapshot(length=3).to_bytes())
    assert answer.status_code == 201
    assert checked == [2]


@pytest.mark.parametrize("changes", [{"pending": 256}, {"pending": 2**40}, {"held": (256,)}])
def test_states_that_another_program_has_stored_are_checked_too(changes: dict[str, Any]) -> None:
    wrong, states = snapshot(**changes), FakeStates()
    states.keep(wrong)
    body = {"model": "book", "state": wrong.id, "prompt": "a"}
    answer = client(states=states).post("/v1/completions", json=body)
    assert error(answer, 400)["code"] == "damaged_state"


def test_no_sequence_gets_longer_than_a_state_can_say() -> None:
    http, longest = client(), snapshot(length=MOST)
    assert http.put(f"/v1/states/{longest.id}", content=longest.to_bytes()).status_code == 201
    body = {"model": "book", "state": longest.id, "prompt": "a", "max_tokens": 0}
    assert error(http.post("/v1/completions", json=body), 400)["code"] == "context_length_exceeded"


def test_damaged_states_are_refused() -> None:
    http, content = client(), snapshot().to_bytes()
    for wrong in (b"", b"a" * 100, content[:-1], content[:-1] + b"\1"):
        assert error(http.put(f"/v1/states/{snapshot().id}", content=wrong), 400)["code"] == "damaged_state"
    assert error(http.put(f"/v1/states/{'0' * 64}", content=content), 400)["code"] == "damaged_state"


@pytest.mark.parametrize(("value", "status"), [(float("nan"), 400), (float("inf"), 400), (1.0, 500)])
def test_a_state_of_nan_is_the_fault_of_the_client(value: float, status: int) -> None:
    http = client(served(FakeEngine(fails=EngineError("logits hold NaN"), block=1)))
    wrong = snapshot(tensors={"s": torch.tensor([value])})
    assert http.put(f"/v1/states/{wrong.id}", content=wrong.to_bytes()).status_code == 201
    answer = http.post("/v1/completions", json={"model": "book", "state": wrong.id})
    assert error(answer, status)["code"] == ("damaged_state" if status == 400 else "engine_error")


def test_a_state_of_nan_is_not_why_a_job_was_late() -> None:
    http = client(served(FakeEngine(fails=TimedOutError(), block=1)))
    wrong = snapshot(tensors={"s": torch.tensor([float("nan")])})
    http.put(f"/v1/states/{wrong.id}", content=wrong.to_bytes())
    error(http.post("/v1/completions", json={"model": "book", "state": wrong.id}), 504)


def test_a_store_that_does_not_work() -> None:
    class Full(FakeStates):
        def keep(self, snapshot: Snapshot) -> str:
            raise OSError("the disk is full")

        def session(self, name: str) -> str | None:
            raise OSError("no connection")

    http = client(states=Full())
    answer = http.post("/v1/completions", json={"model": "book", "prompt": "a", "keep": True})
    assert error(answer, 503)["code"] == "store_unavailable"
    assert error(http.get("/v1/sessions/a"), 503)["code"] == "store_unavailable"


def test_a_state_that_is_larger_than_the_store_is_the_fault_of_the_request() -> None:
    class Small(FakeStates):
        def keep(self, snapshot: Snapshot) -> str:
            raise StateTooLargeError("the state has 8 bytes, but the store keeps 4 at most")

    answer = client(states=Small()).post(
        "/v1/completions", json={"model": "book", "prompt": "a", "keep": True}
    )
    refused = error(answer, 400)
    assert (refused["code"], refused["param"]) == ("too_large", "keep")


def test_a_store_that_cannot_move_sessions_says_so() -> None:
    class Fixed(FakeStates):
        def move(self, name: str, expected: str | None, new: str | None) -> bool:
            raise UnsupportedError("a session cannot be moved there")

    http, id = client(states=Fixed()), "0" * 64
    answers = [
        http.put("/v1/sessions/a", json={"state": id}, headers={"If-Match": f'"{id}"'}),
        http.delete("/v1/sessions/a", headers={"If-Match": f'"{id}"'}),
    ]
    for answer in answers:
        assert error(answer, 501)["message"] == "a session cannot be moved there"


def test_sessions_move_only_for_those_who_know_where_they_point() -> None:
    http = client()
    one, two = (post(http, prompt=prompt, keep=True)["state"] for prompt in ("a", "bc"))
    place = "/v1/sessions/chat-1"
    assert error(http.get(place), 404)["code"] == "unknown_session"
    assert error(http.put(place, json={"state": one}), 428)["param"] == "If-Match"
    new = {"If-None-Match": "*"}
    assert error(http.put(place, json={"state": "0" * 64}, headers=new), 404)["code"] == "unknown_state"
    assert http.put(place, json={"state": one}, headers=new).json() == {"name": "chat-1", "state": one}
    again = error(http.put(place, json={"state": two}, headers=new), 412)
    assert (again["code"], again["param"]) == ("moved", "If-None-Match")
    assert again["message"] == "the session chat-1 exists already"
    found = http.get(place)
    assert (found.json()["state"], found.headers["etag"]) == (one, f'"{one}"')
    known = {"If-Match": found.headers["etag"]}
    assert http.put(place, json={"state": two}, headers=known).headers["etag"] == f'"{two}"'
    again = error(http.put(place, json={"state": two}, headers=known), 412)
    assert (again["code"], again["param"]) == ("moved", "If-Match")
    assert again["message"] == "the session chat-1 does not exist, or points elsewhere now"
    assert error(http.delete(place), 428)
    assert error(http.delete(place, headers=known), 412)
    assert http.delete(place, headers={"If-Match": f'"{two}"'}).status_code == 204
    assert error(http.get(place), 404)


@pytest.mark.parametrize("tag", ["abc", "", "A" * 64])
def test_no_session_points_to_what_is_no_id(tag: str) -> None:
    http = client(states=States(open_store("memory:"), 0))
    id = post(http, prompt="a", keep=True)["state"]
    known = {"If-Match": f'"{tag}"'}
    assert error(http.put("/v1/sessions/a", json={"state": id}, headers=known), 412)["code"] == "moved"
    assert error(http.delete("/v1/sessions/a", headers=known), 412)["code"] == "moved"


@pytest.mark.parametrize(
    "headers", [{"If-Match": "abc"}, {"If-None-Match": "abc"}, {"If-Match": '"a"', "If-None-Match": "*"}]
)
def test_wrong_conditions(headers: dict[str, str]) -> None:
    http = client()
    id = post(http, prompt="a", keep=True)["state"]
    error(http.put("/v1/sessions/a", json={"state": id}, headers=headers), 400)
    assert error(http.put("/v1/sessions/a b", json={"state": id}, headers=headers), 400)["param"] == "name"
