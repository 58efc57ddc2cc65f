"""A batch of stories for the memory networks."""

import torch

V = 11


def story(batch=4, sentences=5, words=4, seed=0):
    """Draw a batch with words and sentences missing anywhere, but not in the first row."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(V, (batch, sentences + 1, words), generator=generator)
    padding = torch.rand(inputs.shape, generator=generator) < 0.3
    padding[:, :-1] |= torch.rand((batch, sentences, 1), generator=generator) < 0.3
    padding[0] = False
    padding[:, [1, -1], 0] = False
    return inputs, padding
