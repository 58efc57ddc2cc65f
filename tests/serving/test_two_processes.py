"""Two servers with one file of states."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx2 as httpx
import pytest
from serving.processes import Server, completion, server, told

from unrolled.serving.store import open_store


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[Server, httpx.Client]]]:
    folder = tmp_path_factory.mktemp("two")
    states = folder / "states.sqlite"
    open_store(str(states)).close()
    with ExitStack() as stack:
        servers = [stack.enter_context(server(folder / f"log{i}", "--states", states)) for i in (0, 1)]
        yield [(x, stack.enter_context(httpx.Client(base_url=x.address(60)))) for x in servers]


@pytest.mark.slow
def test_a_session_goes_on_in_the_other_process(both: list[tuple[Server, httpx.Client]]) -> None:
    (_, first), (_, second) = both
    _, begun = told(completion(first, "ROMEO:"))
    answer = completion(second, "JULIET:", state=begun)
    usage = answer.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - len("JULIET:") - 1
    assert told(answer) == told(completion(first, "JULIET:", state=begun))


@pytest.mark.slow
def test_both_keep_and_read_states_at_once(both: list[tuple[Server, httpx.Client]]) -> None:
    (_, first), (_, second) = both

    def talk(number: int) -> tuple[tuple[str, str], tuple[str, str]]:
        one, other = (first, second) if number % 2 else (second, first)
        _, state = told(completion(one, "abcdefgh"[number], seed=number))
        for _ in range(3):
            turn = told(completion(other, "more", state=state, seed=number))
            again = told(completion(one, "more", state=state, seed=number))
            assert turn == again
            state, one, other = turn[1], other, one
        return turn, again

    with ThreadPoolExecutor(8) as pool:
        states = [turn[1] for turn, _ in pool.map(talk, range(8))]
    assert len(set(states)) == 8


def test_the_other_goes_on_after_kill_9(both: list[tuple[Server, httpx.Client]]) -> None:
    (killed, first), (_, second) = both
    _, state = told(completion(first, "HAMLET:"))
    name = {"If-None-Match": "*"}
    assert first.put("/v1/sessions/play", json={"state": state}, headers=name).status_code == 200
    body = {"model": "text", "prompt": "go", "max_tokens": 10_000, "stream": True}
    with first.stream("POST", "/v1/completions", json=body) as running:
        lines = running.iter_lines()
        next(lines)
        killed.process.kill()
        with pytest.raises(httpx.TransportError):
            list(lines)
    assert second.get("/v1/sessions/play").json()["state"] == state
    assert told(completion(second, "OPHELIA:", state=state))[1] != state
