import gzip
import hashlib
import http.client
import urllib.request
from pathlib import Path

import pytest

from unrolled.data._files import PublishedFile, folder, read_file, read_published

CONTENT = b"every file is what it should be, or it is not used" * 20
NOWHERE = "https://example.org/plain.txt"


def published(content: bytes = CONTENT, *, path: str = "set/plain.txt", url: str = NOWHERE) -> PublishedFile:
    return PublishedFile(path, url, hashlib.sha256(content).hexdigest())


def put(path: Path, content: bytes = CONTENT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("place", ["set/plain.txt", "plain.txt"])
def test_a_file_is_found_in_its_folder_or_directly_compressed_or_not(tmp_path, place):
    put(tmp_path / place)
    assert read_published(published(), tmp_path) == CONTENT
    put(tmp_path / "compressed" / f"{place}.gz", gzip.compress(CONTENT))
    assert read_published(published(), tmp_path / "compressed") == CONTENT


def test_the_argument_goes_before_the_environment_and_that_before_the_cache(tmp_path, monkeypatch):
    one, two, three = (
        put(tmp_path / name / "set/plain.txt") for name in ("one", "two", "home/.cache/unrolled")
    )
    monkeypatch.setenv("UNROLLED_DATA", str(tmp_path / "two"))
    one.write_bytes(b"wrong")
    with pytest.raises(ValueError, match=r"one/set/plain.txt is corrupt"):
        read_published(published(), tmp_path / "one")
    two.write_bytes(b"wrong")
    with pytest.raises(ValueError, match=r"two/set/plain.txt is corrupt"):
        read_published(published())
    monkeypatch.setenv("UNROLLED_DATA", "")  # set to nothing is not set
    assert read_published(published()) == CONTENT
    three.write_bytes(b"wrong")
    with pytest.raises(ValueError, match=r"unrolled/set/plain.txt is corrupt"):
        read_published(published())


@pytest.mark.parametrize("level", [1, 9])
def test_a_gzip_file_is_judged_by_its_content_not_by_how_it_was_compressed(tmp_path, level):
    put(tmp_path / "set/plain.txt.gz", gzip.compress(CONTENT, level, mtime=level))
    assert read_published(published(path="set/plain.txt.gz"), tmp_path) == CONTENT


def test_a_corrupt_file_is_refused_with_the_checksum_found_and_expected(tmp_path):
    put(tmp_path / "plain.txt", CONTENT[:-1])
    found, expected = hashlib.sha256(CONTENT[:-1]).hexdigest(), hashlib.sha256(CONTENT).hexdigest()
    with pytest.raises(
        ValueError, match=f"plain.txt is corrupt: .* {found} instead of {expected}; .*{NOWHERE}"
    ):
        read_published(published(), tmp_path)


def broken_gzips() -> dict[str, bytes]:
    whole = gzip.compress(CONTENT, mtime=0)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    return {
        "truncated": whole[:-9],
        "flipped": bytes(flipped),
        "no gzip": b"<html>404</html>",
        "header": whole[:3],
    }


@pytest.mark.parametrize("kind", broken_gzips())
def test_a_broken_gzip_file_is_refused(tmp_path, kind):
    path = put(tmp_path / "plain.txt.gz", broken_gzips()[kind])
    with pytest.raises(ValueError, match=f"plain.txt.gz is corrupt: .*{published().sha256}"):
        read_published(published(path="set/plain.txt.gz"), tmp_path)
    with pytest.raises(ValueError, match=r"plain.txt.gz cannot be decompressed: "):
        read_file(path)


def test_a_missing_file_is_downloaded_once(tmp_path):
    source = put(tmp_path / "server/plain.txt")
    file = published(url=source.as_uri())
    assert read_published(file, tmp_path / "new/data") == CONTENT
    source.unlink()
    assert read_published(file, tmp_path / "new/data") == CONTENT
    assert [path.name for path in (tmp_path / "new/data/set").iterdir()] == ["plain.txt"]


def test_without_a_network_the_message_says_which_file_and_where_to_get_it(tmp_path):
    with pytest.raises(ValueError, match="no network in tests") as error:
        read_published(published(), tmp_path)
    for part in ("plain.txt is neither at", str(tmp_path / "set/plain.txt"), NOWHERE, "UNROLLED_DATA"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_a_corrupt_download_leaves_nothing_behind(tmp_path):
    source = put(tmp_path / "server/plain.txt", CONTENT[:100])
    with pytest.raises(ValueError, match=f"the download from {source.as_uri()} is corrupt"):
        read_published(published(url=source.as_uri()), tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_an_unwritable_folder_is_named(tmp_path):
    source = put(tmp_path / "server/plain.txt")
    put(tmp_path / "no-folder")
    with pytest.raises(ValueError, match=r"no-folder/set/plain.txt cannot be written \(Not a directory\)"):
        read_published(published(url=source.as_uri()), tmp_path / "no-folder")


def test_an_interrupted_write_leaves_nothing_behind(tmp_path, monkeypatch):
    source = put(tmp_path / "server/plain.txt")
    file = published(url=source.as_uri())

    def killed(self, target):
        assert self.read_bytes() == CONTENT
        assert self.parent == Path(target).parent
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        read_published(file, tmp_path / "data")
    assert list((tmp_path / "data/set").iterdir()) == []


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_file(tmp_path)


def test_a_folder_has_a_name():
    with pytest.raises(ValueError, match="data_dir is 5, but must be the name of a folder"):
        folder(5)


def test_a_gzip_file_whose_blocks_are_damaged_is_refused(tmp_path):
    whole = gzip.compress(CONTENT, mtime=0)
    path = put(tmp_path / "plain.txt.gz", whole[:10] + b"\xff" + whole[11:])  # no such type of block
    with pytest.raises(ValueError, match=r"plain.txt.gz is corrupt: "):
        read_published(published(path="set/plain.txt.gz"), tmp_path)
    with pytest.raises(ValueError, match=r"plain.txt.gz cannot be decompressed: "):
        read_file(path)


def test_a_download_that_breaks_off_is_said_in_one_sentence(tmp_path, monkeypatch):
    def urlopen(url, **options):
        raise http.client.IncompleteRead(b"half")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    with pytest.raises(ValueError, match="could not be downloaded from"):
        read_published(published(), tmp_path)


def test_a_server_that_does_not_answer_is_given_up(tmp_path, monkeypatch):
    given = {}

    def urlopen(url, **options):
        given.update(options)
        raise TimeoutError("timed out")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    with pytest.raises(ValueError, match=r"could not be downloaded .*timed out"):
        read_published(published(), tmp_path)
    assert 0 < given["timeout"] <= 60
