"""The stock `lm_eval --model hf` evaluates our models; its numbers are those of the decoder inside."""

import json

import pytest
import torch

pytestmark = [
    pytest.mark.oracles,
    # lm_eval and what it is made of warn while they are imported and run, each new version of something else.
    pytest.mark.filterwarnings("default"),
]

CHARACTERS = sorted(set("\n .:?abcdefghijklmnopqrstuvwxyz"))
QUESTIONS = [
    {"question": f"after {a} comes", "choices": [f" {b}", f" {a}", " nothing at all"], "answer": 0}
    for a, b in zip("abcdefghij", "bcdefghijk", strict=True)
]
TASKS = {
    "next_letter": """
task: next_letter
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
""",
    "write_letter": """
task: write_letter
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["q"], max_gen_toks: 6, do_sample: false}}
metric_list: [{{metric: exact_match}}]
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model and its tokenizer, and two tasks over local questions."""
    from unrolled.interop import hf
    from unrolled.models import Decoder, DecoderConfig

    path = tmp_path_factory.mktemp("lm_eval")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        decoder = Decoder(
            DecoderConfig(len(CHARACTERS), d_model=32, n_layers=2, n_heads=2, positions="rotary")
        )
        for x in decoder.parameters():
            x.data += 0.2 * torch.randn_like(x)
    decoder.eval()
    tokenizer, model = hf.character_tokenizer(CHARACTERS), hf.to_transformers(decoder)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    for part in (tokenizer, model):
        part.save_pretrained(path / "model")
    data = path / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, text in TASKS.items():
        (path / f"{name}.yaml").write_text(text.format(data=json.dumps(str(data))))
    return path, decoder


@pytest.fixture(scope="module")
def results(folder):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    path, _ = folder
    return lm_eval.simple_evaluate(
        model="hf",
        # The token before an empty context: the tokenizer has none that the model knows.
        model_args={"pretrained": str(path / "model"), "prefix_token_id": CHARACTERS.index("\n")},
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(path), include_defaults=False),
        device="cpu",
        batch_size=4,
        log_samples=True,
        bootstrap_iters=0,
    )


def ids(text):
    return torch.tensor([CHARACTERS.index(character) for character in text])


def test_likelihoods_are_those_of_the_decoder(folder, results):
    _, decoder = folder
    right = 0
    for sample in results["samples"]["next_letter"]:
        doc, found = sample["doc"], []
        for choice, [(theirs, _)] in zip(doc["choices"], sample["resps"], strict=True):
            tokens = ids(doc["question"] + choice)
            with torch.no_grad():
                log_p = decoder(tokens[None, :-1])[0].log_softmax(-1)
            each = log_p.gather(1, tokens[1:, None]).flatten()
            found.append(each[-len(choice) :].sum().item())
            assert float(theirs) == pytest.approx(found[-1], abs=1e-4)
        right += found.index(max(found)) == doc["answer"]
    assert results["results"]["next_letter"]["acc,none"] == pytest.approx(right / len(QUESTIONS))


def test_texts_are_those_of_the_decoder(folder, results):
    _, decoder = folder
    for sample in results["samples"]["write_letter"]:
        tokens = ids(sample["doc"]["question"])[None]
        with torch.no_grad():
            for _ in range(6):
                tokens = torch.cat([tokens, decoder(tokens)[:, -1:].argmax(-1)], dim=1)
        text = "".join(CHARACTERS[i] for i in tokens[0, -6:])
        assert sample["resps"] == [[text.split("q")[0]]]
