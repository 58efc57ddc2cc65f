"""States are values that can be selected, measured, saved and read back."""

import re
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from unrolled.ops import state as states


class Inner(NamedTuple):
    kv: Tensor
    position: Tensor


class Outer(NamedTuple):
    position: Tensor
    layers: tuple[Inner, ...]


@pytest.fixture
def state():
    layers = tuple(Inner(torch.rand(3, 2, 4), torch.arange(3)) for _ in range(2))
    return Outer(torch.arange(3) * 10, layers)


def test_leaves_are_named_by_their_path(state):
    of_layers = [f"layers.{i}.{name}" for i in (0, 1) for name in ("kv", "position")]
    assert list(states.leaves(state)) == ["position", *of_layers]


def test_select_forks_reorders_and_drops_rows(state):
    picked = states.select(state, [2, 0, 2, 2])
    assert isinstance(picked, Outer)
    assert isinstance(picked.layers[0], Inner)
    assert picked.position.tolist() == [20, 0, 20, 20]
    assert torch.equal(picked.layers[1].kv, state.layers[1].kv[[2, 0, 2, 2]])
    picked.position.zero_()
    assert state.position.tolist() == [0, 10, 20]


def test_bytes_are_counted(state):
    assert states.nbytes(state) == 3 * 8 + 2 * (3 * 2 * 4 * 4 + 3 * 8)


def test_detach_cuts_the_graph(state):
    grown = states.map_tensors(lambda x: x * torch.ones(1, requires_grad=True), state)
    assert grown.position.requires_grad
    assert not states.detach(grown).position.requires_grad


def test_a_saved_state_reads_back_bit_for_bit(state, tmp_path):
    states.save(state, tmp_path / "state.safetensors")
    read = states.load(tmp_path / "state.safetensors", like=states.select(state, [0]))
    assert isinstance(read, Outer)
    for name, x in states.leaves(state).items():
        assert torch.equal(states.leaves(read)[name], x)


def test_a_session_with_a_changed_bit_is_refused(state, tmp_path):
    path = tmp_path / "state.safetensors"
    states.save(state, path)
    content = path.read_bytes()
    for place in range(len(content) - states.nbytes(state), len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 64]) + content[place + 1 :])
        with pytest.raises(ValueError, match="was changed after it was saved"):
            states.load(path, like=state)


def test_a_state_of_another_structure_is_refused(state, tmp_path):
    path = tmp_path / "state.safetensors"
    states.save(state, path)
    with pytest.raises(ValueError, match=r"holds the tensors .* but this state has \['kv', 'position'\]"):
        states.load(path, like=state.layers[0])
    other_type = states.map_tensors(lambda x: x.double(), state)
    with pytest.raises(ValueError, match=r"position in .* is torch.int64 with 1 dimensions"):
        states.load(path, like=other_type)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        states.load(path, like=state)


def test_the_bytes_of_a_tensor_do_not_depend_on_its_strides():
    x = torch.tensor([[1.5, 2.5], [3.5, 4.5]], dtype=torch.bfloat16)
    for view in (x.T, x[:1, 1], x[0, 0].expand(1).clone(), x[:, :0], x[0, 0]):
        again = torch.tensor(view.flatten().tolist(), dtype=x.dtype)
        assert torch.equal(states.raw_bytes(view), again.view(torch.uint8))


@pytest.mark.parametrize("mask", [[True, False, True], torch.tensor([True, False, True])])
def test_a_mask_of_rows_is_refused(state, mask):
    with pytest.raises(ValueError, match="rows is a mask, but must be indices"):
        states.select(state, mask)


@pytest.mark.parametrize("rows", [[0.7], torch.tensor([1.0])])
def test_fractions_of_rows_are_refused(state, rows):
    with pytest.raises(ValueError, match="but must be indices, which are integers"):
        states.select(state, rows)


@pytest.mark.parametrize("rows", [[0, 3], [-1], [[0, 1]]])
def test_rows_that_do_not_exist_are_refused(state, rows):
    message = f"rows is {rows}, but must be a list of integers from 0 to 2"
    with pytest.raises(ValueError, match=re.escape(message)):
        states.select(state, rows)


def test_no_rows_can_be_selected(state):
    assert states.select(state, []).layers[0].kv.shape == (0, 2, 4)
