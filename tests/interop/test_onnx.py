"""Exported graphs compute the same as the models, states included; damaged folders are refused."""

import json
import logging
import math
import shutil
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unrolled.contract import UnsupportedError
from unrolled.generation import generate
from unrolled.interop.onnx import Manifest, export, load, write
from unrolled.interop.onnx import folder as folder_module
from unrolled.interop.onnx.forms import InPlace, log_sigmoid, portable
from unrolled.interop.onnx.graph import Leaf, Recurrence, exported
from unrolled.interop.onnx.model import ExportedModel, OnnxModel
from unrolled.interop.onnx.record import describe_file
from unrolled.interop.onnx.speech_manifest import SpeechManifest
from unrolled.interop.onnx.write import DisagreementError, check_agreement, compare
from unrolled.models import (
    Decoder,
    DecoderConfig,
    PerceiverAR,
    PerceiverARConfig,
    RecurrentLM,
    RecurrentLMConfig,
)
from unrolled.ops import state as states

pytest.importorskip("onnxruntime")

VOCABULARY = 11
MODELS: dict[str, dict[str, Any]] = {
    "linear": {"positions": "sinusoidal", "n_kv_heads": 2, "start_token": True},
    "window": {"positions": "rotary", "attention_options": {"window": {"window": 5, "conv": 3}}},
    "softmax": {"positions": "rotary", "n_kv_heads": 1, "norm": "res_post", "bias": False}
    | {"attention_options": {"softmax": {"qk_norm": "head", "output_gate": True, "rotary_dim": 2}}},
}


def make(attention: str, **fields: Any) -> Decoder:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "n_layers": 1, "n_heads": 4}
    config = DecoderConfig(VOCABULARY, attention=attention, **sizes, **fields)
    model = Decoder(config).eval()
    for x in model.parameters():  # as large as trained weights are: small ones would hide differences
        if x.dim() > 1:
            torch.nn.init.normal_(x, std=0.2)
    return model


def make_perceiver(**fields: Any) -> PerceiverAR:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "n_layers": 2, "n_heads": 2, "n_latents": 4}
    return PerceiverAR(PerceiverARConfig(VOCABULARY, **sizes, **fields)).eval()


def make_cell(cell: str, **fields: Any) -> RecurrentLM:
    torch.manual_seed(0)
    return RecurrentLM(RecurrentLMConfig(VOCABULARY, d_model=8, cell=cell, **fields))


@pytest.fixture(scope="module", params=list(MODELS))
def pair(request, tmp_path_factory):
    model = make(request.param, **MODELS[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    linear = request.param == "linear"
    manifest = export(model, folder, fused=linear, int8=linear, probes=linear)
    return model, folder, manifest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A minimal exported folder, to be damaged."""
    made = tmp_path_factory.mktemp("folder")
    vocabulary = made.parent / "vocabulary.json"
    vocabulary.write_text('{"kind": "ids"}')
    export(make_cell("gru"), made, vocabulary=vocabulary)
    return made


def assert_same_draws(model, found, prompts, **options):
    for a, b in zip(*(generate(x, prompts, 20, **options) for x in (model, found)), strict=True):
        assert torch.equal(a, b)


def tokens(*size: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, size, generator=torch.Generator().manual_seed(len(size)))


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["plain", "fused"])
@torch.no_grad()
def test_two_hundred_steps_agree_to_1e5(pair, graph):
    model, folder, manifest = pair
    if graph not in manifest.graphs:
        return
    found = load(folder, graph)
    ids = tokens(2, 230)
    expected = model(ids)
    logits, state = found.prefill(ids[:, :30], found.init_state(2))
    torch.testing.assert_close(logits, expected[:, :30], rtol=0, atol=1e-5)
    for t in range(30, 230):
        logits, state = found.step(ids[:, t], state)
        torch.testing.assert_close(logits, expected[:, t], rtol=0, atol=1e-5)
    assert float(expected.std()) > 0.3  # so that 1e-5 is small


@pytest.mark.slow
@settings(max_examples=15)
@given(st.integers(1, 3), st.lists(st.integers(1, 70), min_size=1, max_size=4))
@torch.no_grad()
def test_any_split_of_the_prompt_gives_the_same_logits(pair, batch, cuts):
    model, folder, _ = pair
    found = load(folder)
    ids = tokens(batch, sum(cuts))
    before = state = found.init_state(batch)
    copy = [x.clone() for x in before]
    parts = []
    for piece in ids.split(cuts, dim=1):
        logits, state = found.prefill(piece, state)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), model(ids), rtol=0, atol=1e-5)
    assert all(map(torch.equal, before, copy))


def test_generation_draws_the_ids_of_the_model(pair):
    model, folder, _ = pair
    found = load(folder)
    for options in ({"temperature": 0}, {"seed": 3, "top_k": 4, "num_samples": 2}):
        assert_same_draws(model, found, [[1, 2, 3], [4, 5, 6]], **options)


def test_prompts_of_different_lengths(pair):
    model, folder, _ = pair
    found = load(folder)
    prompts = [[1, 2, 3], [4], [5, 6]]
    if type(model.stack.blocks[0].attention).__name__ == "SoftmaxAttention":
        with pytest.raises(UnsupportedError, match="rows of different lengths cannot share a state that"):
            generate(found, prompts, 5, temperature=0)
        return
    assert_same_draws(model, found, prompts, temperature=0)


def test_a_state_survives_a_file_and_its_rows_can_be_chosen(pair, tmp_path):
    _, folder, _ = pair
    found = load(folder)
    _, state = found.prefill(tokens(2, 9), found.init_state(2))
    states.save(state, tmp_path / "state")
    again = states.load(tmp_path / "state", found.init_state(1))
    twice = states.select(again, [1, 1])
    logits, _ = found.step(tokens(2), state)
    others, _ = found.step(tokens(2)[[1, 1]], twice)
    torch.testing.assert_close(others[0], logits[1], rtol=0, atol=1e-6)


def test_the_manifest_says_what_the_graph_is(pair):
    model, folder, manifest = pair
    import onnx

    graph = onnx.load(folder / "plain.onnx")
    values = json.loads((folder / "manifest.json").read_text())
    assert [x.name for x in graph.graph.input] == values["inputs"]
    assert [x.name for x in graph.graph.output] == values["outputs"]
    assert {x.domain for x in graph.opset_import} <= {"", "ai.onnx"}
    assert {node.domain for node in graph.graph.node} <= {"", "ai.onnx"}  # none of our own
    assert not any(
        part.metadata_props for part in (graph, graph.graph, *graph.graph.node, *graph.graph.value_info)
    )
    assert str(Path(export.__code__.co_filename).parent).encode() not in (folder / "plain.onnx").read_bytes()
    assert values["opset"] == 20
    assert values["length"] == "any"
    growing = {leaf["name"] for leaf in values["state"] if leaf["growing_axis"] is not None}
    assert growing == {x for x in values["inputs"] if "past" in x}
    axes = {x.name: [y.dim_param for y in x.type.tensor_type.shape.dim] for x in graph.graph.input}
    assert axes["tokens"] == ["batch", "length"]
    for leaf in manifest.state:
        assert axes[leaf.name][0] == "batch"
        assert leaf.growing_axis is None or axes[leaf.name][leaf.growing_axis] == "past"
    assert values["start_token"] == (VOCABULARY if model.config.start_token else None)
    for state in (model.init_state(3), model.prefill(tokens(3, 4), model.init_state(3))[1]):
        for name, x in states.leaves(state).items():
            leaf = next((leaf for leaf in manifest.state if leaf.name == name), None)
            if leaf is not None and leaf.growing_axis is None:
                assert tuple(x.shape[1:]) == leaf.shape


@pytest.mark.parametrize(
    ("attention", "fields", "length"),
    [
        ("rwkv4", {"activation": "channel_mix"}, "any"),
        ("mamba", {}, 1),
        ("aft", {"attention_options": {"aft": {"position_bias": "simple"}}}, 1),
    ],
)
@torch.no_grad()
def test_how_many_tokens_a_call_reads(attention, fields, length, tmp_path):
    model = make(attention, positions="none", **fields)
    assert export(model, tmp_path).length == length
    assert_same_draws(model, load(tmp_path), [[1, 2, 3], [4]], seed=0)


class InHalves(torch.nn.Linear):
    def forward(self, x):
        return torch.cat([x @ half.T for half in self.weight.chunk(2)], -1)


def test_a_matrix_may_be_applied_in_equal_parts(tmp_path):
    model = make("linear", positions="none")
    feed_forward = model.stack.layers[0].ff
    feed_forward.up = InHalves(16, feed_forward.up.out_features, bias=False)
    export(model, tmp_path)
    assert_same_draws(model, load(tmp_path), [[1, 2, 3], [4]], seed=0)


def test_matrices_that_are_applied_in_parts_are_quantised(tmp_path):
    import onnx

    export(make("rwkv4", positions="none"), tmp_path, int8=True)
    weights = onnx.load(tmp_path / "int8.onnx").graph.initializer
    assert max(math.prod(x.dims) for x in weights if x.data_type == onnx.TensorProto.FLOAT) < 16 * 16


@pytest.mark.slow
def test_a_tied_embedding_stays_one_weight(tmp_path):
    config = DecoderConfig(3000, d_model=512, n_layers=1, n_heads=4, positions="none", tie_embeddings=True)
    model = Decoder(config).eval()
    export(model, tmp_path)
    numbers = sum(x.numel() for x in model.parameters())
    assert (tmp_path / "plain.onnx").stat().st_size < 4 * numbers + 100_000


@pytest.mark.parametrize("pair", ["linear"], indirect=True)
@torch.no_grad()
def test_probes_are_the_features_of_the_queries(pair):
    model, folder, manifest = pair
    session = load(folder)._session
    ids = tokens(2, 7)
    feeds = {leaf.name: leaf.initial(2).numpy() for leaf in manifest.state} | {"tokens": ids.numpy()}
    names = [probe.name for probe in manifest.probes]
    assert names == ["layers.0.phi_q"]
    found = session.run(names, feeds)
    attention = model.stack.blocks[0].attention
    x = model.stack.blocks[0].attention_norm(model.positions(model.embedding(ids)))
    q = attention.qkv_proj(x)[..., : attention.n_heads * attention.head_dim].unflatten(-1, (4, 4))
    np.testing.assert_allclose(found[0], torch.where(q > 0, q + 1, q.exp()).numpy(), atol=1e-5)
    assert found[0].shape == (2, 7, *manifest.probes[0].shape)


def test_features_that_are_rotated_before_the_state_is_read_are_no_probes():
    model = make("linear", positions="rotary")
    assert not Recurrence(model, probes=True).probed


@pytest.mark.parametrize("pair", ["linear"], indirect=True)
@torch.no_grad()
def test_int8_is_smaller_and_near(pair):
    model, folder, _ = pair
    ids = tokens(4, 60)
    found = load(folder, "int8")
    logits, _ = found.prefill(ids, found.init_state(4))
    expected = model(ids)
    assert 1e-4 < float((logits - expected).std() / expected.std()) < 0.1
    import onnx

    kinds = {x.data_type for x in onnx.load(folder / "int8.onnx").graph.initializer if len(x.dims) > 1}
    assert onnx.TensorProto.UINT8 in kinds


@pytest.mark.parametrize("pair", ["softmax"], indirect=True)
def test_a_graph_of_other_weights_is_detected(pair):
    model, folder, _ = pair
    other = deepcopy(model)
    compare(Recurrence(other), load(folder)._session)
    with torch.no_grad():
        other.stack.blocks[0].attention.out_proj.weight[0, 0] += 0.1
    with pytest.raises(DisagreementError, match="differs from the model's by"):
        compare(Recurrence(other), load(folder)._session)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([torch.nan], [1.0]),
        ([1.0], [torch.nan]),
        ([torch.inf], [1.0]),
        ([-torch.inf], [torch.inf]),
        ([1.0], [1.0, 1.0]),
    ],
    ids=str,
)
def test_numbers_that_differ_without_a_difference_do_not_agree(found, expected):
    infinities = torch.tensor([torch.inf, -torch.inf])
    check_agreement("y", infinities, infinities)
    with pytest.raises(DisagreementError, match=r"y differs|y has shape"):
        check_agreement("y", torch.tensor(found), torch.tensor(expected))


@pytest.mark.parametrize(("size", "allowed"), [(0.0, 1e-4), (1.0, 1e-4), (100.0, 1e-2)])
def test_differences_are_relative_to_the_largest_number_or_to_one(size, allowed):
    expected = torch.tensor([size, 0.0], dtype=torch.float64)
    check_agreement("y", expected + 0.9 * allowed, expected)
    with pytest.raises(DisagreementError, match="y differs from the model's by"):
        check_agreement("y", expected + 1.1 * allowed, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (lambda: make("linear"), {"opset": 19}, UnsupportedError, "opset is 19, but must be from 20 to 25"),
        (lambda: make("linear"), {"opset": 26}, UnsupportedError, "opset is 26, but must be from 20 to 25"),
        (lambda: make("linear").half(), {}, UnsupportedError, "float16, but must be float32"),
        (lambda: make("long_short"), {}, UnsupportedError, "but must be empty at first, and grow by one per"),
        (lambda: make("linear"), {"sampling": {"temprature": 1}}, ValueError, "sampling has"),
        (lambda: make("linear"), {"sampling": {"top_p": 5}}, ValueError, r"top_p is 5, but must be in \(0, 1\]"),
        (lambda: make_cell("lstmn"), {}, UnsupportedError, "but must be empty at first, and grow by one per token"),
        (lambda: make_cell("ntm"), {}, UnsupportedError, "weights is not constant, but must be for an export"),
        (lambda: make_cell("kronecker"), {}, UnsupportedError, "this model cannot be written as a graph"),
        (lambda: torch.nn.Linear(2, 2), {}, UnsupportedError, "Linear cannot be exported: it lacks init_state"),
        (lambda: make_perceiver(max_length=5), {}, UnsupportedError, "n_latents is 4, but must be .*positions, 5$"),
        (lambda: make_perceiver(positions="none"), {}, UnsupportedError, "positions 'none' do not limit"),
        (lambda: make("topk"), {}, UnsupportedError, "depends on the number of tokens read; linear, window"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported(model, options, error, message, tmp_path):
    with pytest.raises(error, match=message):
        export(model(), tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_weights_that_no_graph_can_hold_are_refused_before_tracing(tmp_path, monkeypatch):
    model = make("linear")
    with torch.no_grad():
        model.head.project.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"head\.project\.weight has numbers that are not finite"):
        export(model, tmp_path)
    monkeypatch.setattr(write, "MOST_BYTES", 1000)
    with pytest.raises(UnsupportedError, match="GB of weights; a graph holds at most"):
        export(make("linear"), tmp_path)
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def test_a_perceiver_whose_positions_are_all_latents_can_be_exported():
    model = make_perceiver(max_length=4)
    recurrence = Recurrence(model)
    state = [leaf.initial(2) for leaf in recurrence.leaves]
    torch.testing.assert_close(recurrence(tokens(2, 4), *state)[0], model(tokens(2, 4)))


@pytest.mark.slow
def test_positions_that_a_feature_map_limits_are_limited_in_the_graph_too(tmp_path):
    options = {"feature_map": "cosformer", "feature_map_options": {"max_length": 2}}
    model = make("linear", positions="none", attention_options={"linear": options})
    export(model, tmp_path / "out")
    found = load(tmp_path / "out")
    assert found.config.n_positions == 3
    for either in (model, found):
        assert either.prefill(tokens(1, 3), either.init_state(1))[0].isfinite().all()
        with pytest.raises(ValueError, match=r"must be at most|is the last"):
            generate(either, [[1, 2]], 3)


class Itself:
    """A session that runs the model instead of a graph of it."""

    def __init__(self, recurrence):
        self.recurrence = recurrence
        self.names = [SimpleNamespace(name=name) for name in ("tokens", *(x.name for x in recurrence.leaves))]

    def get_inputs(self):
        return self.names

    def get_outputs(self):
        return [SimpleNamespace(name="logits"), *self.names[1:]]

    def run(self, outputs, feeds):
        return [x.numpy() for x in self.recurrence(*map(torch.from_numpy, feeds.values()))]


@pytest.mark.parametrize("max_length", range(2, 11))
def test_a_graph_is_compared_within_the_positions_of_the_model(max_length):
    recurrence = Recurrence(make("linear", positions="learned", max_length=max_length))
    compare(recurrence, Itself(recurrence))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "fields"),
    [
        *((name, {}) for name in ("similarity", "rfa", "retention", "mamba2", "longformer", "rwkv4")),
        ("window", {"n_kv_heads": 2}),
        ("linear", {"ff_chunk": 4}),
    ],
)
def test_mechanisms_that_the_guide_lists_are_traced_for_any_length(attention, fields):
    with InPlace(portable()):
        traced = exported(Recurrence(make(attention, max_length=20, **fields), length="any"))
    logits = traced.graph.output_node().args[0][0].meta["val"]
    assert [isinstance(size, torch.SymInt) for size in logits.shape] == [True, True, False]


def test_a_second_export_deletes_the_files_of_the_first(tmp_path):
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    first = SpeechManifest(
        unrolled="1", opset=20, model={}, weights="", vocab_size=2, rate=8000, shortest=200
    )
    first.write(folder, {"plain": b"1", "int8": b"2"}, {"vocabulary.json": b"{}"})
    outside.write_text("kept")
    (folder / "notes").write_text("kept")
    first.files["../outside"] = describe_file(outside)
    first.save(folder)
    second = deepcopy(first)
    second.graphs, second.files = {}, {}
    second.write(folder, {"plain": b"3"}, {})
    assert {x.name for x in folder.iterdir()} == {"manifest.json", "notes", "plain.onnx"}
    assert outside.exists()
    assert (folder / "plain.onnx").read_bytes() == b"3"
    (folder / "manifest.json").write_text('{"sha256": 1, "files": 3}')
    second.write(folder, {"fused": b"4"}, {})
    assert (folder / "plain.onnx").exists()  # a damaged manifest deletes nothing


def test_a_fused_graph_with_another_input_length_than_the_plain_one_is_refused(tmp_path, monkeypatch):
    def to_onnx(model, *, fused=False, **options):
        return Recurrence(model, length=1 if fused else "any"), b""

    monkeypatch.setattr(folder_module, "to_onnx", to_onnx)
    with pytest.raises(UnsupportedError, match="reads 1 token per call, but the plain one reads any"):
        export(make("linear"), tmp_path, fused=True)
    assert not list(tmp_path.iterdir())


def test_the_logarithm_of_a_sigmoid_is_that_of_torch():
    x = torch.linspace(-200, 200, 401)
    torch.testing.assert_close(log_sigmoid(x), torch.nn.functional.logsigmoid(x), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_gates_near_zero_are_exported(tmp_path):
    model = make("gated_linear", positions="none")
    for block in model.stack.blocks:
        block.attention.decay_up.bias.data -= 60  # its sigmoid is 0 in ONNX Runtime
    export(model, tmp_path)  # compares the graph with the model


def test_damaged_folders_are_refused(folder, tmp_path):
    def damaged(name: str, change: Any) -> Path:
        copy = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        shutil.copytree(folder, copy)
        change(copy / name)
        return copy

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-100])

    def replaced(old: str, new: str) -> Any:
        assert old in (folder / "manifest.json").read_text()
        return lambda path: path.write_text(path.read_text().replace(old, new))

    for name, change, sentence in (
        ("plain.onnx", flip, "its SHA-256 differs"),
        ("plain.onnx", cut, "bytes, but must have"),
        ("plain.onnx", Path.unlink, "cannot be read: No such file"),
        ("vocabulary.json", flip, "its SHA-256 differs"),
        ("manifest.json", cut, "is damaged"),
        ("manifest.json", replaced("next.", "after."), "was changed after it was written"),
        ("manifest.json", replaced('"top_k": null', '"top_k": 5'), "was changed after"),
        ("manifest.json", replaced('"fill": 0.0', '"fill": null'), "was changed after"),
        ("manifest.json", replaced('"sha256"', '"sha255"'), "was changed after"),
        ("manifest.json", Path.unlink, "is not a folder of unrolled export"),
        ("manifest.json", lambda path: path.write_text("[]"), "is damaged"),
        ("manifest.json", lambda path: path.write_text('{"format": "x", "version": 2}'), "has the format"),
    ):
        with pytest.raises(ValueError, match=sentence):
            load(damaged(name, change))
    with pytest.raises(ValueError, match=r"graph is 'int8', but .* export again with --int8"):
        load(folder, "int8")
    for threads in (0, 1025):
        with pytest.raises(ValueError, match=f"threads is {threads}, but must be from 1 to 1024"):
            load(folder, threads=threads)


def test_a_graph_of_another_state_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    manifest = Manifest.load(tmp_path)
    first, *others = manifest.state
    for changed in (first._replace(name="layers.9"), first._replace(shape=(*first.shape, 1))):
        manifest.state = [changed, *others]
        manifest.save(tmp_path)
        with pytest.raises(ValueError, match="has other inputs or outputs than its manifest; export again"):
            load(tmp_path)


def test_a_graph_runs_on_the_given_number_of_threads(folder):
    for threads in (1, 2):
        options = load(folder, threads=threads)._session.get_session_options()
        assert options.intra_op_num_threads == threads


def test_states_of_every_fill_and_type_survive_the_manifest(tmp_path):
    kinds = [(torch.float32, x) for x in (0.5, math.inf, -math.inf)] + [(torch.int64, 0), (torch.bool, 1)]
    state = [Leaf(f"layers.{i}.x", kind, (2, 0), 2, fill) for i, (kind, fill) in enumerate(kinds)]
    manifest = of_state(state)
    manifest.save(tmp_path)
    assert Manifest.load(tmp_path) == manifest
    for leaf, (kind, fill) in zip(Manifest.load(tmp_path).state, kinds, strict=True):
        assert torch.equal(leaf.initial(3, past=4), torch.full((3, 2, 4), fill, dtype=kind))


class Counter(ExportedModel):
    """A model that only counts tokens."""

    def _call(self, inputs):
        tokens, position = inputs
        return torch.zeros(*tokens.shape, VOCABULARY), position + tokens.shape[1]


def of_state(state, **fields):
    """Make a manifest of a model with this state."""
    fields = {"length": "any", "max_positions": None} | fields
    common = {"unrolled": "1", "opset": 20, "model": {}, "weights": "", "vocab_size": VOCABULARY}
    return Manifest(**common, start_token=None, state=state, **fields)


def test_every_row_has_the_positions_of_the_model():
    model = Counter(of_state([Leaf("position", torch.int64, (), None, 0)], max_positions=5), 64)
    _, state = model.prefill(
        tokens(2, 3), model.init_state(2), key_padding_mask=torch.tensor([[False] * 3, [True] * 2 + [False]])
    )
    assert state[0].tolist() == [3, 1]
    model.prefill(tokens(2, 2), state)
    with pytest.raises(ValueError, match="the length is 6, but must be at most 5"):
        model.prefill(tokens(2, 3), state)
    with pytest.raises(
        ValueError, match=r"state position is torch.int32 of shape .* but must be torch.int64"
    ):
        model.prefill(tokens(2, 1), state._replace(position=state[0].int()))


class OneByOne:
    """A session of a graph that reads one token per call."""

    def run(self, outputs, feeds):
        assert feeds["tokens"].shape[1] == 1
        return [np.zeros((len(feeds["tokens"]), 1, VOCABULARY), dtype=np.float32), feeds["position"] + 1]


def test_a_graph_for_one_token_reads_a_prompt_token_by_token():
    model = OnnxModel(of_state([Leaf("position", torch.int64, (), None, 0)], length=1), OneByOne())
    logits, state = model.prefill(tokens(2, 3), model.init_state(2))
    assert logits.shape == (2, 3, VOCABULARY)
    assert state[0].tolist() == [3, 3]


def test_a_row_of_padding_keeps_its_state():
    model = OnnxModel(of_state([Leaf("position", torch.int64, (), None, 0)], length=1), OneByOne())
    padding = torch.tensor([[False, True], [True, True]])
    logits, state = model.prefill(tokens(2, 2), model.init_state(2), key_padding_mask=padding)
    assert logits.shape == (2, 2, VOCABULARY)
    assert state[0].tolist() == [1, 0]


@pytest.mark.slow
def test_a_model_is_exported_without_its_dropout_and_keeps_its_mode(tmp_path):
    model = make_cell("gru", dropout=0.9).train()
    export(model, tmp_path)  # compares the graph with the model
    assert model.training
    assert logging.root.manager.disable == 0  # what the exporter says is hidden no longer


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["linear"], indirect=True)
def test_a_state_of_another_model_is_refused(folder, pair):
    found, other = load(folder), load(pair[1])
    with pytest.raises(ValueError, match="of another model"):
        found.step(tokens(2), other.init_state(2))
    with pytest.raises(ValueError, match=r"state .* is torch.* but must be torch"):
        found.step(tokens(2), found.init_state(3))
    with pytest.raises(ValueError, match="holds ids from"):
        found.step(torch.tensor([VOCABULARY]), found.init_state(1))
    with pytest.raises(ValueError, match="must have at least one token"):
        found.prefill(tokens(2, 0), found.init_state(2))


def test_recurrent_cells_are_exported(folder):
    found = load(folder)
    assert found.manifest.state[0].name.startswith("layers.0")
    assert len(generate(found, [[1]], 5, temperature=0)[0]) == 5
