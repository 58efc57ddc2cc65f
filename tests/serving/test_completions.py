"""/v1/completions: what is answered, whole and in streams."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving.clients import client, error, post, streamed
from serving.fakes import FakeEngine, FakeStates, greedy, served, text_of

from unrolled.data import Vocabulary
from unrolled.decode.request import random_keys
from unrolled.serving.choices import Choice, CompletionLogprobs
from unrolled.serving.jobs import Drawn, TokenLogprob
from unrolled.serving.protocol.completions import CompletionRequest
from unrolled.serving.routes import continuing
from unrolled.serving.text import VocabularyText


def test_a_text_is_continued() -> None:
    found = post(client(), prompt="Once", temperature=0, max_tokens=5)
    assert found.keys() == {"id", "object", "created", "model", "choices", "usage"}
    assert (found["object"], found["model"]) == ("text_completion", "book")
    [choice] = found["choices"]
    expected = {"index": 0, "text": text_of(greedy("Once", 5)), "logprobs": None, "finish_reason": "length"}
    assert choice == expected
    assert found["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 5,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_the_defaults_are_16_tokens_at_temperature_1() -> None:
    engine = FakeEngine()
    assert post(client(served(engine)), prompt="a")["usage"]["completion_tokens"] == 16
    assert tuple(engine.jobs[0].sampling) == (1.0, None, None, None, 1.0)


def test_every_option_reaches_the_engine() -> None:
    engine = FakeEngine()
    options = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 2}
    post(client(served(engine)), prompt="a", seed=-1, n=3, max_completion_tokens=7, logprobs=2, **options)
    [job] = engine.jobs
    assert job.sampling._asdict() == options
    assert job.keys == random_keys(2**63 - 1, 1, 3).tolist()
    assert (job.limit, job.logprobs, job.keep, job.client) == (7, 2, False, "testclient")


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 0, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "suffix": ""},
        {"top_k": -1, "n": 2, "best_of": 2},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
    ],
)
def test_fields_that_change_nothing_are_accepted(fields: dict[str, Any]) -> None:
    engine = FakeEngine()
    answer = client(served(engine)).post("/v1/completions", json={"model": "book", "prompt": "a", **fields})
    assert answer.status_code == 200
    assert engine.jobs[0].sampling.top_k is None


def test_several_prompts_in_any_form_and_several_samples() -> None:
    http = client()
    found = post(http, prompt=["ab", "c"], n=2, seed=5, max_tokens=3)["choices"]
    assert [x["index"] for x in found] == [0, 1, 2, 3]
    assert len({x["text"] for x in found}) == 4
    assert found == post(http, prompt=[[97, 98], [99]], n=2, seed=5, max_tokens=3)["choices"]
    assert found[:1] == post(http, prompt=[97, 98], seed=5, max_tokens=3)["choices"]
    assert found != post(http, prompt=["ab", "c"], n=2, seed=6, max_tokens=3)["choices"]


def test_the_engine_knows_how_many_prompts_come_together() -> None:
    engine = FakeEngine()
    post(client(served(engine)), prompt=["ab", "c", "d"], n=2)
    assert [job.together for job in engine.jobs] == [3, 3, 3]


def test_echo_with_logprobs_as_lm_eval_asks() -> None:
    found = post(client(), prompt="abc", echo=True, logprobs=1, max_tokens=1, temperature=0)["choices"][0]
    drawn = greedy("abc", 1)
    assert found["text"] == "abc" + text_of(drawn)
    told = found["logprobs"]
    assert told.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert told["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert told["tokens"][:3] == ["a", "b", "c"]
    assert told["top_logprobs"][:2] == [None, {"b": -0.5}]
    assert told["text_offset"] == [0, 1, 2, 3]


def test_offsets_count_the_signs_for_broken_characters() -> None:
    engine = FakeEngine(script=[*b"a\xc3b\xe2\x82c", *"é".encode()])
    options = {"echo": True, "logprobs": 0, "max_tokens": 8}
    found = post(client(served(engine)), prompt=[*b"x\xc3"], **options)["choices"][0]
    assert found["text"] == "x\ufffda\ufffdb\ufffdcé"
    assert found["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 5, 5, 6, 7, 7]


@pytest.mark.parametrize(("script", "offsets"), [(b"\xe2\xe2V", [1, 2, 3]), (b"\xc3\xc3\xa9A", [1, 2, 2, 3])])
def test_offsets_where_a_character_begins_within_another(script: bytes, offsets: list[int]) -> None:
    http = client(served(FakeEngine(script=[*script])))
    found = post(http, prompt="x", logprobs=0, max_tokens=len(script))["choices"][0]
    assert found["text"] == script.decode(errors="replace")
    assert found["logprobs"]["text_offset"] == offsets


def test_of_tokens_with_equal_texts_the_most_likely_one_is_told() -> None:
    told = CompletionLogprobs(Doubled(Vocabulary("text")), [], [], 0)
    found = told.of([65], [TokenLogprob(65, -2.0, [(97, -0.5), (98, -1.0), (65, -2.0)])])
    assert found["top_logprobs"] == [{"a": -0.5, "b": -1.0}]


class Doubled(VocabularyText):
    """Capitals have the texts of small letters."""

    def piece(self, id: int) -> str:
        return super().piece(id).lower()


@pytest.mark.parametrize("logprobs", [None, 1])
def test_long_requests_are_read_in_threads_with_the_same_answers(
    logprobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": [[*b"ab\xc3"], [*b"c"]], "echo": True, "logprobs": logprobs, "max_tokens": 2, "seed": 1}
    expected, threads = post(client(), **body)["choices"], list[int]()
    run = asyncio.to_thread

    async def noted(call: Callable[..., Any], *args: Any) -> Any:
        threads.append(1)
        return await run(call, *args)

    monkeypatch.setattr(continuing, "LONG", 2)
    monkeypatch.setattr(asyncio, "to_thread", noted)
    assert post(client(), **body)["choices"] == expected
    assert len(threads) == 2 + (logprobs is not None)
    threads.clear()
    post(client(), prompt=["ab", "c"], max_tokens=1)  # their total length counts
    assert len(threads) == 2


def test_a_long_prompt_does_not_shorten_the_answers_to_others() -> None:
    http = client(served(n_positions=20))
    found = post(http, prompt=[[65] * 18, [66]])
    assert found["usage"]["completion_tokens"] == 3 + 16
    asked = {"model": "book", "prompt": [[66], [65] * 18], "max_tokens": 4}
    assert "18 tokens and 4 more" in error(http.post("/v1/completions", json=asked), 400)["message"]


def test_the_offsets_of_a_prompt_after_a_state_begin_at_0() -> None:
    http = client()
    state = post(http, prompt="ab", keep=True, max_tokens=1)["state"]
    found = post(http, prompt=[99, 100], state=state, echo=True, logprobs=0, max_tokens=1)["choices"][0]
    assert found["text"].startswith("cd")
    assert found["logprobs"]["text_offset"] == [0, 1, 2]


def test_a_start_symbol_is_read_but_not_told() -> None:
    engine = FakeEngine()
    http = client(served(engine, start_token=True))
    found = post(http, prompt="ab", echo=True, logprobs=0, max_tokens=2)
    assert engine.jobs[0].tokens == [256, 97, 98]
    assert found["choices"][0]["logprobs"]["tokens"][:2] == ["a", "b"]
    assert found["choices"][0]["logprobs"]["token_logprobs"][0] == -0.5  # known, after the start symbol
    assert found["usage"]["prompt_tokens"] == 3
    post(http, prompt="")
    assert engine.jobs[1].tokens == [256]


def test_a_prompt_is_read_without_new_tokens() -> None:
    [choice] = post(client(), prompt="ab", max_tokens=0, echo=True)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")


def test_end_symbols_end_a_text_and_have_no_place_in_it() -> None:
    model = served(FakeEngine(script=[*b"one", 0, *b"two"]))
    assert model.text is not None
    model.text.ends = [[0]]
    [choice] = post(client(model), prompt="a", max_tokens=9)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one", "stop")
    [choice] = post(client(model), prompt="a", max_tokens=7, ignore_eos=True)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one\0two", "length")


@pytest.mark.parametrize("block", [1, 2, 3, 6])
@pytest.mark.parametrize(
    ("stop", "text", "finish"),
    [
        ("7", " 35 28 74 8", "stop"),
        (["5", "28 74"], " 35", "stop"),
        (["35 28 8", "28 74 8 7", "8 8"], " 35", "stop"),
        (["7", "8 7"], " 35 28 74", "stop"),
        (["4", "7 36 1", "74 8 36"], " 35 28 74 8 7 36", "length"),
    ],
)
def test_a_stop_of_plain_numbers_is_whole_numbers(
    stop: str | list[str], text: str, finish: str, block: int
) -> None:
    numbers = VocabularyText(Vocabulary("ids"))
    http = client(served(FakeEngine(script=[35, 28, 74, 8, 7, 36], block=block), text=numbers))
    [choice] = post(http, prompt="1 2", max_tokens=6, stop=stop)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, finish)


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("x", "stop: "),
        (" ", "stop is ' ', but must hold numbers"),
        ("1 256", "stop holds the id 256"),
        (str(2**64), "stop holds the id 18446744073709551616"),
    ],
)
def test_a_stop_of_plain_numbers_holds_nothing_else(stop: str, message: str) -> None:
    http = client(served(text=VocabularyText(Vocabulary("ids"))))
    answer = http.post("/v1/completions", json={"model": "book", "prompt": "1 2", "stop": stop})
    assert message in error(answer, 400)["message"]


def test_streams_have_one_chunk_for_each_block() -> None:
    engine = FakeEngine(script=list(b"abcdefgh"), block=3)
    *chunks, done = streamed(client(served(engine)), prompt="x", max_tokens=8)
    assert done == "[DONE]"
    assert [x["choices"][0]["text"] for x in chunks] == ["abc", "def", "gh"]
    assert [x["choices"][0]["finish_reason"] for x in chunks] == [None, None, "length"]
    assert len({x["id"] for x in chunks}) == 1
    assert not any("usage" in x for x in chunks)


def test_no_proxy_holds_back_or_keeps_a_stream() -> None:
    answer = client().post("/v1/completions", json={"model": "book", "prompt": "a", "stream": True})
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.slow
@settings(max_examples=40)
@given(st.data())
def test_a_stream_tells_what_the_whole_answer_tells(data: st.DataObject) -> None:
    script = data.draw(st.lists(st.sampled_from([*b"ab", *"é€".encode()]), min_size=1, max_size=12))
    stop = data.draw(st.lists(st.text("abé", min_size=1, max_size=4), max_size=3))
    body: dict[str, Any] = {
        "prompt": data.draw(st.sampled_from(["x", ["x", "y"]])),
        "n": data.draw(st.integers(1, 2)),
        "max_tokens": data.draw(st.integers(0, 20)),
        "stop": stop,
        "echo": data.draw(st.booleans()),
        "logprobs": data.draw(st.sampled_from([None, 1])),
    }
    http = client(served(FakeEngine(script=script, block=data.draw(st.integers(1, 5)))))
    whole = post(http, **body)
    *chunks, last, done = streamed(http, **body, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [x["choices"][0] for x in chunks if x["choices"][0]["index"] == choice["index"]]
        assert "".join(x["text"] for x in parts) == choice["text"]
        assert [x["finish_reason"] for x in parts if x["finish_reason"]] == [choice["finish_reason"]]
        if body["logprobs"] and parts and choice["logprobs"]:
            for name, values in choice["logprobs"].items():
                assert [y for x in parts if x["logprobs"] for y in x["logprobs"][name]] == values
    text = (b"".join(bytes([script[i % len(script)]]) for i in range(body["max_tokens"]))).decode(
        errors="replace"
    )
    answered = whole["choices"][0]["text"].removeprefix("x" if body["echo"] else "")
    if whole["choices"][0]["finish_reason"] == "stop":
        assert not any(x in answered for x in stop)
        assert any(text.startswith(answered + x) for x in stop)
    else:
        assert answered == text


@pytest.mark.parametrize(("n", "prompt"), [(1, "ab"), (2, "ab"), (1, ["ab", "c"])])
@pytest.mark.parametrize("stream", [False, True])
def test_states_are_kept_and_continued(n: int, prompt: Any, stream: bool) -> None:
    states = FakeStates()
    http = client(states=states)
    body = {"prompt": prompt, "n": n, "temperature": 0, "max_tokens": 4, "keep": True}
    if stream:
        *chunks, _ = streamed(http, **body)
        ends = [x for x in chunks if x["choices"][0]["finish_reason"]]
        ids = [x.get("state") or x["choices"][0]["state"] for x in ends]
        told = "".join(c["text"] for x in chunks for c in x["choices"] if c["index"] == 0)
        assert ("state" in ends[0]) == (len(ends) == 1)
    else:
        found = post(http, **body)
        ids = [found["state"]] if "state" in found else [x["state"] for x in found["choices"]]
        told = found["choices"][0]["text"]
        assert ("state" in found) == (len(found["choices"]) == 1)
    assert set(ids) == states.kept.keys()
    onward = post(http, prompt="", state=ids[0], temperature=0, max_tokens=3)
    assert told + onward["choices"][0]["text"] == text_of(greedy("ab", 7))
    assert onward["usage"]["prompt_tokens"] == 6
    assert onward["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}
    assert "state" not in onward


@pytest.mark.parametrize("stream", [False, True])
def test_a_character_may_be_cut_between_two_answers(stream: bool) -> None:
    states, parts, told, state = FakeStates(), ["a€".encode()[:-2], b"\x82", b"\xacb\xe2"], [], None
    for script in [*parts, b"cd"]:
        http = client(served(FakeEngine(script=[*script])), states=states)
        body = {"prompt": "" if state else "x", "max_tokens": len(script), "keep": True, "logprobs": 0}
        body |= {"state": state} if state else {}
        if stream:
            *chunks, _ = streamed(http, **body)
            told.append("".join(x["choices"][0]["text"] for x in chunks))
            state = chunks[-1]["state"]
        else:
            found = post(http, **body)
            told.append(found["choices"][0]["text"])
            state = found["state"]
            offsets = found["choices"][0]["logprobs"]["text_offset"]
        file = http.get(f"/v1/states/{state}").content
        assert http.put(f"/v1/states/{state}", content=file).status_code == 200
    assert told == ["a", "", "€b", "\ufffdcd"]
    assert stream or offsets == [1, 2]


def test_a_character_that_no_other_answer_can_complete_is_shown_as_broken() -> None:
    states = FakeStates()
    http = client(served(FakeEngine(script=[*b"a\xc3"])), states=states)
    assert post(http, prompt="x", max_tokens=2)["choices"][0]["text"] == "a\ufffd"
    state = post(http, prompt="x", max_tokens=2, keep=True)["state"]
    again = post(http, prompt="", state=state, max_tokens=0, keep=True)["state"]
    assert again == state  # it holds what the first one holds
    http = client(served(FakeEngine(script=[0xA9])), states=states)
    assert post(http, prompt="", state=state, max_tokens=1, stop="é")["choices"][0]["text"] == ""
    assert post(http, prompt="b", state=state, max_tokens=1)["choices"][0]["text"] == "\ufffd"


def test_with_a_state_the_prompt_follows_without_a_start_symbol() -> None:
    engine = FakeEngine()
    http = client(served(engine, start_token=True))
    state = post(http, prompt="ab", keep=True)["state"]
    found = post(http, prompt="cd", state=state, max_tokens=1)
    assert engine.jobs[1].tokens == [99, 100]
    assert found["usage"]["prompt_tokens"] == 3 + 16 + 2


def test_states_that_cannot_be_continued() -> None:
    states = FakeStates()
    http = client(served(), served(name="other", digest="cd" * 32), states=states)
    id = post(http, prompt="a", keep=True)["state"]
    for name, state, status, code in [
        ("book", "0" * 64, 404, "unknown_state"),
        ("other", id, 400, "foreign_state"),
    ]:
        answer = http.post("/v1/completions", json={"model": name, "state": state})
        assert error(answer, status)["code"] == code
    states.damaged.add(id)
    answer = http.post("/v1/completions", json={"model": "book", "state": id})
    assert error(answer, 400)["code"] == "damaged_state"
    assert (
        error(http.post("/v1/completions", json={"model": "book", "state": "../x"}), 400)["param"] == "state"
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, [""]), ("a", ["a"]), ([], [[]]), ([1], [[1]]), ([[1], []], [[1], []]), (["a", ""], ["a", ""])],
)
def test_forms_of_prompts(given: Any, expected: Any) -> None:
    assert CompletionRequest(model="m", prompt=given).prompts == expected


def test_every_chunk_tells_the_usage_where_it_is_asked_for() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = streamed(client(), prompt="abc", max_tokens=30, stream_options=options)
    counts = [x["usage"]["completion_tokens"] for x in chunks]
    assert len(counts) > 2
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 30
    assert {x["usage"]["prompt_tokens"] for x in chunks} == {3}


@pytest.mark.parametrize("keep", [False, True])
def test_a_character_that_an_end_cuts_is_shown_as_broken(keep: bool) -> None:
    choice = Choice(VocabularyText(Vocabulary("text")), [], [], [], [[10]], keep)
    assert choice.take(Drawn(0, [*b"a\xc3\n"], finish="stop")) == "a\ufffd"
    assert choice.held == []
