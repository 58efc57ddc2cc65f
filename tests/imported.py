"""Language models of transformers with perturbed weights, for tests of `import_weights`."""

import torch
import transformers

from unrolled.generation import generate
from unrolled.interop.hf import import_weights


def perturbed(family, **sizes):
    """Make a `...ForCausalLM` none of whose weights has its initial value."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def assert_same_greedy_tokens(theirs):
    ours, prompt = import_weights(theirs), [3, 1, 4, 1, 5]
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    (found,) = generate(ours, [prompt], temperature=0, max_new_tokens=12)
    assert found.tolist() == expected[0, len(prompt) :].tolist()


def assert_a_folder_is_read(theirs, folder):
    theirs.save_pretrained(folder)
    tokens = torch.randint(1, 19, (2, 13))
    with torch.no_grad():
        assert torch.equal(import_weights(folder).eval()(tokens), import_weights(theirs)(tokens))
