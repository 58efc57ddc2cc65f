"""Exported models of speech say what the models say, from the samples on."""

import json
import shutil
from copy import deepcopy
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sounds import write_wave
from transcribers import N_MELS, RATE, VOCABULARY, make, make_lstm, make_mixed, samples, sound

from unrolled.contract import UnsupportedError
from unrolled.data import Vocabulary
from unrolled.generation import transcribe
from unrolled.interop import onnx
from unrolled.interop.onnx.front_end import LogMel
from unrolled.interop.onnx.speech import SamplesToSymbols, compare
from unrolled.interop.onnx.write import DisagreementError, check_agreement
from unrolled.models import Decoder, DecoderConfig

pytest.importorskip("onnxruntime")


SLOW = pytest.param("transcriber", marks=pytest.mark.slow)  # its export takes half a minute


@pytest.fixture(scope="module", params=[SLOW, "lstm"])
def pair(request, tmp_path_factory):
    model = make_mixed() if request.param == "transcriber" else make_lstm()
    folder = tmp_path_factory.mktemp(request.param)
    return model, folder, onnx.export_transcriber(model, folder, vocabulary=VOCABULARY)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(st.integers(200, 6_000), min_size=1, max_size=3))
@torch.no_grad()
def test_rows_of_any_lengths_are_those_of_the_model(pair, lengths):
    model, folder, _ = pair
    found, front_end = onnx.load_transcriber(folder), LogMel(RATE, N_MELS)
    rows = samples(*lengths)
    x = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=torch.nan)
    padding = torch.arange(x.shape[1]) >= torch.tensor(lengths).unsqueeze(1)
    log_probs, frames = found(x, key_padding_mask=padding), found.frames(x, padding)
    for row, log_prob, count in zip(rows, log_probs, frames.tolist(), strict=True):
        expected = model(front_end(row.unsqueeze(0)))[0]
        assert count == len(expected)
        check_agreement("log_probs", log_prob[:count], expected)  # what an export promises
        assert not log_prob[count:].any()


@pytest.mark.slow
@torch.no_grad()
def test_a_batch_in_the_graph_is_a_batch_of_rows(pair):
    _, folder, _ = pair
    found = onnx.load_transcriber(folder)
    x = torch.stack([*samples(9_001), samples(9_002)[0][:-1]])
    (log_probs,) = found._session.run(None, {"samples": x.numpy()})
    check_agreement("log_probs", torch.from_numpy(log_probs), found(x))
    assert float(torch.from_numpy(log_probs).exp().std(1).max()) > 0.1  # so that its 1e-4 is small


@torch.no_grad()
def test_a_file_is_transcribed_as_by_the_model(pair, tmp_path):
    for library in ("soundfile", "soxr", "kaldi_native_fbank"):
        pytest.importorskip(library)
    model, folder, _ = pair
    found = onnx.load_transcriber(folder)
    assert found.vocabulary == VOCABULARY
    files = [write_wave(tmp_path / f"{n}.wav", [sound(n, n)], RATE) for n in (16_000, 9_000)]
    heard = [found.vocabulary.samples(file) for file in files]
    assert all(map(torch.equal, heard, samples(16_000, 9_000)))
    features = [VOCABULARY.features(file) for file in files]
    for x, y in zip(heard, features, strict=True):
        a, b = found(x.unsqueeze(0))[0], model(y.unsqueeze(0))[0]
        first, second = b.topk(2).values.T
        assert float((first - second).min()) > 2 * float((a - b).abs().max())  # so the paths are the same
    for beam_size in (1, 4):
        expected = transcribe(model, features, beam_size=beam_size)
        assert max(map(len, expected)) > 2
        assert all(map(torch.equal, transcribe(found, heard, beam_size=beam_size), expected))


def test_the_folder_says_what_the_graph_is(pair):
    model, folder, manifest = pair
    from onnx import load

    graph = load(folder / "plain.onnx")
    values = json.loads((folder / "manifest.json").read_text())
    assert (values["inputs"], values["outputs"]) == (["samples"], ["log_probs"])
    assert [x.name for x in (*graph.graph.input, *graph.graph.output)] == ["samples", "log_probs"]
    axes = [
        [x.dim_param for x in y.type.tensor_type.shape.dim]
        for y in (graph.graph.input[0], graph.graph.output[0])
    ]
    assert axes == [["batch", "length"], ["batch", "frames", ""]]
    assert {node.domain for node in graph.graph.node} <= {"", "ai.onnx"}
    assert [x.version for x in graph.opset_import if x.domain == ""] == [20]
    assert values["model"]["model"] == model.model_name
    assert (values["rate"], values["shortest"], values["vocab_size"]) == (RATE, 200, 3)
    assert onnx.SpeechManifest.load(folder) == manifest
    assert Vocabulary.load(folder) == VOCABULARY
    assert onnx.is_export_of(folder, model)
    other = deepcopy(model)
    with torch.no_grad():
        next(iter(other.parameters())).add_(1)
    assert not onnx.is_export_of(folder, other)
    with pytest.raises(DisagreementError, match="log_probs differs from the model's by"):
        compare(SamplesToSymbols(other, RATE), RATE, onnx.load_transcriber(folder)._session)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (lambda: make("linear"), {"opset": 19}, UnsupportedError, "opset is 19, but must be from 20 to 25"),
        (lambda: make("linear").half(), {}, UnsupportedError, "float16, but must be float32"),
        (lambda: make("topk", n_layers=1), {}, UnsupportedError, "ONNX has no operator for .*topk.*; linear, window"),
        (lambda: make("linear", positions="learned"), {}, UnsupportedError, "positions is 'learned', but must be"),
        (lambda: torch.nn.Linear(2, 2), {}, ValueError, "model is a Linear, but must be a model of speech"),
        (lambda: make("linear"), {"vocabulary": Vocabulary("ids")}, ValueError, "kind 'ids', but must be of the kind 's"),
        (
            lambda: make("linear"),
            {"vocabulary": Vocabulary("speech", units=["a"], rate=RATE, n_mels=N_MELS, counted="word")},
            ValueError,
            "has 1 ids, but the model has 3",
        ),
        (
            lambda: make("linear"),
            {"vocabulary": Vocabulary("speech", units=list("abc"), rate=RATE, n_mels=40, counted="word")},
            ValueError,
            "vocabulary has n_mels 40, but must have the 20 of the model",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_exported(model, options, error, message, tmp_path):
    with pytest.raises(error, match=message):
        onnx.export_transcriber(model(), tmp_path, **{"vocabulary": VOCABULARY, **options})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("pair", ["lstm"], indirect=True)
def test_wrong_inputs_are_refused(pair):
    found = onnx.load_transcriber(pair[1])
    x = torch.zeros(2, 300)
    for wrong, mask, message in (
        (x[0], None, r"x is torch.float32 of shape \[300\], but must be samples, torch.float32 \[B, n\]"),
        (x.long(), None, "x is torch.int64"),
        (x[:, :199], None, "a row has 199 samples, but must have at least 200"),
        (x, torch.arange(300).expand(2, 300) > 150, "a row has 151 samples, but must have at least 200"),
        (
            x,
            torch.arange(300).expand(2, 300) < 50,
            "has padding before a sample, but must have it at the end",
        ),
        (x, torch.zeros(2, 3, dtype=torch.bool), "key_padding_mask has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            found(wrong, key_padding_mask=mask)
    assert found(x[:0]).shape == (0, 0, 4)


def test_a_graph_with_other_outputs_is_refused(tmp_path):
    from onnx import TensorProto, helper

    given, got = (helper.make_tensor_value_info(x, TensorProto.FLOAT, [1]) for x in ("samples", "logits"))
    graph = helper.make_graph([helper.make_node("Identity", ["samples"], ["logits"])], "x", [given], [got])
    content = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    manifest = onnx.SpeechManifest(
        unrolled="1", opset=20, model={}, weights="", vocab_size=3, rate=RATE, shortest=200
    )
    names = json.dumps(asdict(VOCABULARY)).encode()
    manifest.write(tmp_path, {"plain": content.SerializeToString()}, {"vocabulary.json": names})
    with pytest.raises(ValueError, match=r"has other inputs or outputs than its manifest\.json"):
        onnx.load_transcriber(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("pair", ["lstm"], indirect=True)
def test_damaged_and_other_folders_are_refused(pair, tmp_path):
    _, folder, _ = pair

    def damaged(name, change):
        copy = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        shutil.copytree(folder, copy)
        path = copy / name
        path.write_bytes(change(path.read_bytes()))
        return copy

    for name, change, sentence in (
        ("plain.onnx", lambda x: x[:-1], "bytes, but must have"),
        ("plain.onnx", lambda x: x[:-1] + b"?", "its SHA-256 differs"),
        ("vocabulary.json", lambda x: x.replace(b'"a"', b'"x"'), "its SHA-256 differs"),
        ("manifest.json", lambda x: x[:-9], "is damaged"),
        ("manifest.json", lambda x: x.replace(b"8000", b"9000"), "was changed after it was written"),
    ):
        with pytest.raises(ValueError, match=sentence):
            onnx.load_transcriber(damaged(name, change))
    for threads in (0, 1025):
        with pytest.raises(ValueError, match=f"threads is {threads}, but must be from 1 to 1024"):
            onnx.load_transcriber(folder, threads=threads)
    with pytest.raises(
        ValueError, match="has the format 'unrolled-onnx-speech' in version 1, but must have 'unrolled-onnx'"
    ):
        onnx.load(folder)
    decoder = tmp_path / "decoder"
    onnx.export(Decoder(DecoderConfig(4, d_model=8, n_layers=1, n_heads=1)), decoder)
    with pytest.raises(
        ValueError, match="has the format 'unrolled-onnx' in version 1, but must have 'unrolled-onnx-speech'"
    ):
        onnx.load_transcriber(decoder)
