"""The server asked by other people's clients, for `make test-serve`: a process, a small model, nothing faked."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch

from unrolled.data import Vocabulary
from unrolled.models import Decoder, DecoderConfig

pytestmark = [pytest.mark.serve, pytest.mark.filterwarnings("ignore")]
SHAPE = {"d_model": 32, "n_layers": 2, "n_heads": 2, "max_length": 64}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
HELLO: Any = [{"role": "user", "content": "hi"}]
CASES = int(os.environ.get("SCHEMATHESIS_CASES", "300"))
OPERATIONS = 18


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.manual_seed(0)
    text = Decoder(DecoderConfig(256, positions="rotary", **SHAPE))
    return Vocabulary("text").attach(text).eval()


@pytest.fixture(scope="module")
def address(model: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of a text model with a chat template, and of one that draws."""
    root = tmp_path_factory.mktemp("served")
    model.save(root / "book")
    (root / "book" / "chat_template.jinja").write_text(TEMPLATE)
    pixels = Decoder(DecoderConfig(16, start_token=True, **SHAPE))
    Vocabulary("image", shape=[3, 4]).attach(pixels).save(root / "digits")
    command = [sys.executable, "-m", "unrolled", "serve", root / "book", root / "digits", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"serving book, digits at (\S+)", line):
            break
    else:
        raise AssertionError("the server did not start")
    drained = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)  # its log
    try:
        yield found[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        drained.wait(5)


@pytest.fixture(scope="module")
def openai(address: str) -> Any:
    module = pytest.importorskip("openai")
    return module.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def test_openai_models(openai: Any) -> None:
    assert [x.id for x in openai.models.list()] == ["book", "digits"]
    assert openai.models.retrieve("book").model_extra["unrolled"]["chat"]


def test_openai_completions(openai: Any) -> None:
    options = {"model": "book", "prompt": "Once", "max_tokens": 8, "seed": 1}
    found = openai.completions.create(**options, n=2, logprobs=2, echo=True)
    assert [x.finish_reason for x in found.choices] == ["length"] * 2
    told = found.choices[0].logprobs
    assert told.tokens[:4] == ["O", "n", "c", "e"]
    assert len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == 12
    assert told.token_logprobs[0] is None
    chunks = list(openai.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    whole = openai.completions.create(**options)
    assert "".join(x.choices[0].text for x in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].usage == found.usage.model_copy(
        update={
            "completion_tokens": 8,
            "total_tokens": 12,
            "prompt_tokens_details": chunks[-1].usage.prompt_tokens_details,
        }
    )


def test_openai_chat(openai: Any) -> None:
    options = {"model": "book", "messages": HELLO, "max_tokens": 8, "seed": 1}
    found = openai.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    assert found.choices[0].message.role == "assistant"
    assert [len(x.top_logprobs) for x in found.choices[0].logprobs.content] == [3] * 8
    chunks = list(openai.chat.completions.create(**options, stream=True))
    assert "".join(x.choices[0].delta.content or "" for x in chunks) == found.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_openai_states(openai: Any) -> None:
    options = {"model": "book", "temperature": 0, "max_tokens": 6}
    whole = openai.completions.create(**{**options, "max_tokens": 12}, prompt="Once upon")
    first = openai.completions.create(**options, prompt="Once upon", extra_body={"keep": True})
    state = first.model_extra["state"]
    for _ in range(2):
        rest = openai.completions.create(**options, prompt="", extra_body={"state": state})
        assert rest.usage.prompt_tokens_details.cached_tokens >= 14
        assert rest.usage.prompt_tokens == 15
        if "\ufffd" not in whole.choices[0].text:
            assert first.choices[0].text + rest.choices[0].text == whole.choices[0].text
    *_, last = openai.chat.completions.create(
        model="book", messages=HELLO, max_tokens=3, stream=True, extra_body={"keep": True}
    )
    assert len(last.model_extra["state"]) == 64


def test_openai_errors(openai: Any) -> None:
    import openai as module

    with pytest.raises(module.NotFoundError) as unknown:
        openai.completions.create(model="none", prompt="a")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(module.BadRequestError) as wrong:
        openai.completions.create(model="book", prompt="a", max_tokens=-1)
    assert wrong.value.param == "max_tokens"
    with pytest.raises(module.NotFoundError):
        openai.completions.create(model="book", prompt="a", extra_body={"state": "0" * 64})


def test_langchain(address: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(base_url=f"{address}/v1", api_key="none", model="book", seed=1, max_tokens=8)
    answer = chat.invoke([("user", "hi")])
    assert answer.usage_metadata["output_tokens"] == 8
    assert "".join(x.content for x in chat.stream([("user", "hi")])) == answer.content


def test_lm_eval_has_the_log_likelihoods_of_the_model(address: str, model: Decoder) -> None:
    module = pytest.importorskip("lm_eval.models.openai_completions")
    from lm_eval.api.instance import Instance

    lm = module.LocalCompletionsAPI(
        base_url=f"{address}/v1/completions",
        model="book",
        tokenizer_backend="remote",
        max_length=64,
        batch_size=2,
    )
    pairs = [("The cat", " sat on it."), ("A", "é€"), ("one two three", " f"), ("x" * 40, "y" * 9)]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    for (context, continuation), (found, greedy) in zip(pairs, lm.loglikelihood(asked), strict=True):
        ids = torch.tensor(list((context + continuation).encode()))
        with torch.no_grad():
            logprobs = model(ids[None, :-1])[0].log_softmax(-1)
        start = len(context.encode()) - 1
        expected = logprobs.gather(1, ids[1:, None])[start:, 0]
        assert found == pytest.approx(float(expected.sum()), abs=1e-4)
        assert greedy == bool((logprobs.argmax(-1)[start:] == ids[1 + start :]).all())


def test_schemathesis_finds_no_server_error(address: str, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    each = max(1, CASES // OPERATIONS)
    command = [Path(sys.executable).parent / "schemathesis", "run", f"{address}/openapi.json"]
    options = [
        "--max-examples",
        str(each),
        "--checks",
        "not_a_server_error,content_type_conformance",
        "--seed",
        "1",
    ]
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    counts = httpx.get(f"{address}/metrics").text
    assert 'status="5' not in counts
