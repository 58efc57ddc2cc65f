"""The folder of a web page: complete, relocatable, with the published runtime; tested without a network."""

import hashlib
import importlib
import io
import json
import shutil
import subprocess
import tarfile
import threading
import urllib.request
from pathlib import Path

import pytest
import torch
from commands import error, everything, works
from transcribers import VOCABULARY, make, make_lstm

import unrolled
from unrolled import demo_models
from unrolled.cli import _page
from unrolled.data import Vocabulary
from unrolled.data._tokenizer import TextTokenizer
from unrolled.decode import load_model, plan
from unrolled.interop import web
from unrolled.interop.onnx import Manifest, SpeechManifest, is_export_of, load
from unrolled.interop.web import runtime as ort
from unrolled.interop.web.entries import distinguished, entry_of
from unrolled.models import Decoder, DecoderConfig, Encoder, EncoderConfig
from unrolled.ops import native

needs_kernels = pytest.mark.skipif(not native.available(), reason="plans need the C++ kernels")
FILES = {name: f"the bytes of {name}".encode() for name in ort.SHA256}
WASM = list(ort.BUILDS["wasm"].values())


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Replace the published files by small ones, and the cache by an empty one."""
    for name, content in FILES.items():
        monkeypatch.setitem(ort.SHA256, name, hashlib.sha256(content).hexdigest())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    folder = tmp_path / "dist"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    config = DecoderConfig(5, d_model=8, n_layers=1, n_heads=2, max_length=16, start_token=True)
    Decoder(config).save(folder)
    (folder / "vocabulary.json").write_text('{"kind": "image", "characters": null, "shape": [4, 4]}')
    return folder


def fake_npm(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> list[list[str]]:
    """Let `npm pack` write a package of these files; return the commands that it is called with."""
    calls = []

    def pack(command: list[str], **options: object) -> None:
        calls.append(command)
        with tarfile.open(Path(command[-1]) / "onnxruntime-web.tgz", "w:gz") as package:
            for name, content in files.items():
                member = tarfile.TarInfo(f"package/dist/{name}")
                member.size = len(content)
                package.addfile(member, io.BytesIO(content))

    monkeypatch.setattr(ort.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(ort.subprocess, "run", pack)
    return calls


@pytest.mark.slow
def test_a_page_is_complete(run, runtime, tmp_path):
    out = tmp_path / "page"
    printed = works("export", run, out, "--web", "--runtime", runtime, "--temperature", 0.5).output
    assert str(out / "index.html") in printed
    (entry,) = json.loads((out / "models.json").read_text())
    assert entry["name"] == run.name
    assert (entry["title"], entry["kind"], entry["attention"]) == ("Linear attention", "image", "linear")
    assert entry["bytes"] == (out / "models" / run.name / "plain.onnx").stat().st_size

    model = load(out / "models" / run.name)  # checks the hashes of the manifest
    logits, _ = model.prefill(torch.tensor([[5, 1]]), model.init_state(1))
    assert logits.shape == (1, 2, 5)
    manifest = json.loads((out / "models" / run.name / "manifest.json").read_text())
    assert [probe["name"] for probe in manifest["probes"]] == ["layers.0.phi_q"]
    assert manifest["sampling"]["temperature"] == 0.5

    record = json.loads((out / "runtime" / "runtime.json").read_text())
    assert list(record["builds"]) == ["wasm"]
    names = record["builds"]["wasm"].values()
    assert [Path(name).suffix for name in names] == [".js", ".wasm"]  # plain servers know .js, but not .mjs
    for name, published in zip(names, WASM, strict=True):
        content = (out / "runtime" / name).read_bytes()
        assert content == FILES[published]
        assert record["files"][name] == {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    assert "MIT License" in (out / "runtime" / "LICENSE.txt").read_text()
    assert (out / "runtime" / "ThirdPartyNotices.txt").stat().st_size > 1000
    source = Path(unrolled.__file__).with_name("web")
    assert {path.name for path in source.iterdir()} < {path.name for path in out.iterdir()}


@pytest.mark.slow
@pytest.mark.usefixtures("untraced")
def test_a_page_of_models_of_speech(runtime, tmp_path):
    softmax, lstm = tmp_path / "softmax", tmp_path / "lstm"
    for folder, model in ((softmax, make("softmax", n_layers=1)), (lstm, make_lstm())):
        VOCABULARY.attach(model).save(folder)
    out, options = tmp_path / "page", ("--web", "--runtime", runtime)
    assert "--temperature and the like cannot be used with models of speech" in error(
        "export", softmax, out, *options, "--temperature", 1
    )
    works("export", softmax, lstm, out, *options)
    entries = json.loads((out / "models.json").read_text())
    assert [(x["title"], x["kind"], x["group"]) for x in entries] == [
        ("Softmax attention", "speech", "Speech"),
        ("BiLSTM", "speech", "Speech"),
    ]
    assert Vocabulary.load(out / "models" / "lstm") == VOCABULARY
    manifest = SpeechManifest.load(out / "models" / "lstm")
    for name in ("plain.onnx", "vocabulary.json"):
        manifest.read(out / "models" / "lstm", name)  # checks the hashes
    assert web.is_current_page_of(out, {"softmax": softmax, "lstm": lstm})
    assert not web.is_current_page_of(out, {"softmax": lstm, "lstm": lstm})


@pytest.mark.slow
@pytest.mark.usefixtures("untraced")
def test_a_page_is_written_again_for_the_same_models_only(run, runtime, tmp_path):
    out = tmp_path / "page"
    options = [out, "--web", "--runtime", runtime]
    works("export", run, *options)
    works("export", run, *options)
    other = tmp_path / "other" / run.name  # of the same name and config
    model = Decoder.load(run)
    with torch.no_grad():
        model.embedding.weight += 1
    model.save(other)
    shutil.copy(run / "vocabulary.json", other)
    before = (out / "models" / run.name / "manifest.json").read_bytes()
    assert "must be empty or hold a page of these runs" in error("export", other, *options)
    assert (out / "models" / run.name / "manifest.json").read_bytes() == before
    works("export", other, *options, "--force")


@pytest.mark.usefixtures("untraced")
def test_a_page_keeps_nothing_of_an_earlier_page_but_files_of_the_user(run, runtime, tmp_path):
    shutil.copytree(run, tmp_path / "other")
    out, fresh = tmp_path / "page", tmp_path / "fresh"
    web.write_site({"other": tmp_path / "other", "digits": run}, out, runtime=runtime, webgpu=True)
    mine = {"notes.txt", "models/digits/notes.txt", "runtime/notes.txt"}
    for name in mine:
        (out / name).write_text("mine")
    for page in (out, fresh):
        web.write_site({"new": run}, page, runtime=runtime)
    assert everything(out).keys() == everything(fresh).keys() | mine | {"models/digits"}


@pytest.mark.usefixtures("untraced")
def test_only_files_inside_a_page_are_deleted(run, runtime, tmp_path):
    out, outside = tmp_path / "page", tmp_path / "outside"
    web.write_site({"digits": run}, outside, runtime=runtime)
    before = everything(outside)
    shutil.copytree(outside, out)
    (out / "models.json").write_text('[{"name": "../../outside/models/digits"}]')
    (out / "runtime" / "runtime.json").write_text('{"files": {"../../outside/index.html": {}}}')
    web.write_site({"new": run}, out, runtime=runtime)
    assert everything(outside) == before


def test_every_file_that_the_page_names_exists():
    source = Path(unrolled.__file__).with_name("web")
    for path in source.glob("*.js"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("import "):
                assert (source / line.split('"')[1]).is_file(), line
    html = (source / "index.html").read_text(encoding="utf-8")
    for name in ("icon.svg", "style.css", "page.js"):
        assert f'"{name}"' in html
        assert (source / name).is_file()
    assert "http://" not in html
    assert "https://" not in html


def test_npm_is_called_once(monkeypatch):
    calls = fake_npm(monkeypatch, FILES)
    found = web.runtime_files()
    assert {name: path.read_bytes() for name, path in found.items()} == {name: FILES[name] for name in WASM}
    assert web.runtime_files() == found
    assert len(calls) == 1
    assert calls[0][1:3] == ["pack", f"onnxruntime-web@{ort.VERSION}"]
    assert len(web.runtime_files(webgpu=True)) == 4
    assert len(calls) == 2


def test_a_damaged_cache_is_fetched_again(monkeypatch):
    calls = fake_npm(monkeypatch, FILES)
    web.runtime_files()[WASM[0]].write_bytes(b"damaged")
    assert web.runtime_files()[WASM[0]].read_bytes() == FILES[WASM[0]]
    assert len(calls) == 2


def test_another_package_is_refused(monkeypatch):
    fake_npm(monkeypatch, FILES | {WASM[1]: b"something else"})
    with pytest.raises(ValueError, match=r"from npm is not the file of onnxruntime-web 1\.30\.0"):
        web.runtime_files()
    fake_npm(monkeypatch, {})
    with pytest.raises(ValueError, match="from npm is not"):
        web.runtime_files()


def test_no_npm_and_no_network_are_one_sentence(monkeypatch):
    monkeypatch.setattr(ort.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"there is no npm .*`npm pack onnxruntime-web@1\.30\.0`.*--runtime"):
        web.runtime_files()

    def offline(command: list[str], **options: object) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(ort.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(ort.subprocess, "run", offline)
    with pytest.raises(ValueError, match=r"npm could not fetch onnxruntime-web 1\.30\.0: .*--runtime"):
        web.runtime_files()


def test_a_given_runtime_is_checked_against_its_hashes(runtime):
    (runtime / WASM[0]).write_bytes(b"another version")
    with pytest.raises(ValueError, match=r"is not the file of onnxruntime-web 1\.30\.0: its SHA-256 differs"):
        web.runtime_files(runtime)
    (runtime / WASM[0]).unlink()
    with pytest.raises(ValueError, match=r"has no ort\.wasm\.bundle\.min\.mjs; it is in dist/ of the npm"):
        web.runtime_files(runtime)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "out", "--web", "--int8"], "--int8 cannot be used with --web"),
        (["{run}", "out", "--webgpu"], "--webgpu and --runtime require --web"),
        (["{run}", "{run}", "out"], "2 runs were given, but must be one without --web"),
        (["{run}", "{run}", "out", "--web"], "have the same name"),
        (["nowhere", "out", "--web"], "it does not exist"),
    ],
)
def test_wrong_arguments_are_one_sentence(run, arguments, message):
    assert message in error("export", *(argument.format(run=run) for argument in arguments))


def test_names_and_vocabularies_are_checked(run, tmp_path):
    with pytest.raises(ValueError, match="must have the folder of at least one run"):
        web.write_site({}, tmp_path / "page")
    for name in ("", "../up", ".hidden", "a/b"):
        with pytest.raises(ValueError, match="must be a plain file name"):
            web.write_site({name: run}, tmp_path / "page")
    odd = Vocabulary(
        "tokenizer", tokenizer=TextTokenizer.learn([], 257).to_json().replace("ByteLevel", "Other")
    )
    lacking = json.loads(TextTokenizer.learn([], 257).to_json())
    del lacking["model"]["vocab"]["a"]
    for number, tokenizer in enumerate([odd.tokenizer, json.dumps(lacking), "{}", "{"]):
        folder = tmp_path / f"odd{number}"
        folder.mkdir()
        (folder / "vocabulary.json").write_text(json.dumps({"kind": "tokenizer", "tokenizer": tokenizer}))
        with pytest.raises(ValueError, match="has a tokenizer that a page cannot run: it must be byte pairs"):
            web.write_site({"odd": folder}, tmp_path / "page")
    pieces = tmp_path / "pieces"
    pieces.mkdir()
    (pieces / "vocabulary.json").write_text('{"kind": "bpe"}')
    with pytest.raises(
        ValueError, match="kind 'bpe', but must have 'text', 'tokenizer', 'image', 'ids' or 'speech'"
    ):
        web.write_site({"pieces": pieces}, tmp_path / "page")


def test_what_is_in_a_run_is_checked_before_a_page_is_written(run, tmp_path):
    def refused(change) -> str:
        copy = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        shutil.copytree(run, copy)
        change(copy)
        printed = error("export", copy, tmp_path / "page", "--web")
        assert not (tmp_path / "page").exists()
        return printed

    def classifier(copy: Path) -> None:
        Encoder(EncoderConfig(4, d_model=8, n_layers=1, n_heads=2, max_length=9, n_classes=2)).save(copy)

    def vocabulary(text: str):
        return lambda copy: (copy / "vocabulary.json").write_text(text)

    assert "holds a model of the kind 'encoder', which does not predict tokens" in refused(classifier)
    assert "vocabulary.json has 2 ids" in refused(vocabulary('{"kind": "text", "characters": ["a", "b"]}'))
    assert "vocabulary.json is damaged" in refused(vocabulary("{"))
    (tmp_path / "list").mkdir()
    vocabulary("[1]")(tmp_path / "list")
    with pytest.raises(ValueError, match=r"vocabulary\.json is damaged"):
        web.write_site({"list": tmp_path / "list"}, tmp_path / "page")


def test_models_of_one_vocabulary_stand_side_by_side():
    text = {"kind": "text", "characters": ["a", "b"]}
    verse = {"kind": "text", "characters": ["a", "c"], "data": "verse"}
    other = {"kind": "text", "characters": None}
    image = {"kind": "image", "shape": [8, 8]}
    decoder = {"model": "decoder", "attention": "linear"}
    lstm = {"model": "recurrent_lm", "cell": "lstm"}
    models = [
        (decoder, text, "Text", "Linear attention"),
        (decoder | {"attention": "softmax"}, text, "Text", "Softmax attention"),
        (decoder | {"attention": ["delta_net", "delta_net"]}, text, "Text", "Delta net attention"),
        (decoder | {"attention": ["linear", "window"]}, image, "8 × 8 pixels", "Linear and window attention"),
        (decoder | {"attention": "mamba2"}, image, "8 × 8 pixels", "Mamba-2 attention"),
        (decoder | {"attention": ["rwkv4"] * 2}, image, "8 × 8 pixels", "RWKV-4 attention"),
        (
            decoder | {"attention": ["window", "aft", "kda"]},
            image,
            "8 × 8 pixels",
            "Window, AFT and KDA attention",
        ),
        (decoder, text, "Text", "Linear attention (7)"),
        (decoder, other, "Text: 8", "Linear attention"),
        (lstm, other, "Text: 8", "LSTM"),
        (decoder, verse, "verse", "Linear attention"),
        (decoder | {"attention": "softmax"}, verse | {"data": "prose"}, "verse", "Softmax attention"),
        (decoder, other | {"data": "verse", "characters": ["d"]}, "verse: 12", "Linear attention"),
    ]
    entries = [entry_of(str(n), model, vocabulary, 1) for n, (model, vocabulary, *_) in enumerate(models)]
    vocabularies = {str(n): vocabulary for n, (_, vocabulary, *_) in enumerate(models)}
    found = distinguished(entries, vocabularies)
    assert [(entry["group"], entry["title"]) for entry in found] == [tuple(rest) for _, _, *rest in models]
    assert [entry["transformer"] for entry in entries[8:11]] == [True, False, True]


@pytest.mark.slow
@pytest.mark.usefixtures("untraced")
def test_models_of_other_numbers_of_ids_do_not_stand_side_by_side(runtime, tmp_path):
    runs = {}
    for name, size in (("few", 5), ("many", 6), ("few-too", 5)):
        runs[name] = tmp_path / name
        Decoder(DecoderConfig(size, d_model=8, n_layers=1, n_heads=2, max_length=16)).save(runs[name])
        (runs[name] / "vocabulary.json").write_text('{"kind": "ids"}')
    web.write_site(runs, tmp_path / "page", runtime=runtime)
    entries = json.loads((tmp_path / "page" / "models.json").read_text())
    assert [entry["group"] for entry in entries] == ["Token ids", "Token ids: many", "Token ids"]


def test_a_port_in_use_is_named(tmp_path):
    with _page.make_server(tmp_path) as server, pytest.raises(ValueError, match=r"--port \d+ cannot be used"):
        _page.serve(tmp_path, server.server_port)


def test_the_server_is_local_and_has_the_mime_types_of_modules(tmp_path):
    (tmp_path / "a.js").write_text("")
    (tmp_path / "a.wasm").write_text("")
    with _page.make_server(tmp_path) as server:
        assert server.server_address[0] == "127.0.0.1"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        for name, kind in {"a.js": "text/javascript", "a.wasm": "application/wasm"}.items():
            with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/{name}") as answer:
                assert answer.headers["Content-Type"] == kind
        server.shutdown()


@pytest.mark.slow
def test_the_demo_trains_digits_and_reports_missing_text(runtime, tmp_path, monkeypatch):
    demo = importlib.import_module("unrolled.cli.demo")  # `unrolled.cli.demo` itself is the command
    small = ["model.d_model=16", "model.n_layers=2", "model.n_heads=2"]
    monkeypatch.setattr(demo, "DIGITS", [*demo.DIGITS, *small])
    monkeypatch.setenv("UNROLLED_DATA", str(tmp_path / "none"))
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    written = {}

    def write_site(runs, out, **options):
        written.update(runs=runs, out=out, **options)
        return out

    monkeypatch.setattr(web, "write_site", write_site)
    out = tmp_path / "runs"
    result = works(
        "demo", "--web", "--train", "--no-serve", "--steps", 10, "--out", out, "--runtime", runtime
    )
    assert "the page will have no text-rwkv4 model" in result.output
    assert written["out"] == out / "page"
    assert written["runtime"] == runtime
    trained = {name: Decoder.load(run).config.attention for name, run in written["runs"].items()}
    assert trained == {"digits-linear": ["linear", "window"], "digits-softmax": "softmax"}
    assert all((run / "vocabulary.json").is_file() for run in written["runs"].values())


@pytest.fixture
def shipped(run, tmp_path, monkeypatch):
    """Let small models stand for those that come with the library."""
    plan(Decoder.load(run), "fp32").save(tmp_path / "shipped")
    shutil.copy(run / "vocabulary.json", tmp_path / "shipped")
    monkeypatch.setattr(demo_models, "NAMES", ("digits",))
    monkeypatch.setattr(demo_models, "path", lambda name: tmp_path / "shipped")
    return tmp_path / "shipped"


@needs_kernels
@pytest.mark.usefixtures("untraced")
def test_the_demo_shows_the_models_that_come_with_the_library(shipped, runtime, tmp_path, monkeypatch):
    words = ["demo", "--web", "--no-serve", "--out", tmp_path / "page", "--runtime", runtime]
    result = works(*words)
    assert f"The page: {tmp_path / 'page' / 'index.html'}" in result.output
    assert is_export_of(tmp_path / "page" / "models" / "digits", load_model(shipped))
    before = everything(tmp_path / "page")
    monkeypatch.setattr(web, "write_site", None)
    works(*words)  # writes nothing
    assert everything(tmp_path / "page") == before


@needs_kernels
@pytest.mark.usefixtures("untraced")
def test_the_page_of_the_demo_is_written_again_when_the_library_changed(shipped, runtime, tmp_path):
    words = ["demo", "--web", "--no-serve", "--out", tmp_path / "page", "--runtime", runtime]
    works(*words)
    before = everything(tmp_path / "page")
    (tmp_path / "page" / "page.js").write_text("old")
    works(*words)
    assert everything(tmp_path / "page") == before
    binary = json.loads((tmp_path / "page/runtime/runtime.json").read_text())["builds"]["wasm"]["binary"]
    for file in ("runtime/runtime.json", "models/digits/plain.onnx", f"runtime/{binary}"):
        (tmp_path / "page" / file).unlink()
        works(*words)
        assert everything(tmp_path / "page") == before
    assert "has no" in error(*words[:-1], tmp_path)  # a runtime is checked though the page needs none
    manifest = Manifest.load(tmp_path / "page" / "models" / "digits")
    manifest.unrolled = "0.0.1"
    manifest.save(tmp_path / "page" / "models" / "digits")
    works(*words)
    assert everything(tmp_path / "page") == before
    (tmp_path / "page" / "models.json").write_text("[]")
    works(*words)
    (tmp_path / "page" / "models.json").unlink()  # now it may be anybody's
    assert "must be empty or hold the page of these models" in error(*words)
    works(*words, "--force")
    assert everything(tmp_path / "page") == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--web", "--steps", 20], "--steps is for training: add --train"),
        (["--web", "--seed", 0], "--seed is for training: add --train"),
        (["--web", "--fresh"], "--resume/--fresh is for training: add --train"),
        (["--train"], "--port, --no-serve, --runtime and --train require --web"),
    ],
)
def test_what_trains_nothing_takes_no_settings_of_a_training(arguments, message, tmp_path):
    assert error("demo", *arguments, "--out", tmp_path / "out") == message
    assert not (tmp_path / "out").exists()


def refuse(*arguments: object, **options: object) -> None:
    raise OSError("no network")
