"""A page of small models, a server that only this machine can reach, and a headless Chromium.

Run by `make test-web`: it needs npm, chromium and chromium-driver.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from browser import CHARACTERS, axe_source, chromium, resize, served
from filelock import FileLock
from selenium import webdriver

from unrolled.interop.onnx import folder
from unrolled.interop.onnx.graph import Recurrence
from unrolled.interop.web import write_site
from unrolled.models import Decoder, DecoderConfig


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.web)


def small_model(seed: int, **config: object) -> Decoder:
    """Make a model that is untrained, but sure of itself, and does not soon repeat one token."""
    torch.manual_seed(seed)
    model = Decoder(DecoderConfig(**{"d_model": 32, "n_layers": 2, "n_heads": 2, **config})).eval()
    with torch.no_grad():
        for x in model.parameters():
            if x.dim() == 2:
                x.mul_(6)
        model.embedding.weight.mul_(0.3)  # so that positions count as well
        model.head.project.weight.mul_(3)
    return model


@pytest.fixture(scope="session", autouse=True)
def traced_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trace each model once in all processes: it takes seconds, and these tests are about pages."""
    root = tmp_path_factory.getbasetemp()
    traces = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "traces"
    traces.mkdir(exist_ok=True)
    trace = folder.to_onnx

    def once(model: Decoder, **options: object) -> tuple[Recurrence, bytes]:
        described = [repr(model.config), folder.weights_checksum(model), *sorted(options.items())]
        graph = traces / hashlib.sha256(repr(described).encode()).hexdigest()
        with FileLock(graph.with_suffix(".lock")):
            if not graph.exists():
                recurrence, content = trace(model, **options)
                if recurrence.length != "any":
                    return recurrence, content
                graph.write_bytes(content)
        return Recurrence(model, probes=bool(options["probes"])), graph.read_bytes()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "to_onnx", once)
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Decoder, Path]]:
    """Models and the folders they are saved in, by name."""
    image = {"vocab_size": 17, "start_token": True, "max_length": 64}
    text = {"vocab_size": len(CHARACTERS), "positions": "sinusoidal"}
    ids = {"vocab_size": 32}
    mixed = {"n_layers": 3, "attention": ["linear", "window", "linear"], "positions": "sinusoidal"}
    made = {
        "image-linear": small_model(0, **image),
        "text-linear": small_model(1, **text),
        "text-softmax": small_model(2, **text, attention="softmax"),
        "ids-endless": small_model(3, **ids, start_token=True, positions="sinusoidal"),
        "ids-learned": small_model(4, **ids, max_length=16),
        "ids-mixed #3, 50%": small_model(5, **ids, **mixed),
    }
    kinds = {
        "image": {"kind": "image", "shape": [8, 8]},
        "text": {"kind": "text", "characters": CHARACTERS, "data": "verse"},
        "ids": {"kind": "ids"},
    }
    found = {}
    for name, model in made.items():
        run = tmp_path_factory.mktemp(name)
        model.save(run)
        (run / "vocabulary.json").write_text(json.dumps(kinds[name.split("-")[0]]))
        found[name] = model, run
    return found


@pytest.fixture(scope="session")
def site(models: dict[str, tuple[Decoder, Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page; not to be changed."""
    runs = {name: run for name, (_, run) in models.items()}
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":  # begin where the first process ends
        for name in reversed(runs):
            write_site({name: runs[name]}, tmp_path_factory.mktemp("alone") / "page")
    return write_site(runs, tmp_path_factory.mktemp("served") / "page")


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    with served(site) as found:
        yield found


@pytest.fixture
def page_of(models: dict[str, tuple[Decoder, Path]], tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Write the page of some of the models, and serve it; gives its address."""
    with ExitStack() as stack:

        def serve(*names: str) -> str:
            out = write_site({name: models[name][1] for name in names}, tmp_path / "served" / "page")
            return stack.enter_context(served(out))

        yield serve


@pytest.fixture(scope="session")
def _browser() -> Iterator[webdriver.Chrome]:
    with chromium() as driver:
        yield driver


@pytest.fixture
def browser(_browser: webdriver.Chrome) -> webdriver.Chrome:
    """A browser at desktop width, with empty logs."""
    resize(_browser, "desktop")
    _browser.execute_cdp_cmd("Network.clearBrowserCache", {})
    for kind in ("browser", "performance"):
        _browser.get_log(kind)
    return _browser


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return axe_source(tmp_path_factory.mktemp("axe"))
