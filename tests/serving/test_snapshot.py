"""Snapshots: an id for all that they hold, files that are always the same, and files from anybody."""

import json
import random
import struct
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from unrolled.serving.snapshot import Snapshot

MODEL = "0123456789abcdef" * 4
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def small(**changes: object) -> Snapshot:
    tensors = {
        "layers.0.kv": torch.arange(24.0).reshape(1, 2, 3, 4),
        "layers.0.z": torch.ones(1, 2, 3),
        "length": torch.tensor([5]),
    }
    return Snapshot(**({"model": MODEL, "length": 6, "pending": 17, "tensors": tensors} | changes))


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
        lambda x: x != "__metadata__"
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def tensor() -> Tensor:
        shape = draw(st.lists(st.integers(0, 3), max_size=4))
        return (torch.randn(shape, generator=generator) * 9).to(draw(st.sampled_from(DTYPES)))

    tensors = {name: tensor() for name in draw(st.lists(names, max_size=5, unique=True))}
    numbers = st.integers(0, 2**48 - 1)
    held = draw(st.lists(numbers, max_size=4))
    return Snapshot(MODEL, draw(numbers) + 1, draw(numbers), tensors, tuple(held))


@given(snapshots(), st.randoms())
def test_a_file_holds_all_and_is_always_the_same(snapshot: Snapshot, shuffle: random.Random) -> None:
    content = snapshot.to_bytes()
    found = Snapshot.of_bytes(content, snapshot.id)
    assert found == snapshot
    assert (found.model, found.length, found.pending) == (snapshot.model, snapshot.length, snapshot.pending)
    assert found.held == snapshot.held
    assert found.tensors.keys() == snapshot.tensors.keys()
    for name, x in snapshot.tensors.items():
        assert found.tensors[name].dtype == x.dtype
        assert torch.equal(found.tensors[name], x)
    items = list(snapshot.tensors.items())
    shuffle.shuffle(items)
    for same in (found, replace(snapshot, tensors=dict(items))):
        assert same.to_bytes() == content
        assert same.id == snapshot.id
    assert (
        found.nbytes
        == snapshot.nbytes
        == sum(x.numel() * x.element_size() for x in snapshot.tensors.values())
    )


def test_the_id_is_known() -> None:
    """States that were kept by an older version are found by it, so it must not change."""
    assert small().id == "4c977fdb54567730b768fb306ab4f3f74e173a13506aef84d2dd4a6961ee5663"


def test_each_part_changes_the_id() -> None:
    tensors = small().tensors
    kv = tensors["layers.0.kv"]
    others = [
        small(model="f" * 64),
        small(length=7),
        small(pending=18),
        small(held=(17,)),
        small(held=(1, 7)),
        small(tensors={**tensors, "more": torch.empty(0)}),
        small(tensors={**tensors, "layers.0.kv": kv.reshape(1, 2, 4, 3)}),
        small(tensors={**tensors, "layers.0.kv": kv.view(torch.int32)}),
        small(tensors={**tensors, "layers.0.kv": kv.bfloat16()}),
        small(tensors={**tensors, "layers.0.kv": torch.where(kv == 0, -0.0, kv)}),
        small(tensors={name.replace("z", "y"): x for name, x in tensors.items()}),
        small(tensors={"layers.0.kv": kv, "layers.0.z": tensors["layers.0.z"]}),
    ]
    assert len({small().id, *(other.id for other in others)}) == len(others) + 1
    assert len({small(), small(), *others}) == len(others) + 1
    assert small() != "text"


def test_it_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        small().length = 3  # type: ignore[misc]


def test_tensors_may_share_memory_and_need_gradients() -> None:
    base = torch.arange(12.0)
    tensors = {"a": base[4:8], "b": base[8:], "c": base, "d": torch.ones(2, requires_grad=True)}
    found = Snapshot.of_bytes(small(tensors=tensors).to_bytes())
    assert all(torch.equal(found.tensors[name], x) for name, x in tensors.items())


def test_what_is_read_can_be_computed_with() -> None:
    """Tensors of a file may lie unaligned and be read-only."""
    tensors = {
        "a": torch.zeros(3, dtype=torch.int8),
        "b": torch.ones(5),
        "c": torch.ones(7, dtype=torch.float64),
    }
    for x in Snapshot.of_bytes(small(tensors=tensors).to_bytes()).tensors.values():
        assert x.data_ptr() % 16 == 0
        assert x.is_contiguous()
        x.add_(1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "abc"}, "model must be 64 hex digits, not 'abc'"),
        ({"model": "A" * 64}, f"model must be 64 hex digits, not '{'A' * 64}'"),
        ({"length": 0}, f"length must be from 1 to {2**48}, not 0"),
        ({"length": 2**48 + 1}, f"length must be from 1 to {2**48}, not {2**48 + 1}"),
        ({"pending": -1}, f"pending must be from 0 to {2**48}, not -1"),
        ({"pending": 2**63}, f"pending must be from 0 to {2**48}, not {2**63}"),
        ({"held": (1, -1)}, f"held must be from 0 to {2**48}, not -1"),
        ({"held": (1,) * 5}, "held must have at most 4 tokens, not 5"),
        ({"tensors": {"a": torch.ones(2, 3).T}}, "the tensor 'a' must be contiguous and on the CPU"),
        (
            {"tensors": {"a": torch.ones(2, device="meta")}},
            "the tensor 'a' must be contiguous and on the CPU",
        ),
        ({"tensors": {"a": torch.ones(2).to_sparse()}}, "the tensor 'a' must be contiguous and on the CPU"),
        (
            {"tensors": {"__metadata__": torch.ones(2)}},
            "a tensor may not be named __metadata__, which safetensors keeps for itself",
        ),
    ],
)
def test_wrong_attributes_get_one_sentence(changes: dict, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the sentence is compared
        small(**changes)
    assert str(caught.value) == sentence


def test_another_id_than_expected() -> None:
    snapshot = small()
    with pytest.raises(ValueError, match=f"^the state has the id {snapshot.id}, but must have {'0' * 64}$"):
        Snapshot.of_bytes(snapshot.to_bytes(), "0" * 64)


METADATA = {"model": MODEL, "length": "6", "pending": "17", "id": "0" * 64}


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        (None, "^the file is not a state: its metadata lack id, length, model, pending$"),
        ({"model": MODEL, "length": "6"}, "^the file is not a state: its metadata lack id, pending$"),
        (
            METADATA | {"length": "x"},
            "^the state's metadata have length 'x', which is not a number of tokens$",
        ),
        (METADATA | {"length": "٣"}, "^the state's metadata have length '٣', which"),
        (METADATA | {"length": "06"}, "^the state's metadata have length '06', which"),
        (METADATA | {"length": "6\n"}, r"^the state's metadata have length '6\\n', which"),
        (METADATA | {"pending": "9" * 5000}, "^the state's metadata have pending '9{80}', which"),
        (METADATA | {"held": "226  130"}, "^the state's metadata have held '', which"),
        (METADATA | {"pending": "9" * 19}, "^pending must be from 0 to "),
        (METADATA | {"length": "0"}, "^length must be from 1 to "),
        (METADATA | {"model": "M" * 1000}, "^model must be 64 hex digits, not 'M{80}'$"),
        (
            METADATA,
            "^the state is damaged: it names the id '0{64}', but what it holds has the id [0-9a-f]{64}$",
        ),
    ],
)
def test_wrong_metadata_get_one_sentence(metadata: dict[str, str] | None, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Snapshot.of_bytes(save(small().tensors, metadata))


def file(header: object, content: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content


def entry(dtype: str, shape: list[int], end: int) -> dict:
    return {"__metadata__": METADATA, "a": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        b"\xff" * 8,
        b"\xff" * 100,
        struct.pack("<Q", 2**40) + b"{}",
        file(b"[" * 100_000),
        file(b'{"a":' * 50_000),
        file(b"null"),
        file({"__metadata__": {"model": 1}}),
        file({"__metadata__": [1]}),
        file(entry("F32", [2**62], 4), bytes(4)),
        file(entry("F32", [2**40, 2**40], 4), bytes(4)),
        file(entry("F32", [-1], 4), bytes(4)),
        file(entry("F32", [1], 4), bytes(5)),
        file(entry("F32", [1], 2**50), bytes(4)),
        file(entry("F32", [0, 2**63], 0)),
        file(entry("F32", [0, 2**40, 2**40], 0)),
        file(entry("F4", [2], 1), bytes(1)),
        file(entry("Q7" + "\n7" * 5000, [2], 1), bytes(1)),
        file(entry("F32", [1], 4), bytes(4)) + b"more",
    ],
    ids=range(20),
)
def test_hostile_files_get_one_sentence(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"^the state ") as caught:
        Snapshot.of_bytes(content)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [3, 10_000])
def test_truth_values_are_0_or_1(size: int) -> None:
    """Other bytes are undefined behaviour in C++."""
    values = torch.full([size], 2, dtype=torch.uint8).view(torch.bool)
    content = small(tensors={"a": values}).to_bytes()
    with pytest.raises(
        ValueError, match=r"^the state's tensor 'a' is boolean, but has bytes other than 0 and 1$"
    ):
        Snapshot.of_bytes(content)


@settings(max_examples=300)
@given(st.data())
def test_a_changed_file_is_refused_or_the_same(data: st.DataObject) -> None:
    content = bytearray(small().to_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] = data.draw(st.integers(0, 255))
    end = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    try:
        found = Snapshot.of_bytes(bytes(content[:end]))
    except ValueError:
        return
    assert found == small()


def test_other_programs_can_read_it() -> None:
    found = load(small().to_bytes())
    assert torch.equal(found["layers.0.kv"], small().tensors["layers.0.kv"])
