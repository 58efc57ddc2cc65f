"""Documents from files of every format, in pieces."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from corpora import story, write_lines
from hypothesis import given
from hypothesis import strategies as st

from unrolled.data._corpus import documents as module
from unrolled.data._corpus.documents import Documents, Piece, zstd_module
from unrolled.data._corpus.splitting import Splitting
from unrolled.data._tokenizer import LONGEST_PIECE, pieces

zstd = zstd_module()
TEXTS = [story(i) for i in range(700)]


def texts_of(*files: Path, **options) -> list[str]:
    """Put the documents together again from their pieces."""
    found: list[str] = []
    for piece in Documents(files, **options).pieces():
        if piece.begins:
            found.append("")
        found[-1] += piece.text
    return found


def test_every_format_holds_the_same_documents(tmp_path):
    files = [write_lines(tmp_path / f"x.jsonl{suffix}", TEXTS) for suffix in ("", ".gz", ".zst")]
    joined = "<|end|>".join(TEXTS).encode()
    for name, content in {
        "x.txt": joined,
        "x.txt.gz": gzip.compress(joined),
        "x.md.zst": zstd.compress(joined),
    }.items():
        files.append(tmp_path / name)
        files[-1].write_bytes(content)
    files.append(tmp_path / "x.parquet")
    pyarrow.parquet.write_table(
        pyarrow.table({"n": range(700), "text": TEXTS}), files[-1], row_group_size=300
    )
    for file in files:
        assert texts_of(file, separator="<|end|>") == TEXTS, file.name
    several = texts_of(*files[:2])
    assert several == TEXTS * 2
    assert [piece.place[:2] for piece in Documents(files[:2]).pieces()][699:701] == [(0, 699), (1, 0)]


def test_a_text_file_without_separator_is_one_document(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert texts_of(path) == ["one\ntwo\nthree\n"]


@given(
    parts=st.lists(st.text(st.sampled_from("ab ,\n|"), max_size=60), max_size=12),
    separator=st.sampled_from(["\n\n", "|", ",|", "aa"]),
)
def test_documents_are_what_stands_between_separators(tmp_path_factory, parts, separator):
    content = separator.join(parts)
    path = tmp_path_factory.getbasetemp() / "parts.txt"
    path.write_text(content)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("unrolled.data._tokenizer", "unrolled.data._corpus.documents"):
            patch.setattr(f"{name}.LONGEST_PIECE", 9)
        assert texts_of(path, separator=separator) == [x for x in content.split(separator) if x]
        for piece in Documents([path], separator).pieces():
            assert len(piece.text) <= 9
        whole = [list(pieces(x)) for x in content.split(separator) if x]
        cut: list[list[str]] = []
        for piece in Documents([path], separator).pieces():
            cut.extend([[]] * piece.begins)
            cut[-1] = [*cut[-1], piece.text]
            assert piece.ends == (len(cut[-1]) == len(whole[len(cut) - 1]))
        assert cut == whole  # where a document is cut does not depend on how the file is read


def test_pieces_end_before_white_space():
    text = "word " * 100_000
    found = list(pieces(text))
    assert "".join(found) == text
    assert all(len(x) <= LONGEST_PIECE for x in found)
    assert all(x.startswith(" ") for x in found[1:])
    assert [len(x) for x in pieces("x" * (2 * LONGEST_PIECE + 1))] == [LONGEST_PIECE, LONGEST_PIECE, 1]
    assert list(pieces("")) == []


def test_halves_of_surrogate_pairs_become_characters(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(r'{"text": "a\ud83d\ude00b"}' + "\n\n" + r'{"text": "a\ud83d b"}' + "\n")
    assert texts_of(path) == ["a😀b", "a\ufffd b"]


def test_reading_tells_how_far_it_is(tmp_path):
    files = [write_lines(tmp_path / "a.jsonl.gz", TEXTS), write_lines(tmp_path / "b.jsonl", TEXTS)]
    told: list[int] = []
    list(Documents(files).pieces(on_bytes=told.append))
    assert told == sorted(told)
    assert told[-1] == sum(file.stat().st_size for file in files)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"abc\xff\xfe" * 9, "x.txt is not text in UTF-8: invalid start byte"),
        ("x.txt.gz", b"no gzip", "x.txt.gz cannot be decompressed: Not a gzipped file"),
        ("x.txt.gz", gzip.compress(b"abc" * 99, mtime=0)[:-9], "x.txt.gz cannot be decompressed: "),
        ("x.txt.zst", b"no zstd at all", "x.txt.zst cannot be decompressed: "),
        ("x.txt.zst", zstd.compress(bytes(range(256)) * 9)[:-9], "x.txt.zst cannot be decompressed: "),
        ("x.jsonl", b'{"text": "a"}\n{"text"\n', "x.jsonl: line 2 is not JSON: "),
        ("x.jsonl", b"\xff\xfe\x00\n", "x.jsonl: line 1 is not JSON: "),
        ("x.jsonl", b"[1, 2]\n", r"x.jsonl: line 1 is \[1, 2\], but must be a JSON object"),
        ("x.jsonl", b'{"body": "a", "id": 3}\n', "line 1 has no field 'text'; its fields are 'body', 'id'"),
        (
            "x.json.gz",
            gzip.compress(b"[1, 2]\n", mtime=0),
            r"x.json.gz: line 1 is \[1, 2\], but must be a JSON",
        ),
        ("x.jsonl", b"{}\n", "line 1 has no field 'text'; its fields are none"),
        ("x.jsonl", b'{"text": null}\n', "line 1 has text = None, but it must be text"),
        (
            "x.jsonl",
            b'{"text": "a", "x": ' + b"[" * 99_999 + b"]" * 99_999 + b"}",
            "x.jsonl: line 1 is not JSON",
        ),
        ("x.parquet", b"PAR1 but no more", "x.parquet is not a Parquet file, or is damaged: "),
        ("x.parquet.gz", b"", "x.parquet.gz is a compressed Parquet file, but must not be"),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        texts_of(tmp_path / name)


def test_columns_of_parquet_are_checked(tmp_path):
    for name, column, message in (
        ("a.parquet", {"body": ["x"]}, "has no column 'text'; its columns are 'body'"),
        ("b.parquet", {"text": ["x", None]}, "row 2 has text = None, but it must be text"),
    ):
        pyarrow.parquet.write_table(pyarrow.table(column), tmp_path / name)
        with pytest.raises(ValueError, match=message):
            texts_of(tmp_path / name)


def test_a_damaged_page_is_named(tmp_path):
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"line {i}" for i in range(9_999)]}), path)
    content = bytearray(path.read_bytes())
    content[1_000:3_000] = b"U" * 2_000
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"x.parquet is not a Parquet file, or is damaged: "):
        texts_of(path)


def test_an_empty_separator_is_refused(tmp_path):
    with pytest.raises(ValueError, match="separator is '', but must be a text of at least one character"):
        Documents([tmp_path / "x.txt"], separator="")


def test_a_line_without_end_is_no_document(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_LINE", 100)
    with pytest.raises(ValueError, match="line 2 has 100 bytes or more, too many for a document"):
        texts_of(write_lines(tmp_path / "x.jsonl", ["a", "b" * 200]))


def test_missing_libraries_are_named(tmp_path, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(module, "import_module", missing)
    for name in ("x.parquet", "x.jsonl.zst"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(ImportError, match=r"pip install '\.\[tokenize\]'"):
            texts_of(tmp_path / name)


def sides(splitting: Splitting, documents: Documents) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"train": [], "val": []}
    for split, piece in splitting.split(documents.pieces()):
        found[split].append(piece.text)
    return found


def test_documents_are_held_out_by_their_text(tmp_path):
    documents = Documents([write_lines(tmp_path / "x.jsonl", TEXTS)])
    found = sides(Splitting.of(documents, 0.1), documents)
    assert 35 < len(found["val"]) < 105
    others = Documents([write_lines(tmp_path / "y.jsonl", TEXTS[::-1] + TEXTS)])
    again = sides(Splitting.of(others, 0.1), others)
    assert set(again["val"]) == set(found["val"])


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_of_a_few_documents_the_last_is_held_out(tmp_path, count, fraction):
    documents = Documents([write_lines(tmp_path / "x.jsonl", TEXTS[:count])])
    found = sides(Splitting.of(documents, fraction), documents)
    assert found == {"train": TEXTS[: count - 1], "val": TEXTS[count - 1 : count]}


@pytest.mark.parametrize("n", [10, 200_000, 350_000])
def test_of_a_single_document_the_end_is_held_out(tmp_path, n):
    text = ("abc defg " * n)[:n]
    documents = Documents([write_lines(tmp_path / "x.jsonl", [text])])
    found = sides(Splitting.of(documents, 0.3), documents)
    assert ("".join(found["train"]), "".join(found["val"])) == (text[: int(n * 0.7)], text[int(n * 0.7) :])
    of_val = [x for split, x in Splitting.of(documents, 0.3).split(documents.pieces()) if split == "val"]
    assert [x.begins for x in of_val] == [True, *[False] * (len(of_val) - 1)]
    assert [x.ends for x in of_val] == [*[False] * (len(of_val) - 1), True]
    assert sides(Splitting.of(documents, 1e-17), documents)["val"] == [text[-1]]


def test_files_without_text_are_refused(tmp_path):
    documents = Documents([write_lines(tmp_path / "x.jsonl", ["", ""])])
    with pytest.raises(ValueError, match="the files have no text"):
        Splitting.of(documents, 0.1)


def test_a_file_of_json_with_line_ends_inside_texts_is_read(tmp_path):
    path = tmp_path / "x.ndjson"
    path.write_bytes(b"".join(json.dumps({"t": x}).encode() + b"\r\n" for x in ("a\r\nb", "c\u2028d")))
    assert texts_of(path, field="t") == ["a\r\nb", "c\u2028d"]


def test_a_held_out_end_that_begins_with_a_piece_begins_a_document():
    first, second = Piece("abc", (0, 0, 0), True, False), Piece("de", (0, 0, 3), False, True)
    found = list(Splitting(0.4, (0, 0), 3).split([first, second]))
    assert found == [("train", first), ("val", Piece("de", (0, 0, 3), True, True))]


def test_the_bytes_of_files_that_are_passed_over_count_as_read(tmp_path):
    files, done = [write_lines(tmp_path / f"{i}.jsonl", TEXTS[:50]) for i in range(3)], []
    assert list(Documents(files).pieces(first=2, on_bytes=done.append))
    sizes = [file.stat().st_size for file in files]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (sizes[0], sum(sizes))


def test_a_separator_with_a_blank_is_found_where_a_piece_ends(tmp_path):
    separator = "ab cdefgh"  # its blank is where the second piece could be cut, and its end is not read then
    first = f"{'x' * (LONGEST_PIECE - 2)} {'y' * (LONGEST_PIECE - 3)}"
    path = tmp_path / "file.txt"
    path.write_text(f"{first}{separator}z")
    found = list(Documents([path], separator).pieces())
    assert "".join(x.text for x in found) == f"{first}z"
    assert [x.ends for x in found] == [False, True, True]


def test_no_piece_is_read_after_the_last_character_wanted(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("one|two|three")
    documents = Documents([path], "|")
    assert [[x.text for x in documents.pieces(most=[n])] for n in (3, 4)] == [["one"], ["one", "two"]]
