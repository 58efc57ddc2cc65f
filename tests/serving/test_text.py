"""Text and ids, stop texts and chat templates."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from unrolled.data import Vocabulary
from unrolled.serving.stops import StopFinder, Watch
from unrolled.serving.templates import render
from unrolled.serving.text import Text, TokenizerText, VocabularyText

BYTES = VocabularyText(Vocabulary("text"))
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of byte pairs, as Hugging Face saves it."""
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the hat"] * 5, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "eos_token": {"content": "<|end|>", "lstrip": False},
        "bos_token": "<|start|>",
        "pad_token": None,
        "chat_template": [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    return path


@pytest.fixture(params=["bytes", "pairs"])
def text(request: pytest.FixtureRequest, folder: Path) -> Text:
    return BYTES if request.param == "bytes" else TokenizerText(folder)


@pytest.mark.parametrize("given_text", ["the cat", "é€😀 the", "", "\n\t a"])
def test_what_was_encoded_is_decoded_also_id_by_id(text: Text, given_text: str) -> None:
    ids = text.encode(given_text)
    assert text.decode(ids) == given_text
    read = text.reader()
    assert "".join(read([id]) for id in ids) + read([], final=True) == given_text
    assert "".join(map(text.piece, ids)) == given_text or not given_text.isascii()


def test_a_part_of_a_character_is_held_back_until_the_end(text: Text) -> None:
    ids = text.encode("a€")
    read = text.reader()
    assert read(ids[:-1]) == "a"
    assert read([], final=True) == "\ufffd"


@given(st.lists(st.integers(0, 255), max_size=30), st.data())
def test_blocks_of_any_length_read_the_same(ids: list[int], data: st.DataObject) -> None:
    read, found, at = BYTES.reader(), "", 0
    while at < len(ids):
        size = data.draw(st.integers(1, 5))
        found += read(ids[at : at + size])
        at += size
    assert found + read([], final=True) == bytes(ids).decode(errors="replace")


def test_pieces_tell_parts_of_characters_apart(text: Text) -> None:
    ids = text.encode("€")
    assert len({text.piece(id) for id in ids}) == len(ids) == 3


def test_a_tokenizer_of_hugging_face(folder: Path) -> None:
    text = TokenizerText(folder)
    assert text.ends == [[0], [5]]
    assert text.special_tokens == {"eos_token": "<|end|>", "bos_token": "<|start|>"}
    assert text.chat_template == "yes"
    assert text.encode("<|start|>the")[0] == 1
    assert (text.decode([0]), text.piece(0), text.piece(9_999)) == ("", "<|end|>", "token:9999")
    (folder / "chat_template.jinja").write_text("file")
    assert TokenizerText(folder).chat_template == "file"
    assert VocabularyText(Vocabulary("text"), folder).chat_template == "file"
    (folder / "chat_template.jinja").unlink()


def test_numbers_are_text_with_spaces() -> None:
    text = VocabularyText(Vocabulary("ids"))
    assert text.encode("3 14") == [3, 14]
    assert (text.decode([3, 14]), text.piece(14)) == (" 3 14", " 14")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: VocabularyText(Vocabulary("image", shape=[2, 2])), "vocabulary is of the kind 'image'"),
        (lambda path: TokenizerText(path / "none"), "none has no tokenizer.json"),
        (lambda path: TokenizerText(path / "damaged"), "tokenizer.json is damaged"),
        (lambda path: BYTES.encode("\ud800"), "surrogates"),
        (lambda path: TokenizerText(path).encode("a\ud800"), "text is not Unicode at character 1"),
    ],
)
def test_what_is_refused(make: Callable[[Path], Any], message: str, folder: Path) -> None:
    (folder / "damaged").mkdir(exist_ok=True)
    (folder / "damaged" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=message):
        make(folder)


def first_stop(text: str, stops: list[str]) -> int | None:
    """Where the stop text that ends first begins."""
    places = [(text.find(x) + len(x), text.find(x)) for x in stops if x in text]
    return min(places)[1] if places else None


@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_a_stop_text_is_found_across_parts(parts: list[str], stops: list[str]) -> None:
    finder, told, whole = StopFinder(stops), "", "".join(parts)
    for number, part in enumerate(parts, 1):
        told += finder.feed(part)
        so_far = "".join(parts[:number])
        assert finder.found == any(x in so_far for x in stops)
        assert whole.startswith(told)
    place = first_stop(whole, stops)
    assert (told if finder.found else told + finder.rest()) == whole[:place]


def test_what_cannot_be_a_stop_text_is_not_held_back() -> None:
    finder = StopFinder(["END", "\n\n"])
    assert [finder.feed(x) for x in ("a\n", "b E", "N", "d", "\n", "\nx")] == ["a", "\nb ", "", "ENd", "", ""]
    assert finder.found


def test_a_watch_tells_how_many_tokens_to_keep() -> None:
    watch = Watch(BYTES, ["é", "stop"], 2)
    assert watch(0, list(b"a st")) is None
    assert watch(1, list(b"ab")) is None
    assert watch(0, list(b"op it")) == 2
    assert watch(1, list("xé€".encode())) == 3


def test_templates_are_sandboxed_and_have_what_hugging_face_gives() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{% break %}{% endfor %}{{ strftime_now('%%') }}"
    assert render(template, MESSAGES, {"bos_token": "<s>"}) == '<s>{"role": "user", "content": "hi"}%'
    for wrong in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% if %}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
    ):
        with pytest.raises(ValueError, match="the chat template refuses these messages"):
            render(wrong, MESSAGES, {})
