"""Conversion to transformers and back keeps all weights; tokenizers have the ids of the data set."""

import copy

import pytest
import torch
from hf_models import make
from transformers import AutoTokenizer, pipeline

from unrolled.contract import UnsupportedError
from unrolled.data._codec import Codec
from unrolled.interop import hf
from unrolled.models import (
    Decoder,
    DecoderConfig,
    Encoder,
    EncoderConfig,
    PerceiverAR,
    PerceiverARConfig,
    RecurrentLM,
    RecurrentLMConfig,
)

TEXT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak!"
CHARACTERS = sorted(set(TEXT))
SIZE = {"d_model": 16, "n_layers": 2, "n_heads": 2}


def models():
    torch.manual_seed(0)
    return {
        "decoder": Decoder(DecoderConfig(9, **SIZE, attention="performer", start_token=True)),
        "pixels": Decoder(DecoderConfig(9, **SIZE, inputs="pixels", head="logistic_mixture")),
        "half": Decoder(DecoderConfig(9, **SIZE, positions="rotary")).bfloat16(),
        "mixed": Decoder(DecoderConfig(9, **SIZE, attention=["linear", "window"], tie_embeddings=True)),
        "classifier": Encoder(EncoderConfig(9, **SIZE, n_classes=5, pooling="first")),
        "hidden": Encoder(EncoderConfig(9, **SIZE, output="hidden", n_segments=2)),
        "masked": Encoder(EncoderConfig(9, **SIZE, output="masked", tie_embeddings=True)),
    }


@pytest.mark.parametrize("name", models())
def test_a_round_trip_through_files_changes_no_bit(name, tmp_path):
    model = models()[name].eval()
    tokens = torch.randint(9, (2, 6))
    converted = hf.to_transformers(model)
    assert not converted.training
    assert converted.dtype == converted.config.dtype == next(model.parameters()).dtype
    assert torch.equal(converted(tokens)[0], model(tokens)) or isinstance(model, Decoder)
    converted.save_pretrained(tmp_path / "theirs")
    back = hf.from_transformers(hf.load(tmp_path / "theirs"))
    assert type(back) is type(model)
    assert back.config == model.config
    mine, theirs = model.state_dict(), back.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(x.dtype == theirs[key].dtype and torch.equal(x, theirs[key]) for key, x in mine.items())
    assert torch.equal(back(tokens), model(tokens))


def test_a_conversion_is_a_copy():
    model = models()["decoder"]
    converted = hf.to_transformers(model)
    back = hf.from_transformers(converted)
    before = copy.deepcopy(model.state_dict())
    converted.model.embedding.weight.data.zero_()
    back.embedding.weight.data.zero_()
    assert torch.equal(model.embedding.weight, before["embedding.weight"])
    assert converted.generation_config.bos_token_id == 9


def test_a_conversion_back_is_a_copy_too():
    converted = hf.to_transformers(models()["decoder"])
    back = hf.from_transformers(converted)
    before = copy.deepcopy(converted.state_dict())
    back.embedding.weight.data.zero_()
    back.documents.clear()
    assert all(torch.equal(x, before[name]) for name, x in converted.state_dict().items())
    assert hf.from_transformers(converted).documents


def test_settings_of_transformers_come_back(tmp_path):
    writer, kind = make(eos_token_id=3), hf.UnrolledForSequenceClassification
    writer.generation_config.repetition_penalty = 1.3
    labels = {"id2label": {0: "calm", 1: "loud", 2: "silent"}, "problem_type": "multi_label_classification"}
    for model in (writer, make(kind=kind, **labels)):
        ours = hf.from_transformers(model)
        ours.save(tmp_path / ours.model_name)
        back = hf.to_transformers(type(ours).load(tmp_path / ours.model_name))
        assert not back.model.documents
        for name in ("id2label", "label2id", "problem_type"):
            assert getattr(back.config, name) == getattr(model.config, name)
        if model is writer:
            assert back.generation_config.to_dict() == writer.generation_config.to_dict()


def test_a_new_model_knows_its_start_token():
    model = make("retention")
    assert model.generate(max_new_tokens=4, do_sample=False).shape == (1, 5)


def test_generation_continues_a_decoder_state(tmp_path):
    model = models()["decoder"].eval()
    tokens = torch.randint(9, (1, 5))
    with torch.no_grad():
        _, state = model.prefill(tokens, model.init_state(1))
    drawn = hf.to_transformers(model).generate(
        torch.cat([tokens, tokens[:, :1]], dim=1), cache=state, max_new_tokens=4, do_sample=False
    )
    ours = []
    with torch.no_grad():
        logits, state = model.step(tokens[:, 0], state)
        for _ in range(4):
            ours.append(logits.argmax(-1))
            logits, state = model.step(ours[-1], state)
    assert drawn[0, 6:].tolist() == torch.cat(ours).tolist()


def test_what_has_no_class_is_refused():
    with pytest.raises(UnsupportedError, match="a RecurrentLM has no class for transformers; use a Decoder"):
        hf.to_transformers(RecurrentLM(RecurrentLMConfig(9)))
    with pytest.raises(UnsupportedError, match="a PerceiverAR has no class for transformers"):
        hf.to_transformers(PerceiverAR(PerceiverARConfig(9, **SIZE)))
    for fields in ({"input_dim": 3}, {"vocab_size": 9, "output": "tokens"}):
        with pytest.raises(UnsupportedError, match=r"an encoder with input_dim .* has no class"):
            hf.to_transformers(Encoder(EncoderConfig(**SIZE, n_classes=2, **fields)))
    with pytest.raises(UnsupportedError, match="a Linear holds no model of this library"):
        hf.from_transformers(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("characters", [CHARACTERS, None])
def test_tokens_are_those_of_the_data_set(characters, tmp_path):
    hf.character_tokenizer(characters).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    codec = Codec(characters)
    text = TEXT if characters else TEXT + " naïve €, <end>"
    ids = tokenizer(text)["input_ids"]
    assert ids == codec.encode(text).tolist()
    assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True) == text
    end = tokenizer("me" + tokenizer.eos_token)["input_ids"]
    assert end[:2] == codec.encode("me").tolist()
    assert end[2:] == [tokenizer.pad_token_id]
    assert tokenizer.decode(end, skip_special_tokens=True) == "me"
    batch = tokenizer(["Speak", "me"], padding=True, return_tensors="pt")
    assert batch.keys() == {"input_ids", "attention_mask"}
    assert batch["attention_mask"].tolist() == [[1] * 5, [0] * 3 + [1] * 2]
    assert tokenizer.pad_token_id == (len(CHARACTERS) if characters else 256)
    if characters:
        with pytest.raises(Exception, match=r"Missing \[UNK\] token"):
            tokenizer("€")


def test_pipelines(tmp_path):
    tokenizer = hf.character_tokenizer(CHARACTERS)
    model = make(vocab_size=len(CHARACTERS))
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    for part in (tokenizer, model):
        part.save_pretrained(tmp_path)
    write = pipeline("text-generation", str(tmp_path), device="cpu")
    options = {"max_new_tokens": 8, "do_sample": False}
    alone = [write(prompt, **options) for prompt in ("Speak, ", "me")]
    assert alone[0][0]["generated_text"].startswith("Speak, ")
    assert len(alone[0][0]["generated_text"]) == 15
    assert write(["Speak, ", "me"], batch_size=2, **options) == alone

    labels = {0: "calm", 1: "loud", 2: "silent"}
    kind = hf.UnrolledForSequenceClassification
    classify = make(kind=kind, vocab_size=len(CHARACTERS), id2label=labels)
    found = pipeline("text-classification", model=classify, tokenizer=tokenizer, device="cpu", top_k=None)
    alone = [found(text)[0] if isinstance(found(text)[0], list) else found(text) for text in ("Speak", "me")]
    together = found(["Speak", "me"], batch_size=2)
    for one, other in zip(alone, together, strict=True):
        assert {x["label"] for x in one} == set(labels.values())
        assert [x["label"] for x in one] == [x["label"] for x in other]
        assert [x["score"] for x in one] == pytest.approx([x["score"] for x in other], abs=1e-6)
