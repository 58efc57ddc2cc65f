"""Plans in folders: they are what was saved, are read where they lie, and damaged ones are refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from planned import MODELS, decoder, tokens
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from unrolled.contract import UnsupportedError
from unrolled.data import Vocabulary
from unrolled.decode import load, load_model, plan, saving
from unrolled.decode.packing import PACKINGS
from unrolled.files import add_digest, read_header
from unrolled.folders import PLAN_FILE
from unrolled.models import Decoder
from unrolled.ops import native

if not native.available():
    pytest.skip(str(native.missing()), allow_module_level=True)


def saved(folder, weights="int8", **options):
    made = plan(decoder(**options), weights)
    made.save(folder)
    return made


@pytest.mark.parametrize("name", MODELS)
def test_it_computes_the_same(name, tmp_path):
    weights = list(PACKINGS)[len(name) % len(PACKINGS)]
    made = saved(tmp_path, weights, **MODELS[name])
    found, ids = load(tmp_path), tokens()
    assert (found.config, found.weights) == (made.config, made.weights)
    (expected, of_made), (logits, of_found) = (p.prefill(ids, p.init_state(3)) for p in (made, found))
    assert torch.equal(logits, expected)
    for expected, x in zip(made.to_model(of_made).layers, found.to_model(of_found).layers, strict=True):
        assert str(x) == str(expected)
    assert found.nbytes <= made.nbytes


@pytest.mark.parametrize("weights", PACKINGS)
@pytest.mark.parametrize("name", ["hybrid", "tied embeddings", "odd widths"])
def test_every_form(name, weights, tmp_path):
    made, ids = saved(tmp_path / "a", weights, **MODELS[name]), tokens()
    found = load(tmp_path / "a")
    found.save(tmp_path / "b")  # what was read can be written
    assert (tmp_path / "a" / PLAN_FILE).read_bytes() == (tmp_path / "b" / PLAN_FILE).read_bytes()
    expected, logits = (p.prefill(ids, p.init_state(3))[0] for p in (made, load(tmp_path / "b")))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["hybrid", "rwkv4", "rwkv7"])
def test_weights_of_half_precision_are_kept_in_fp32(name, dtype, tmp_path):
    made, ids = plan(decoder(**MODELS[name]).to(dtype)), tokens()
    made.save(tmp_path)
    found = load(tmp_path)
    assert torch.equal(*(p.prefill(ids, p.init_state(3))[0] for p in (made, found)))
    assert set(read_header(tmp_path / PLAN_FILE).dtypes.values()) == {"F32", "I16", "U8"}


def test_the_file_is_mapped_and_aligned(tmp_path):
    saved(tmp_path, **MODELS["delta rule, shared keys"])
    found = load(tmp_path)
    with Path("/proc/self/maps").open() as maps:
        spans = [line.split()[0] for line in maps if line.rstrip().endswith(str(tmp_path / PLAN_FILE))]
    [(begin, end)] = [[int(x, 16) for x in span.split("-")] for span in spans]
    for name, matrix in found._program.packed.items():
        for part, x in matrix.tensors().items():
            assert begin <= x.data_ptr() < end, (name, part)
        assert matrix.tiles.data_ptr() % 64 == 0, name
    assert begin <= found._program.others["embedding.weight"].data_ptr() < end


def test_nothing_is_packed_or_initialised(tmp_path, monkeypatch):
    saved(tmp_path, **MODELS["kda"])
    monkeypatch.setattr("unrolled.decode.builder.pack", None)
    before = torch.random.get_rng_state()
    load(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.slow
def test_loading_imports_nothing_that_takes_long(tmp_path):
    saved(tmp_path, **MODELS["pixels"])
    code = f"from unrolled import decode; decode.load({str(tmp_path)!r}); import sys; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"sympy", "torch._dynamo"} & set(modules.split())


def test_documents_belong_to_a_plan(tmp_path):
    model = Vocabulary("text", characters=[chr(i) for i in range(33, 104)]).attach(decoder())
    plan(model, "int4").save(tmp_path)
    assert load(tmp_path).documents == model.documents
    assert Vocabulary.load(tmp_path).characters[0] == "!"
    file = tmp_path / "vocabulary.json"
    file.write_text(file.read_text().replace('"!"', '"~"'))
    with pytest.raises(ValueError, match=r"vocabulary\.json was changed after it was saved: its SHA-256"):
        load(tmp_path)


def rewritten(folder, change, digest=True):
    """Change the tensors of a plan, as another program might; the digest is right all the same."""
    file = folder / PLAN_FILE
    tensors, header = load_file(file), read_header(file)
    metadata = dict(header.metadata)
    change(tensors, metadata)
    save_file(tensors, file, {name: x for name, x in metadata.items() if name != "sha256"})
    if digest:
        config = json.loads((folder / "config.json").read_text())
        add_digest(file, {"config.json": config})


UP = "stack.blocks.0.ff.up"
CHANGES = {
    "another layout": (lambda _, m: m.update(layout="tiles of 32 outputs"),
                       "holds tiles of 32 outputs, version 2, but must hold tiles of 64"),
    "no matrix": (lambda x, _: [x.pop(f"{UP}.{part}") for part in ("tiles", "scales", "sums", "bias")],
                  f"'{UP}.bias'"),
    "tiles of another size": (lambda x, _: x.update({f"{UP}.tiles": x[f"{UP}.tiles"][:-64]}),
                              f"not of this model: {UP} has the packed tensors tiles"),
    "tiles of another type": (lambda x, _: x.update({f"{UP}.tiles": x[f"{UP}.tiles"].to(torch.int16)}),
                              f"{UP} has the packed tensors"),
    "no sums": (lambda x, _: x.pop(f"{UP}.sums"), f"{UP} has the packed tensors"),
    "no bias": (lambda x, _: x.pop(f"{UP}.bias"), f"{UP} has the packed tensors"),
    "an unknown matrix": (lambda x, _: x.update({"a.tiles": torch.zeros(64, dtype=torch.uint8)}),
                          "a is packed, but the model has no such matrix"),
    "a packed norm": (
        lambda x, _: x.update({"stack.norm.tiles": torch.zeros(64, dtype=torch.uint8)}) or x.pop("stack.norm.weight"),
        "stack.norm is packed, but the model has no such matrix",
    ),
    "no norm": (lambda x, _: x.pop("stack.norm.weight"), "lacks 1 tensors of this model"),
    "another norm": (lambda x, _: x.update({"stack.norm.weight": torch.ones(31)}),
                     r"stack.norm.weight in .* has shape \[31\], but must have \[32\]"),
    "an unknown tensor": (lambda x, _: x.update({"b": torch.ones(3)}), "1 tensors unknown to this model"),
    "another form": (lambda _, m: m.update(weights="bf16"), "has the packed tensors"),
    "an unknown form": (lambda _, m: m.update(weights="int2"), "is not a file of packed weights"),
    "no form": (lambda _, m: m.pop("weights"), "is not a file of packed weights that this library wrote"),
    "another version": (lambda _, m: m.update(version="1"), "version 1, but must hold tiles"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), CHANGES.values(), ids=CHANGES)
def test_foreign_files_are_refused(change, reason, tmp_path):
    saved(tmp_path)
    rewritten(tmp_path, lambda *_: None)
    load(tmp_path)  # the rewriting alone is no reason
    rewritten(tmp_path, change)
    for read in (load, load_model):
        with pytest.raises(ValueError, match=reason):
            read(tmp_path)


def test_a_file_without_its_digest_is_refused(tmp_path):
    saved(tmp_path)
    rewritten(tmp_path, lambda *_: None, digest=False)
    with pytest.raises(ValueError, match="is not a file of packed weights that this library wrote"):
        load(tmp_path)


def test_damage_is_noticed(tmp_path):
    saved(tmp_path / "plan")
    content = (tmp_path / "plan" / PLAN_FILE).read_bytes()
    for place in (9, len(content) // 2, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        (tmp_path / "plan" / PLAN_FILE).write_bytes(changed)
        with pytest.raises(ValueError, match=PLAN_FILE):
            load(tmp_path / "plan")
    for size in (0, 7, 100, len(content) - 1):
        (tmp_path / "plan" / PLAN_FILE).write_bytes(content[:size])
        with pytest.raises(ValueError, match="is not a readable safetensors file"):
            load(tmp_path / "plan")


def test_other_folders_are_refused(tmp_path):
    decoder().save(tmp_path / "model")
    with pytest.raises(ValueError, match=f"holds no packed weights: it has no {PLAN_FILE}"):
        load(tmp_path / "model")
    with pytest.raises(ValueError, match="is not a model's folder"):
        load(tmp_path)
    shutil.copy(tmp_path / "model" / "model.safetensors", tmp_path / "model" / PLAN_FILE)
    with pytest.raises(ValueError, match="is not a file of packed weights"):
        load(tmp_path / "model")
    saved(tmp_path / "plan")
    with pytest.raises(ValueError, match=f"holds packed weights, in {PLAN_FILE}"):
        Decoder.load(tmp_path / "plan")
    config = tmp_path / "plan" / "config.json"
    for key, value in (("n_layers", 10**6), ("d_model", 64), ("activation", "relu"), ("model", "encoder")):
        before = config.read_text()
        config.write_text(json.dumps(json.loads(before) | {key: value}))
        with pytest.raises(ValueError, match=r"config\.json was changed|holds a model of kind 'encoder'"):
            load(tmp_path / "plan")
        config.write_text(before)


def test_it_needs_the_kernels(tmp_path, monkeypatch):
    saved(tmp_path)
    monkeypatch.setattr(native, "missing", lambda: "there is no compiler")
    with pytest.raises(UnsupportedError, match="a plan needs the C\\+\\+ kernels: there is no compiler"):
        load(tmp_path)


def test_the_file_says_what_it_is(tmp_path):
    saved(tmp_path, "int4")
    with safe_open(tmp_path / PLAN_FILE, "pt") as file:
        metadata = file.metadata()
        names = set(file.keys())
    assert metadata["weights"] == "int4"
    assert metadata["layout"] == "tiles of 64 outputs, groups of 32 inputs"
    assert metadata["version"] == "2"
    assert len(metadata["sha256"]) == 64
    assert {f"{UP}.tiles", f"{UP}.bias", "head.project.scales", "stack.norm.weight"} <= names
    assert f"{UP}.weight" not in names


def test_a_plan_and_a_model_do_not_share_a_folder(tmp_path):
    model = decoder()
    for first, second, file in ((model, plan(model), "model"), (plan(model), model, "plan")):
        first.save(tmp_path / file)
        with pytest.raises(ValueError, match=f"holds {file}.safetensors, which may be of another model"):
            second.save(tmp_path / file)


def test_two_layers_may_share_a_norm(tmp_path):
    model, ids = decoder(), tokens()
    model.stack.blocks[1].ff_norm = model.stack.blocks[0].ff_norm
    made = plan(model)
    made.save(tmp_path)
    assert torch.equal(*(p.prefill(ids, p.init_state(3))[0] for p in (made, load(tmp_path))))


def test_packed_matrices_are_not_in_the_model_too(tmp_path):
    saved(tmp_path)
    found = saving.read(tmp_path)
    layers = {name for name, layer in found.model.named_modules() if isinstance(layer, nn.Linear)}
    assert layers == found.packed.keys()
    assert all(x.is_meta for name in layers for x in found.model.get_submodule(name).parameters())


@torch.no_grad()
def test_a_matrix_with_many_inputs_has_16_bits_in_the_model_too(tmp_path):
    made, ids = saved(tmp_path, n_layers=1, d_ff=65_568), tokens()
    found, _ = made.prefill(ids, made.init_state(3))
    torch.testing.assert_close(found, load_model(tmp_path)(ids), rtol=0, atol=0.1)
