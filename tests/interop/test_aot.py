"""A step compiled ahead of time gives what the model gives."""

import os
import shutil
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from unrolled.generation import generate
from unrolled.interop.aot import PACKAGE, export_aot, load_aot
from unrolled.interop.onnx import export
from unrolled.models import Decoder, DecoderConfig

pytest.importorskip("onnxruntime")


def model(attention: str) -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(7, d_model=8, n_layers=1, n_heads=2, attention=attention, max_length=32))


@pytest.mark.slow
@pytest.mark.usefixtures("untraced")
def test_another_model_is_refused(tmp_path):
    made = model("linear")
    export(made, tmp_path)
    retrained, reconfigured = deepcopy(made), deepcopy(made)
    torch.nn.init.ones_(retrained.head.project.weight)
    reconfigured.config = replace(made.config, activation="relu")
    for other in (retrained, reconfigured, model("softmax")):
        with pytest.raises(ValueError, match="holds another model than the one given: export that one first"):
            export_aot(other, tmp_path)


@pytest.mark.compilers
@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="AOTInductor needs a C++ compiler"
)
def test_the_package_is_the_model(tmp_path):
    made = model("linear")
    export(made, tmp_path)
    with pytest.raises(ValueError, match=r"holds no step\.pt2; export again with --aot"):
        load_aot(tmp_path)
    export_aot(made, tmp_path)
    found = load_aot(tmp_path)
    ids = torch.randint(7, (3, 20))
    with torch.no_grad():
        expected = made.eval()(ids)
    logits, _ = found.prefill(ids, found.init_state(3))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    greedy = {"temperature": 0, "max_new_tokens": 10}
    assert torch.equal(generate(found, [[1, 2]], **greedy)[0], generate(made, [[1, 2]], **greedy)[0])
    with pytest.raises(ValueError, match="length is 33, but must be at most 32"):
        generate(found, [[1, 2]], 40)
    content = (tmp_path / PACKAGE).read_bytes()
    (tmp_path / PACKAGE).write_bytes(content[:-1])
    with pytest.raises(ValueError, match="bytes, but must have"):
        load_aot(tmp_path)
