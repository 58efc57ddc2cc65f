"""Tokenizers of language models: exact round trips, one id at a time, and the same merges everywhere."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from corpora import story
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from unrolled.data import Vocabulary
from unrolled.data._bpe import SMALLEST
from unrolled.data._tokenizer import BLANKS, END, LONGEST_PIECE, TextTokenizer, byte_letters, pieces

TEXTS = [story(i) for i in range(200)]
PAIRS = TextTokenizer.learn(TEXTS, 340)
ANY = st.text(st.characters(codec="utf-8"))


def metaspace() -> TextTokenizer:
    """A tokenizer whose tokens are not bytes: words with a mark where a blank was."""
    words = sorted({x for text in TEXTS for x in text.split()})
    vocab = {"<unk>": 0, "</s>": 1} | {f"▁{word}": i + 2 for i, word in enumerate(words)}
    values = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }
    return TextTokenizer.of_json(json.dumps(values), 1)


@given(ANY)
def test_any_text_comes_back(text):
    ids = PAIRS.encode(text)
    assert PAIRS.decode(ids) == text
    assert PAIRS.end not in ids
    read = PAIRS.reader()
    assert "".join(map(read, ids)) == text


@pytest.mark.parametrize(
    "text", [END, f"a{END}b", " ", "  two  blanks ", "\n\n", "\ufeffmark", "the cat\r\n"]
)
def test_what_looks_special_is_text(text):
    ids = PAIRS.encode(text)
    assert ids
    assert 0 not in ids
    assert PAIRS.decode(ids) == text


@given(st.lists(st.integers(0, 360), max_size=30))
def test_bytes_that_are_no_text_are_replaced_as_they_come(ids):
    read = PAIRS.reader()
    told = "".join(map(read, ids))
    whole = PAIRS.decode(ids)
    assert whole.startswith(told)
    assert set(whole[len(told) :]) <= {"\ufffd"}  # a part of a character at the end is held back


def test_a_part_of_a_character_waits():
    read = PAIRS.reader()
    bytes_of = {bytes([byte]): PAIRS.id_of(letter) for letter, byte in byte_letters().items()}
    assert [read(bytes_of[bytes([byte])]) for byte in "€!".encode()] == ["", "", "€", "!"]


def test_frequent_words_become_one_token():
    assert len(PAIRS.encode(" birds")) == 1
    assert len(PAIRS) == 340
    assert PAIRS.encode("the birds") != PAIRS.encode("birds the")


def test_long_texts_are_encoded_in_pieces_as_if_whole():
    text = "".join(TEXTS) * 30
    assert len(list(pieces(text))) > 1
    ids = PAIRS.encode(text)
    assert ids == PAIRS.encode_piece(text)
    assert PAIRS.encode_array(text).tolist() == ids
    assert PAIRS.encode_array("").tolist() == []
    unbroken = "x" * (LONGEST_PIECE + 5)
    assert PAIRS.decode(PAIRS.encode(unbroken)) == unbroken


@pytest.mark.slow
def test_learning_is_the_same_in_every_process_with_any_number_of_threads():
    program = (
        "import hashlib, sys; sys.path.insert(0, sys.argv[1]); from corpora import story;"
        "from unrolled.data._tokenizer import TextTokenizer;"
        "texts = [story(i) for i in range(200)];"
        "print(hashlib.sha256(TextTokenizer.learn(texts, 340).to_json().encode()).hexdigest())"
    )
    folder = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120
    found = {
        subprocess.run(
            [sys.executable, "-c", program, folder],
            env=os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for threads in ("1", "4")
    }
    assert len(found) == 1
    assert PAIRS.to_json() == TextTokenizer.learn(TEXTS, 340).to_json()


def test_without_text_there_are_the_bytes_and_the_end():
    tokenizer = TextTokenizer.learn([], SMALLEST)
    assert len(tokenizer) == SMALLEST
    assert len(tokenizer.encode("né")) == 3
    assert sorted(tokenizer.contents) == sorted([b"", *(bytes([x]) for x in range(256))])


def test_json_keeps_everything():
    kept = TextTokenizer.of_json(PAIRS.to_json(), PAIRS.end)
    text = f"the cat {END} €"
    assert (kept.encode(text), kept.contents, len(kept)) == (PAIRS.encode(text), PAIRS.contents, 340)


def test_what_adds_symbols_to_a_text_is_taken_away():
    values = json.loads(PAIRS.to_json())
    values["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": END, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {END: {"id": END, "ids": [0], "tokens": [END]}},
    }
    values["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    kept = TextTokenizer.of_json(json.dumps(values), 0)
    assert kept.encode("the cat sat on a mat") == PAIRS.encode("the cat sat on a mat")
    assert kept.to_json() == PAIRS.to_json()


def test_tokens_that_are_not_bytes_are_read_by_the_library():
    tokenizer = metaspace()
    assert tokenizer.contents is None
    ids = tokenizer.encode("the cat sat")
    assert tokenizer.decode(ids) == "the cat sat"
    assert "".join(map(tokenizer.reader(), ids)) == "the cat sat"
    vocabulary = Vocabulary("tokenizer", tokenizer=tokenizer.to_json(), end=1)
    assert vocabulary.byte_counts() is None
    assert vocabulary.encode("the cat") == ids[:2]
    assert "".join(map(vocabulary.reader(ids[:1]), ids[1:])) == " cat sat"


def test_a_broken_byte_of_a_tokenizer_of_the_library_is_read():
    names = ["<0x41>", "<0xE2>", "world"]
    library = Tokenizer(models.BPE({name: id for id, name in enumerate(names)}, [], byte_fallback=True))
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    read = TextTokenizer(library, None).reader()
    assert [read(id) for id in (0, 1, 2, 99)] == ["A", "", "\ufffdworld", ""]


def test_the_vocabulary_of_a_run(tmp_path):
    vocabulary = Vocabulary("tokenizer", tokenizer=PAIRS.to_json(), end=0, data="stories")
    assert vocabulary.is_text
    vocabulary.check(340)
    vocabulary.check(448)  # rounded up
    with pytest.raises(ValueError, match=r"vocabulary.json has 340 ids, but the model has 339"):
        vocabulary.check(339)
    assert sum(vocabulary.byte_counts()[i] for i in vocabulary.encode("né €")) == len("né €".encode())
    assert vocabulary.same_ids(Vocabulary("tokenizer", tokenizer=PAIRS.to_json(), end=0))
    other = TextTokenizer.learn(TEXTS[:50], 340).to_json()
    assert not vocabulary.same_ids(Vocabulary("tokenizer", tokenizer=other, end=0))
    assert not vocabulary.same_ids(Vocabulary("text"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TextTokenizer.of_json("{}", None), "it is not a tokenizer"),
        (lambda: TextTokenizer.of_json(PAIRS.to_json(), 340), "end is 340, but must be one of the 340 ids"),
        (lambda: PAIRS.encode("a\ud800"), "the text is not Unicode at character 1: it has surrogates"),
        (lambda: Vocabulary("tokenizer"), "tokenizer is None, but must be given with kind 'tokenizer'"),
        (lambda: Vocabulary("text", end=3), "end is 3, but must be None with kind 'text'"),
        (
            lambda: Vocabulary("tokenizer", tokenizer="{").encode("a"),
            "the tokenizer in vocabulary.json is damaged",
        ),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_ids_take_two_bytes_as_long_as_they_fit(monkeypatch):
    for size, dtype in ((2**16, np.uint16), (2**16 + 1, np.uint32)):
        monkeypatch.setattr(PAIRS, "_size", size)
        assert np.array(size - 1).astype(PAIRS.dtype) == size - 1
        assert PAIRS.dtype == dtype


def test_another_end_of_documents_is_another_vocabulary():
    one, other = (Vocabulary("tokenizer", tokenizer=PAIRS.to_json(), end=end) for end in (0, 1))
    assert not one.same_ids(other)
    assert not one.same_ids(Vocabulary("tokenizer", tokenizer=PAIRS.to_json()))


def test_a_text_that_has_the_word_unk_has_one_id_for_it():
    tokenizer = TextTokenizer.learn_words(["<unk> b a <unk> b a <unk> c"], BLANKS)  # as WikiText does
    assert [tokenizer.name(id) for id in range(len(tokenizer))] == ["<unk>", "a", "b"]
    assert tokenizer.encode("a <unk> c") == [1, 0, 0]
