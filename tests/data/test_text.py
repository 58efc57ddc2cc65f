import gzip
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from unrolled import data
from unrolled.contract import IGNORED
from unrolled.data import Vocabulary
from unrolled.data._codec import Codec
from unrolled.data._tokenizer import TextTokenizer
from unrolled.data.text import TextDataset


def write(folder, content: bytes | str, name: str = "file.txt"):
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def whole_text(dataset: TextDataset) -> str:
    """Put the text together again from what training and validation can see."""
    val = [batch.targets[batch.targets != IGNORED] for batch in dataset.eval_batches(4)]
    first = next(dataset.eval_batches(1)).inputs[0, :1]
    return dataset.decode(torch.cat([first, *val]))


def test_the_vocabulary_is_the_sorted_characters_of_both_parts(tmp_path):
    dataset = TextDataset(write(tmp_path, "cabb" * 20 + "z\n"), length=2)
    assert dataset.characters == ("\n", "a", "b", "c", "z")
    assert dataset.vocab_size == 5
    assert dataset.encode("abz").tolist() == [1, 2, 4]
    assert dataset.decode(torch.tensor([3, 1, 2])) == "cab"


def test_a_byte_order_mark_is_dropped_and_line_ends_become_newlines(tmp_path):
    dataset = TextDataset(
        write(tmp_path, b"\xef\xbb\xbf" + b"one\r\ntwo\rthree\n" * 9), length=3, val_fraction=0.5
    )
    assert "\ufeff" not in dataset.characters
    assert "\r" not in dataset.characters
    assert whole_text(dataset) == ("one\ntwo\nthree\n" * 9)[63:]


def test_characters_outside_the_basic_plane_are_one_token(tmp_path):
    text = "naïve 注意 🙂 é " * 20
    dataset = TextDataset(write(tmp_path, text), length=5)
    assert dataset.characters == tuple(sorted(set(text)))
    assert dataset.decode(dataset.encode("🙂注ï")) == "🙂注ï"
    assert len(dataset.encode("🙂")) == 1


@pytest.mark.parametrize("n_characters", [255, 256, 257, 70_000])
def test_ids_fit_vocabularies_of_every_size(tmp_path, n_characters):
    points = [
        i for i in range(1, n_characters + 2_100) if not 0xD800 <= i < 0xE000 and chr(i) not in "\r\ufeff"
    ]
    text = "".join(map(chr, points[:n_characters]))
    dataset = TextDataset(write(tmp_path, text), length=1, val_fraction=0.5)
    assert dataset.vocab_size == n_characters
    assert whole_text(dataset) == text[int(n_characters * 0.5) :]


def test_bytes_are_the_file_exactly_as_it_is(tmp_path):
    content = b"\xef\xbb\xbf\xff\r\n" + bytes(range(256))
    dataset = TextDataset(write(tmp_path, content), level="bytes", length=4, val_fraction=0.9)
    assert (dataset.vocab_size, dataset.characters) == (256, None)
    targets = torch.cat([batch.targets.flatten() for batch in dataset.eval_batches(3)])
    assert bytes(targets[targets != IGNORED].tolist()) == content[27:]
    assert dataset.encode("é").tolist() == [0xC3, 0xA9]
    ids = torch.tensor([0xC3, 0xA9, 0xC3])
    assert dataset.decode(ids) == dataset.vocabulary.decode(ids) == "é\ufffd"


def test_a_gzip_file_is_read_as_the_text_inside(tmp_path):
    path = write(tmp_path, gzip.compress(b"to be or not to be " * 20), "text.gz")
    assert TextDataset(path, length=8).characters == tuple(sorted(set("to be or not to be ")))


@given(text=st.text(st.characters(codec="utf-8")), level=st.sampled_from(["chars", "bytes"]))
@example(text="", level="chars")
def test_decode_undoes_encode(text, level):
    codec = Codec(sorted(set(text)) if level == "chars" else None)
    ids = codec.encode(text)
    assert ids.dtype == torch.int64
    assert codec.decode(ids) == codec.decode(ids.tolist()) == text


@pytest.mark.parametrize("order", ["random", "drawn"])
def test_windows_are_pieces_of_their_own_part_and_reach_all_of_it(tmp_path, order):
    text = "".join(chr(0x100 + i) for i in range(100))  # every character tells its place
    dataset = TextDataset(write(tmp_path, text), length=7, val_fraction=0.3, order=order)
    for split, (first, last) in {"train": (0, 69), "val": (70, 99)}.items():
        inputs, targets, *_ = dataset.batch(split, step=0, batch_size=2_000, seed=0)
        assert torch.equal(targets, inputs + 1)
        assert torch.equal(inputs, inputs[:, :1] + torch.arange(7))
        assert (inputs.min(), targets.max()) == (first, last)


@given(n=st.integers(20, 200), length=st.integers(1, 9), batch_size=st.integers(1, 12))
def test_evaluation_predicts_every_token_but_the_first_exactly_once(tmp_path_factory, n, length, batch_size):
    path = tmp_path_factory.getbasetemp() / "places.txt"
    path.write_text("".join(chr(0x100 + i) for i in range(n)))
    dataset = TextDataset(path, length=length, val_fraction=0.5)
    batches = list(dataset.eval_batches(batch_size))
    inputs, targets = (torch.cat([batch[i] for batch in batches]) for i in range(2))
    assert inputs.shape == targets.shape == (dataset.epoch_size("val"), length)
    assert all(len(batch.inputs) == batch_size for batch in batches[:-1])
    known = targets != IGNORED
    assert targets[known].tolist() == list(range(n // 2 + 1, n))
    assert torch.equal(inputs[known], targets[known] - 1)
    assert (
        not known.flatten().diff().any() or known.flatten().int().diff().sum() == -1
    )  # filled up at the end only


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "lines"}, "level is 'lines', but must be one of 'chars', 'bytes'"),
        ({"length": 0}, "length is 0, but must be an integer of at least 1"),
        ({"length": "64"}, "length is '64', but"),
        ({"val_fraction": 1.0}, "val_fraction is 1.0, but must be a number in \\(0, 1\\)"),
        ({"val_fraction": "a"}, "val_fraction is 'a', but"),
        ({"length": 10}, "length is 10, but must be less than the 10 chars of the val part of .*file.txt"),
        ({"length": 95, "val_fraction": 0.05}, "length is 95, but must be less than the 5 chars of the val"),
        ({"length": 5, "val_fraction": 0.95}, "length is 5, but must be less than the 5 chars of the train"),
        (
            {"path": "none"},
            r"'none', which is neither a file nor a known text \(tiny-shakespeare, war-and-peace, wiki",
        ),
        ({"path": "."}, "path is '.', which is neither a file"),
    ],
)
def test_impossible_options_are_refused(tmp_path, options, message):
    path = write(tmp_path, "0123456789" * 10)
    with pytest.raises(ValueError, match=message):
        data.load("text", **({"path": path} | options))


def test_a_second_file_that_is_too_short_is_named(tmp_path):
    path, short = write(tmp_path, "0123456789" * 10), tmp_path / "short.txt"
    short.write_text("0123")
    with pytest.raises(ValueError, match=r"length is 8, but must be less than the 4 chars of .*short.txt$"):
        TextDataset(path, length=8, val_path=short)


def test_an_empty_file_is_refused(tmp_path):
    for level in ("chars", "bytes"):
        with pytest.raises(ValueError, match="is empty, but must hold a text"):
            TextDataset(write(tmp_path, ""), level=level)


def test_a_file_that_is_not_utf8_is_refused_as_characters(tmp_path):
    with pytest.raises(ValueError, match=r"not UTF-8 at byte 4 \(0xe9\): read it with data.level=bytes"):
        TextDataset(write(tmp_path, b"aiif\xe9 " * 99))


def test_a_character_is_decoded_without_a_tensor(monkeypatch):
    """A server decodes every token and every alternative by a reader: a tensor for each takes 30 times as long."""
    vocabulary = Vocabulary("text", characters=list("abc"))
    monkeypatch.setattr(torch, "as_tensor", None)
    read = vocabulary.reader()
    assert [read(token) for token in (2, 0, 1)] == ["c", "a", "b"]
    monkeypatch.undo()
    for token in (-1, 3):
        with pytest.raises(ValueError, match="must be from 0 to 2"):
            read(token)


def test_what_the_vocabulary_lacks_is_named():
    codec = Codec("abc")
    with pytest.raises(ValueError, match="the text has 'x', 'y', which the vocabulary of 3 characters"):
        codec.encode("yaxby")
    for ids in ([0, 3], [-1]):
        with pytest.raises(ValueError, match="but must be from 0 to 2"):
            codec.decode(ids)


def test_tiny_shakespeare_is_the_default_and_says_where_to_get_it(tmp_path):
    with pytest.raises(ValueError, match=r"input.txt is neither at .*https://.*tinyshakespeare/input.txt"):
        TextDataset(data_dir=tmp_path)


@pytest.mark.parametrize("real_data", ["tinyshakespeare"], indirect=True)
def test_the_real_tiny_shakespeare(real_data):
    dataset = TextDataset("tiny-shakespeare", length=1, data_dir=real_data)
    assert dataset.vocab_size == 65
    train, val = (dataset.epoch_size(split) + 1 for split in ("train", "val"))  # the first one is no target
    assert (train, val, train + val) == (1_003_854, 111_540, 1_115_394)
    assert whole_text(dataset).startswith("?\n\nGREMIO:\nGood morrow")


def test_byte_pairs_are_learned_from_the_training_part(tmp_path):
    text = "the cat sat on the mat, naïve 🙂. " * 60 + "qzxj " * 60
    path = write(tmp_path, text)
    dataset = TextDataset(path, level="bpe", length=5, vocab_size=280, val_fraction=0.129)
    assert dataset.vocab_size == len(dataset.text_tokenizer) == 280
    assert dataset.characters is None
    assert len(dataset.encode(" cat")) == 1
    assert len(dataset.encode("qzxj")) == 4
    assert dataset.decode(dataset.encode(text)) == text
    cut = int(len(text) * (1 - 0.129))
    assert whole_text(dataset) == text[cut:]
    again = TextDataset(path, **{key: x for key, x in dataset.options.items() if key != "path"})
    assert torch.equal(
        again.batch("train", step=3, batch_size=4, seed=0).inputs,
        dataset.batch("train", step=3, batch_size=4, seed=0).inputs,
    )
    assert dataset.vocabulary.kind == "tokenizer"
    assert dataset.vocabulary.encode("a cat") == dataset.encode("a cat").tolist()


def test_a_short_text_has_fewer_byte_pairs_than_asked_for(tmp_path):
    dataset = TextDataset(write(tmp_path, "abc def " * 90), level="bpe", length=2)
    assert 257 < dataset.vocab_size < 300


@pytest.mark.parametrize(
    ("level", "words"),
    [
        (
            "words",
            ["Don", "'", "t", "stop", ":", "don't", ",", "3.5", "m", ".", "\n", "(", "well-known", ")"],
        ),
        ("blanks", ["Don'", "t", "stop:", "don't,", "3.5", "m.", "\n", "(well-known)"]),
    ],
)
def test_what_a_word_is(tmp_path, level, words):
    line = "Don' t stop: don't, 3.5 m.\n(well-known)"
    dataset = TextDataset(write(tmp_path, f"{line} " * 40), level=level, length=2)
    assert dataset.decode(dataset.encode(line)) == " ".join(words)
    assert dataset.encode("nothing of that").tolist() == [0, 0, 0]
    assert dataset.decode([0]) == "<unk>"
    assert dataset.vocabulary.decode(dataset.encode(line)) == " ".join(words)
    assert dataset.vocabulary.encode(line) == dataset.encode(line).tolist()
    assert "".join(map(dataset.vocabulary.reader(), dataset.encode(line).tolist())) == f" {' '.join(words)}"


@given(st.lists(st.sampled_from(["a", "b", "c", "d", "."]), min_size=20, max_size=60), st.integers(2, 6))
def test_words_are_those_that_occur_most_often(words, size):
    counts = Counter(words)
    for limit, chosen in ((None, [x for x in counts if counts[x] > 1]), (size, counts)):
        tokenizer = TextTokenizer.learn_words([" ".join(words[:9]), " ".join(words[9:])], vocab_size=limit)
        listed = sorted(chosen, key=lambda x: (-counts[x], x))[: None if limit is None else limit - 1]
        assert [tokenizer.name(i) for i in range(len(tokenizer))] == ["<unk>", *listed]


def test_a_second_file_is_all_for_validation(tmp_path):
    train, val = write(tmp_path, "abc" * 30), write(tmp_path, "cda" * 20, "val.txt")
    for level, expected in (("chars", list("abcd")), ("bytes", None)):
        dataset = TextDataset(train, val_path=val, level=level, length=4)
        assert whole_text(dataset) == "cda" * 20
        assert dataset.characters == (None if expected is None else tuple(expected))
        assert dataset.epoch_size("train") == -(-89 // 4)
    words = TextDataset(
        write(tmp_path, "to be or not to be " * 9),
        val_path=write(tmp_path, "to see or not", "v"),
        level="words",
        length=2,
    )
    assert whole_text(words) == "to <unk> or not"
    with pytest.raises(ValueError, match=r"val_fraction is 0.2, but must be left out with val_path"):
        TextDataset(train, val_path=val, val_fraction=0.2)
    with pytest.raises(ValueError, match=r"val_path is '.*none', which is neither a file nor a known text"):
        TextDataset(train, val_path=tmp_path / "none")
    with pytest.raises(ValueError, match=r"val_path is .*, but must be another file than path"):
        TextDataset(train, val_path=tmp_path / "x" / ".." / Path(train).name)


@pytest.mark.parametrize("real_data", ["wikitext2"], indirect=True)
def test_the_real_wikitext(real_data):
    dataset = TextDataset(
        "wikitext-2-valid", val_path="wikitext-2-test", level="blanks", length=1, data_dir=real_data
    )
    words = [dataset.epoch_size(split) + 1 for split in ("train", "val")]
    assert words == [217_646, 245_569]  # as published, with <eos> at each line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "words", "vocab_size": 1}, "vocab_size is 1, but must be at least 2 with level='words'"),
        ({"level": "bpe", "vocab_size": 256}, "vocab_size is 256, but must be at least 257 with level='bpe'"),
        ({"vocab_size": 12}, r"vocab_size is 12, but .*file.txt has 10 characters: leave it out, or choose"),
        ({"vocab_size": 10, "level": "bytes"}, "vocab_size is 10, but .* has 256 bytes"),
        (
            {"level": "blanks"},
            "level is 'blanks', but in the training part of .*file.txt no word occurs twice: set vocab_size",
        ),
        ({"order": "sorted"}, "order is 'sorted', but must be one of 'random', 'consecutive', 'drawn'"),
        (
            {"level": "bpe", "length": 500},
            "length is 500, but must be less than the .* tokens of the val part",
        ),
    ],
)
def test_impossible_vocabularies_are_refused(tmp_path, options, message):
    path = write(tmp_path, "0123456789" * 10)
    with pytest.raises(ValueError, match=message):
        TextDataset(path, **({"length": 3} | options))
    assert TextDataset(path, length=3, vocab_size=10).vocab_size == 10


def test_the_checksum_is_that_of_both_splits(tmp_path):
    texts = (
        "abc" * 30,
        "acb" + "abc" * 29,
        "abc" * 29 + "acb",
        "abd" * 30,  # with the ids of the first
    )
    found = {TextDataset(write(tmp_path, x), length=2).ids_checksum for x in texts}
    assert len(found) == 4


def test_windows_are_drawn_by_the_seed_and_the_step(tmp_path):
    path = write(tmp_path, "".join(chr(0x100 + i) for i in range(500)))
    for order in ("random", "drawn"):
        dataset = TextDataset(path, length=2, order=order)
        requests = [(0, 0), (1, 0), (0, 1)]
        batches = [dataset.batch("train", step=step, batch_size=20, seed=seed) for step, seed in requests]
        assert len({tuple(x.inputs[:, 0].tolist()) for x in batches}) == 3


def test_words_are_learned_from_the_training_part_alone(tmp_path):
    train, val = write(tmp_path, "to be or not " * 9), write(tmp_path, "to see and see", "v")
    dataset = TextDataset(train, val_path=val, level="words", length=2)
    assert whole_text(dataset) == "to <unk> <unk> <unk>"
