"""Segments of a sequence that two ranks share, each with its slice of every segment."""

import pytest
import sequence_ranks
import torch

from unrolled.contract import Batch
from unrolled.ops import sequence
from unrolled.testing.sequence import Meeting
from unrolled.training.segments import Segments

RANKS, SLICE = 2, 35


@pytest.mark.parametrize("scan", ["gather", "pipeline"])
@pytest.mark.parametrize("kind", sequence_ranks.DECODERS)
def test_the_gradients_are_those_of_the_whole_sequence(kind, scan):
    inputs, targets = sequence_ranks.tokens()
    whole = sequence_ranks.decoder(kind)
    loss = whole.loss(inputs, targets) * targets.numel()
    loss.backward()
    models, meeting = [sequence_ranks.decoder(kind) for _ in range(RANKS)], Meeting(RANKS, scan)

    def run(rank):
        columns = torch.arange(inputs.shape[1]).unflatten(0, (-1, RANKS, SLICE))[:, rank].flatten()
        with sequence.use(meeting.of(rank)):
            segments = Segments(models[rank], Batch(inputs[:, columns], targets[:, columns]), SLICE)
            return segments.add_gradient(1.0, segments.start())

    found = meeting.run(run)
    assert all(state.position.tolist() == [inputs.shape[1]] * 2 for _, state in found)
    assert float(sum(part for part, _ in found)) == pytest.approx(float(loss.detach()), rel=1e-14)
    parameters = zip(whole.named_parameters(), *(model.parameters() for model in models), strict=True)
    for (name, right), *shares in parameters:
        if right.grad is None:  # of positions, say, that no token has
            assert all(share.grad is None for share in shares), name
            continue
        added = sum(share.grad for share in shares if share.grad is not None)
        assert float((added - right.grad).abs().max()) <= 1e-13 * float(right.grad.abs().max()), name
