import json
import random
import re
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

from unrolled import files

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1, 2]), "empty": torch.ones(0, 4)}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.safetensors"


def test_tensors_come_back_bit_for_bit_here_and_in_other_programs(path):
    files.save_tensors(TENSORS, path, {"config.json": {"n": 1}})
    for found in (files.load_tensors(path, {"config.json": {"n": 1}}.get), load_file(path)):
        assert found.keys() == TENSORS.keys()
        assert all(torch.equal(found[name], x) for name, x in TENSORS.items())
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_tensors_may_share_memory(path):
    x = torch.arange(12.0).view(3, 4)
    shared = {"x": x, "again": x, "row": x[1], "column": x[:, 1], "repeated": x[:1].expand(3, 4)}
    files.save_tensors(shared, path)
    found = files.load_tensors(path)
    assert all(torch.equal(found[name], y) for name, y in shared.items())


def test_the_same_tensors_make_the_same_file(path):
    contents = set()
    for _ in range(20):
        files.save_tensors(TENSORS, path, {"é.json": 1})
        contents.add(path.read_bytes())
    assert len(contents) == 1


def test_a_digest_can_be_put_into_the_file_of_another_program(path):
    save_file(TENSORS, path, {"format": "pt", "by": "another"})
    files.add_digest(path)
    assert files.read_header(path).metadata["by"] == "another"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="was changed after it was saved"):
        files.load_tensors(path)


def test_a_file_without_a_digest_is_read(path):
    save_file(TENSORS, path, {"format": "pt"})
    assert torch.equal(files.load_tensors(path)["a"], TENSORS["a"])


def test_no_changed_byte_goes_unnoticed(path):
    files.save_tensors(TENSORS, path)
    content, draw = path.read_bytes(), random.Random(0)
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            found = files.load_tensors(path)
        except ValueError:
            continue
        # Only where the name of the digest is damaged: the file then is one without a digest.
        assert all(torch.equal(found[name], x) for name, x in TENSORS.items()), place


@pytest.mark.parametrize("found", [{"config.json": {"n": 2}}, {"config.json": None}])
def test_a_changed_document_is_named(found, path):
    files.save_tensors(TENSORS, path, {"config.json": {"n": 1}})
    with pytest.raises(ValueError, match=re.escape(f"{path} or config.json was changed after it was saved")):
        files.load_tensors(path, found.get)


def test_a_file_that_is_cut_short_missing_or_a_folder_is_refused(path):
    files.save_tensors(TENSORS, path)
    content = path.read_bytes()
    for length in (0, 7, 8, 100, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=re.escape(f"{path} is not a readable safetensors file")):
            files.load_tensors(path)
    for other in (path.parent, path.parent / "none"):
        with pytest.raises(ValueError, match=re.escape(f"{other} is not a readable safetensors file")):
            files.load_tensors(other)


def test_a_shape_that_torch_cannot_hold_is_refused(path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ValueError, match="has a tensor whose dtype or shape PyTorch cannot hold"):
        files.load_tensors(path)


@pytest.mark.parametrize(
    "content", ["löwe\n", "löwe\n".encode(), lambda path: path.write_bytes("löwe\n".encode())]
)
def test_a_file_is_written_whole_into_a_folder_that_is_made(content, tmp_path):
    out = tmp_path / "new" / "x.txt"
    for _ in range(2):
        files.write_file(out, content)
        assert out.read_bytes() == "löwe\n".encode()
    assert [file.name for file in out.parent.iterdir()] == ["x.txt"]


def test_what_cannot_be_written_leaves_the_old_file_and_nothing_else(tmp_path):
    def fill_the_disk(path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    out = tmp_path / "x.txt"
    files.write_file(out, "old")
    with pytest.raises(OSError, match=rf"No space left on device: '{re.escape(str(out))}'"):
        files.write_file(out, fill_the_disk)
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_of_two_threads_that_write_a_file_the_last_one_wins(tmp_path):
    out, together = tmp_path / "x.txt", threading.Barrier(2)

    def write(path):
        path.write_bytes(b"whole")
        together.wait(timeout=30)  # until the other thread has written too

    with ThreadPoolExecutor(2) as pool:
        for end in [pool.submit(files.write_file, out, write) for _ in range(2)]:
            end.result()
    assert out.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("sizes", [(1, 64), (16, 64), (13, 128), (0, 64)])
def test_bytes_are_aligned(sizes, tmp_path):
    wide, size = sizes
    tensors = {"b" * wide: torch.zeros(wide), "a": torch.zeros(3 * wide, dtype=torch.int32)}
    tensors |= {"z": torch.ones(size, dtype=torch.uint8), "c": torch.ones(64, dtype=torch.uint8)}
    path = tmp_path / "x.safetensors"
    files.save_tensors(tensors, path, aligned=True)
    found = files.load_tensors(path)
    assert found.keys() - tensors.keys() == {"padding"}
    assert all(found[name].equal(x) for name, x in tensors.items())
    assert found["z"].data_ptr() % 64 == found["c"].data_ptr() % 64 == 0


def test_the_order_of_the_keys_of_a_document_does_not_matter(path):
    files.save_tensors(TENSORS, path, {"config.json": {"a": 1, "b": 2}})
    assert files.load_tensors(path, {"config.json": {"b": 2, "a": 1}}.get).keys() == TENSORS.keys()
