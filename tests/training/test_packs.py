import torch

from unrolled.contract import IGNORED, Batch
from unrolled.models import Decoder, DecoderConfig
from unrolled.training import TrainConfig, evaluate


class Packed:
    """Three rows of eight ids; the sequences in them end at 8, 11, 16 and 24."""

    def __init__(self, packed: bool) -> None:
        ids = torch.randint(9, (3, 9), generator=torch.Generator().manual_seed(0))
        self.inputs, self.targets, self.bounds = ids[:, :-1], ids[:, 1:].clone(), [0, 8, 11, 16, 24]
        self.targets[1, 2] = IGNORED  # the first id of the next sequence
        self.packed = packed

    def eval_batches(self, batch_size: int):
        if self.packed:
            yield Batch(self.inputs, self.targets, cu_seqlens=torch.tensor(self.bounds, dtype=torch.int32))
            return
        inputs, targets = self.inputs.flatten(), self.targets.flatten()
        for start, stop in zip(self.bounds, self.bounds[1:], strict=False):
            yield Batch(inputs[None, start:stop], targets[None, start:stop])


def test_packed_sequences_have_the_loss_that_they_have_alone():
    model = Decoder(DecoderConfig(9, d_model=16, n_layers=2, n_heads=2, positions="learned", max_length=8))
    model.double()
    packed, alone = (evaluate(model, Packed(kind), TrainConfig()) for kind in (True, False))
    assert abs(packed - alone) < 1e-14
