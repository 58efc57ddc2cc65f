"""Text and ids, stop texts and chat templates."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from unrolled.data import TokenTexts, Vocabulary
from unrolled.data._tokenizer import TextTokenizer
from unrolled.interop.hf.convert import character_tokenizer
from unrolled.serving.choices import Choice
from unrolled.serving.jobs import Drawn
from unrolled.serving.routes.continuing import encode
from unrolled.serving.snapshot import MOST_HELD
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


@pytest.mark.parametrize(
    "given_text", ["the cat", "é€😀 the", "", "\n\t a", "\ufffd\ufffd the\ufffd\ufffd\ufffd"]
)
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


@pytest.mark.slow
@given(st.text(max_size=8), st.integers(0, 40))
@example("<|end|>", 0)
@example(" a", 1)
def test_a_cut_character_is_completed_by_the_next_reader(folder: Path, given_text: str, cut: int) -> None:
    (folder / "bytes").mkdir(exist_ok=True)
    TOKENIZERS["bytes"].save(str(folder / "bytes" / "tokenizer.json"))
    fallback = TokenizerText(folder / "bytes")
    named = [TOKENIZERS["bytes"].token_to_id(f"<0x{byte:02X}>") for byte in given_text.encode()]
    pairs = TokenizerText(folder)
    learnt = TextTokenizer.learn(["the cat sat on the mat"] * 5, 300)
    run = TokenizerText(folder, Vocabulary("tokenizer", tokenizer=learnt.to_json(), end=learnt.end))
    for text in (BYTES, pairs, run, fallback):
        ids = named if text is fallback else text.encode(given_text)
        first = text.reader()
        told = first(ids[:cut])
        assert len(first.held) <= MOST_HELD
        second = text.reader(ids[max(0, cut - 1) : cut], first.held)
        # A Hugging Face tokenizer reads the name of a special token as that token, which has no text.
        expected = given_text.replace("<|end|>", "") if text is pairs else given_text
        if text is fallback:
            expected = expected.removeprefix(" ")  # the space that it puts before a text
        assert told + second(ids[cut:], final=True) == expected


@given(st.lists(st.integers(0, 255), max_size=30), st.data())
def test_blocks_of_any_length_read_the_same(ids: list[int], data: st.DataObject) -> None:
    read, found, at = BYTES.reader(), "", 0
    while at < len(ids):
        size = data.draw(st.integers(1, 5))
        found += read(ids[at : at + size])
        at += size
    assert found + read([], final=True) == bytes(ids).decode(errors="replace")


def byte_fallback() -> Tokenizer:
    """A tokenizer like those of Llama and Mistral: a token of a byte for what has no other token."""
    names = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"aeh",
        "▁hello",
        "▁world",
        "world",
    ]
    tokenizer = Tokenizer(models.BPE({name: id for id, name in enumerate(names)}, [], byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def of_words(decoder: Any, names: list[str]) -> Tokenizer:
    vocab = {name: id for id, name in enumerate(["<unk>", *names])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


TOKENIZERS = {
    "bytes": byte_fallback(),
    "metaspace": of_words(decoders.Metaspace(), ["▁the", "▁cat", "cat", "s", "▁"]),
    "word pieces": of_words(decoders.WordPiece(), ["the", "cat", "##s", "##ing", "."]),
    "ends of words": of_words(decoders.BPEDecoder(), ["the</w>", "cat", "s</w>"]),
    "blanks": of_words(None, ["the", "cat", "sat"]),
    "fused": of_words(decoders.Fuse(), ["the", " ", "cat"]),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.data())
def test_a_text_is_read_on_where_it_was_left(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    whole = [
        id for id in range(tokenizer.get_vocab_size()) if not tokenizer.id_to_token(id).startswith("<0x")
    ]
    ids = data.draw(st.lists(st.sampled_from([*whole, 10**6]), min_size=1, max_size=12))
    cut = data.draw(st.integers(0, len(ids)))
    texts = TokenTexts(tokenizer)
    first, second = texts.reader(), texts.reader(ids[:cut])
    assert first(ids[:cut], final=True) + second(ids[cut:], final=True) == tokenizer.decode(ids)


def prepending() -> dict[str, Tokenizer]:
    """Tokenizers that put a blank before each text, as those of T5, Llama and RoBERTa do."""
    of_words = Tokenizer(models.BPE(unk_token="<unk>"))
    of_words.pre_tokenizer, of_words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    normalized = Tokenizer(models.BPE(unk_token="<unk>"))
    normalized.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    normalized.decoder = decoders.Sequence(parts)
    of_bytes = Tokenizer(models.BPE())
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    of_bytes.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=120, special_tokens=["<unk>", "<s>"], initial_alphabet=["\n", "Ċ"], show_progress=False
    )
    found = {"Metaspace": of_words, "Prepend": normalized, "ByteLevel": of_bytes}
    for tokenizer in found.values():
        tokenizer.train_from_iterator(["the cat sat on the mat. the cats sat, the mats!"] * 5, trainer)
    return found


@pytest.mark.parametrize("name", prepending())
@pytest.mark.parametrize("rest", ["s sat", ". the cat", " sat", "\nthe", "  the", "", "the\n<s>"])
def test_no_blank_is_put_into_the_middle_of_a_text(name: str, rest: str, tmp_path: Path) -> None:
    prepending()[name].save(str(tmp_path / "tokenizer.json"))
    text = TokenizerText(tmp_path)
    before, within = text.encode("the cat"), text.encode(rest, within=True)
    assert text.decode(before + within) == text.decode(before) + rest.removesuffix("<s>")
    if rest and not rest.startswith(" "):
        assert within != text.encode(rest)


@pytest.mark.parametrize("name", prepending())
@pytest.mark.parametrize("after", ["<s>\nthe mat", "<s>the mat<s>", "the mat"])
def test_what_follows_an_end_token_is_read_as_in_the_whole_text(
    name: str, after: str, tmp_path: Path
) -> None:
    prepending()[name].save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    text = TokenizerText(tmp_path)
    [[end]] = text.ends
    state: Any = SimpleNamespace(pending=end)
    ids = asyncio.run(encode(text, after, "messages", state, special=True))
    whole = "the cat<s>" + after.removeprefix("<s>")
    assert [*text.encode("the cat"), end, *ids] == text.encode(whole, special=True)


@given(st.lists(st.integers(0, len(TOKENIZERS["bytes"].get_vocab()) + 3), max_size=30), st.text(max_size=5))
@example([], " a")
@example([0], " a")
def test_bytes_that_are_no_text_do_no_harm(ids: list[int], text: str) -> None:
    tokenizer = TOKENIZERS["bytes"]
    texts = TokenTexts(tokenizer)
    read = texts.reader(ids)
    read(ids)
    read([], final=True)
    begun = any(id not in texts.special and tokenizer.id_to_token(id) is not None for id in ids)
    told = read([tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()], final=True)
    assert told == (text if begun else text.removeprefix(" "))  # it puts a space before the first text


@pytest.mark.parametrize("token", ["<0x80>", "<0xE2>", "<unk>", None, "a"])
def test_few_ids_are_decoded_at_a_time(token: str | None) -> None:
    longest = 0

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(TOKENIZERS["bytes"], name)

        def decode(self, ids: list[int]) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return TOKENIZERS["bytes"].decode(ids)

    read = TokenTexts(Counting()).reader()
    id = 10**6 if token is None else TOKENIZERS["bytes"].token_to_id(token)
    assert len(read([id] * 1_000, final=True)) == (0 if token in ("<unk>", None) else 1_000)
    assert longest <= 6


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["<0x41>", "<0xE2>", "▁world"], "A\ufffd world"),
        (["<0xC3>", "<0xA9>", "<0x80>", "▁world"], "é\ufffd world"),
        (["<0x80>", "<0xE2>", "<0x82>", "<0xAC>"], "\ufffd€"),
    ],
)
def test_a_broken_byte_leaves_what_is_around_it(names: list[str], told: str) -> None:
    tokenizer = TOKENIZERS["bytes"]
    assert TokenTexts(tokenizer).reader()([tokenizer.token_to_id(name) for name in names]) == told


def test_all_of_a_prompt_is_read(tmp_path: Path) -> None:
    tokenizer = of_words(None, ["the"])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TokenizerText(tmp_path).encode("the the the") == [1, 1, 1]


def test_a_stop_text_may_begin_with_the_blank_after_the_prompt(tmp_path: Path) -> None:
    TOKENIZERS["bytes"].save(str(tmp_path / "tokenizer.json"))
    text = TokenizerText(tmp_path)
    hello, world, bare = (TOKENIZERS["bytes"].token_to_id(name) for name in ("▁hello", "▁world", "world"))
    assert Watch(text, [" world"], [hello], [], 1)(0, [world]) == 1
    assert Watch(text, [" world"], [], [], 1)(0, [world]) is None
    choice = Choice(text, [hello], [], [], [], False)
    assert choice.take(Drawn(0, [world, world], None, "length")) == " world world"
    assert (text.piece(world), text.piece(bare)) == (" world", "world")
    assert (text.piece(1), text.piece_bytes(1)) == ("<s>", list(b"<s>"))
    assert text.piece_bytes(world) == list(b" world")


def test_pieces_tell_parts_of_characters_apart(text: Text) -> None:
    ids = text.encode("€")
    assert len({text.piece(id) for id in ids}) == len(ids) == 3


@pytest.mark.parametrize("kind", ["bytes", "pairs", "run", "llama"])
def test_the_bytes_of_pieces_are_those_of_the_text(kind: str, folder: Path, tmp_path: Path) -> None:
    made: Text
    if kind == "run":
        tokenizer = TextTokenizer.learn(["það er ð í ð"] * 5, 262)
        made = TokenizerText(tmp_path, Vocabulary("tokenizer", tokenizer=tokenizer.to_json()))
    elif kind == "llama":
        TOKENIZERS["bytes"].save(str(tmp_path / "tokenizer.json"))
        made = TokenizerText(tmp_path)
    else:
        made = BYTES if kind == "bytes" else TokenizerText(folder)
    given_text = "world €ð😀"
    ids = made.encode(given_text, within=True)
    assert bytes(x for id in ids for x in made.piece_bytes(id) or ()).strip().decode() == given_text
    broken = [made.piece(id) for id in made.encode("😀", within=True)]
    assert broken[-4:] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80"]


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


def test_a_run_reads_the_name_of_its_end_as_characters_unless_a_template_wrote_it(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.learn(["the cat sat on the mat"] * 5, 300)
    vocabulary = Vocabulary("tokenizer", tokenizer=tokenizer.to_json(), end=tokenizer.end)
    text = TokenizerText(tmp_path, vocabulary)
    given = "a cat<|endoftext|>"
    assert text.encode(given) == vocabulary.encode(given)
    assert text.decode(text.encode(given)) == given
    assert text.encode(given, special=True) == [*text.encode("a cat"), tokenizer.end]


def test_a_character_without_an_id_is_refused(tmp_path: Path) -> None:
    character_tokenizer("abc").save_pretrained(tmp_path)
    text = TokenizerText(tmp_path)
    assert text.encode("cab") == [2, 0, 1]
    with pytest.raises(ValueError, match=r"^the tokenizer cannot encode the text: .*UNK"):
        text.encode("cat")


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
    watch = Watch(BYTES, ["é", "stop"], [], [], 2)
    assert watch(0, list(b"a st")) is None
    assert watch(1, list(b"ab")) is None
    assert watch(0, list(b"op it")) == 2
    assert watch(1, list("xé€".encode())) == 3


def test_templates_are_sandboxed_and_have_what_hugging_face_gives() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{% break %}{% endfor %}{{ strftime_now('%%') }}"
    assert render(template, MESSAGES, {"bos_token": "<s>"}) == '<s>{"role": "user", "content": "hi"}%'
    marked = "{% for m in messages %}{% generation %}{{ m.content }}{% set x = 1 %}{% endgeneration %}{{ x }}{% endfor %}"
    assert render(marked, MESSAGES, {}) == "hi"
    dumped = "{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}"
    assert render(dumped, MESSAGES, {}) == r'{"a":1,"b":"\u00e9"}'
    for wrong in (
        "{% generation %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% if %}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
    ):
        with pytest.raises(ValueError, match="the chat template refuses these messages"):
            render(wrong, MESSAGES, {})
