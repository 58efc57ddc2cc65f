"""Folders of every kind are served, and what they draw is what the library draws from them."""

import asyncio

import pytest
import torch
from planned import decoder
from small_models import small_model

from unrolled.contract import UnsupportedError
from unrolled.data import Vocabulary
from unrolled.decode import plan
from unrolled.decode.request import Sampling
from unrolled.generation import generate
from unrolled.interop.hf.convert import character_tokenizer, to_transformers
from unrolled.models import (
    Encoder,
    EncoderConfig,
    PerceiverAR,
    PerceiverARConfig,
    RecurrentLM,
    RNNSeq2Seq,
    RNNSeq2SeqConfig,
)
from unrolled.models.recurrent_lm import RecurrentLMConfig
from unrolled.ops import native
from unrolled.serving.jobs import Drawn, EngineError, Job
from unrolled.serving.model import Limits, open_model
from unrolled.serving.runner import PlanRunner
from unrolled.serving.unplanned import ModelRunner

CHARACTERS = [chr(ord("0") + i) for i in range(71)]
TEXT = Vocabulary(kind="text", characters=CHARACTERS)
planned = pytest.mark.skipif(not native.available(), reason=str(native.missing()))


@pytest.fixture
def opened():
    """Open models, and end their engines."""
    found = []

    def opened_(path, **options):
        found.append(open_model(path, **options))
        return found[-1]

    yield opened_
    for served in found:
        served.engine.drain(5)


def drawn(served, text="0123", limit=20):
    """Return what a model draws greedily."""

    async def go():
        start = [served.vocab_size] if served.start_token else []
        run = served.engine.submit(Job([*start, *ids], limit, sampling=Sampling(temperature=0)))
        return [token async for event in run if isinstance(event, Drawn) for token in event.tokens]

    ids = [] if served.text is None else served.text.encode(text)
    return asyncio.run(go())


def expected(model, ids=(0, 1, 2, 3), **options):
    [found] = generate(model, [list(ids)], 20, temperature=0, **options)
    return found.tolist()


def test_a_run_folder(tmp_path, opened):
    model = decoder()
    TEXT.attach(model).save(tmp_path / "book")
    served = opened(tmp_path / "book")
    assert (served.name, served.vocab_size, served.n_positions, served.shape) == ("book", 71, None, None)
    assert served.description["mechanisms"] == ["linear"]
    assert served.description["parameters"] == sum(x.numel() for x in model.parameters())
    assert drawn(served) == expected(model)
    assert isinstance(served.engine.runner, PlanRunner) == native.available()


@planned
def test_packed_weights(tmp_path, opened):
    packed = plan(TEXT.attach(decoder()), "int8")
    packed.save(tmp_path / "book")
    served = opened(tmp_path / "book")
    assert served.description["weights"] == "int8"
    assert drawn(served) == expected(packed)
    with pytest.raises(ValueError, match=r"weights is 'int4', but .* holds weights in int8"):
        open_model(tmp_path / "book", weights="int4")


@planned
def test_the_digest_is_of_all_that_states_depend_on(tmp_path, opened, monkeypatch):
    for number in range(2):
        model = decoder()
        model.embedding.weight.data += number
        TEXT.attach(model).save(tmp_path / str(number))
    found = [
        opened(tmp_path / name, weights=weights).digest
        for name, weights in [("0", None), ("0", "fp32"), ("0", "bf16"), ("1", None)]
    ]
    monkeypatch.setattr("unrolled.__version__", "another")
    found.append(opened(tmp_path / "0").digest)
    assert found[0] == found[1]
    assert len(set(found)) == 4


def test_a_folder_of_transformers(tmp_path, opened):
    model = decoder()
    to_transformers(model).save_pretrained(tmp_path / "hf")
    character_tokenizer(CHARACTERS).save_pretrained(tmp_path / "hf")
    served = opened(tmp_path / "hf")
    assert served.text.encode("0123") == [0, 1, 2, 3]
    assert served.text.decode([0, 1]) == "01"
    assert drawn(served) == expected(model)


def test_a_model_of_pixels(tmp_path, opened):
    model = decoder(inputs="pixels", head="logistic_mixture", start_token=True)
    Vocabulary(kind="image", shape=[4, 5]).attach(model).save(tmp_path)
    served = opened(tmp_path, name="digits")
    assert (served.name, served.shape, served.start_token, served.text) == ("digits", (4, 5), True, None)
    assert drawn(served) == expected(model, ())


@pytest.mark.parametrize("name", ["efficient", "lstm"])
def test_a_model_that_no_plan_runs(name, tmp_path, opened):
    torch.manual_seed(0)
    if name == "lstm":
        model = RecurrentLM(RecurrentLMConfig(71, d_model=16, n_layers=1))
    else:
        model = decoder(attention="efficient", attention_options={}, positions="none")
    TEXT.attach(model).save(tmp_path / name)
    served = opened(tmp_path / name, deterministic=True)
    assert isinstance(served.engine.runner, ModelRunner)
    assert drawn(served) == expected(model.eval())
    with pytest.raises(UnsupportedError):
        open_model(tmp_path / name, weights="int8")


@pytest.mark.parametrize("positions", ["none", "learned"])
@pytest.mark.parametrize("attention", ["linear", "aft"])
def test_the_least_limit_of_a_layer_is_that_of_the_model(attention, positions, tmp_path, opened):
    options = {"linear": {"feature_map": "cosformer", "feature_map_options": {"max_length": 49}}}
    options["aft"] = {"max_length": 50}
    options = {"attention": attention, "attention_options": {attention: options[attention]}}
    model = decoder(**options, positions=positions, max_length=60)
    TEXT.attach(model).save(tmp_path)
    served = opened(tmp_path)
    assert served.n_positions == ModelRunner(model).n_positions == 50
    assert len(drawn(served, "0" * 40, 11)) == 11  # the last token is drawn, but not read
    with pytest.raises(EngineError, match=r"51\b.* 50"):
        drawn(served, "0" * 40, 12)


@planned
def test_the_plan_of_a_deterministic_model_is_steady(tmp_path, opened):
    TEXT.attach(decoder()).save(tmp_path)
    found = [opened(tmp_path, deterministic=x).engine.runner.plan.steady for x in (False, True)]
    assert found == [False, True]


def test_deterministic_models_without_a_plan_share_no_prefixes(tmp_path, opened):
    model = RecurrentLM(RecurrentLMConfig(71, d_model=16, n_layers=1))
    TEXT.attach(model).save(tmp_path)
    for deterministic in (False, True):
        served = opened(tmp_path, deterministic=deterministic, limits=Limits(rows=2))
        drawn(served, "0" * 50)
        assert (served.engine._prefixes.nbytes == 0) == deterministic


def test_what_is_no_recurrence_is_refused(tmp_path):
    config = EncoderConfig(vocab_size=71, d_model=16, n_layers=1, n_heads=2, output="masked")
    TEXT.attach(Encoder(config)).save(tmp_path / "encoder")
    translator = RNNSeq2Seq(RNNSeq2SeqConfig(71, d_model=16, hidden_size=16))
    TEXT.attach(translator).save(tmp_path / "translator")
    for name in ("encoder", "translator"):
        with pytest.raises(UnsupportedError, match="does not predict the next token from a state"):
            open_model(tmp_path / name)
    to_transformers(Encoder(config)).save_pretrained(tmp_path / "hf")
    with pytest.raises(UnsupportedError, match="an encoder"):
        open_model(tmp_path / "hf")
    with pytest.raises(ValueError, match="is not a model's folder"):
        open_model(tmp_path / "nothing")


def test_a_model_that_must_read_a_prompt_at_once_is_refused(tmp_path):
    config = PerceiverARConfig(vocab_size=71, d_model=16, n_layers=2, n_heads=2, n_latents=4)
    TEXT.attach(PerceiverAR(config)).save(tmp_path)
    with pytest.raises(UnsupportedError, match="a Perceiver AR, which must read a prompt in one call"):
        open_model(tmp_path)


@torch.no_grad()
def test_a_state_that_has_read_all_positions_is_taken():
    model = small_model("decoder", positions="learned", max_length=8).eval()
    runner = ModelRunner(model)
    _, state = runner.read(torch.arange(8) % 5, runner.empty(), "none")
    taken = runner.state(runner.tensors(state), 8)
    assert int(taken.position) == 8
