r"""End-to-end memory network: a question attends to the sentences of a story in several hops.

    m_i^k = sum_j l_j o A^k x_ij + T_A^k(i)        c_i^k = sum_j l_j o C^k x_ij + T_C^k(i)
    u^1   = sum_j l_j o B q_j                      word j of sentence i is x_ij, that of the question q_j
    p^k   = softmax_i(u^k . m_i^k)                 the weights of hop k; there is no scale
    u^{k+1} = u^k + sum_i p_i^k c_i^k              the answer is softmax(W u^{K+1})

o multiplies elementwise; i counts sentences from the last one, which is 0. With "adjacent" tying,
A^{k+1} = C^k (likewise for T), B = A^1 and W = C^K are shared. "layer_wise" tying has one A and one C for all
hops, and u^{k+1} = H u^k + ...

Sukhbaatar et al. 2015, "End-To-End Memory Networks", arXiv 1503.08895, eq. 1-4 and sections 2.2 and 4.1.

Cost: time O(M J d) for M sentences of J words, O(V d) for tables of V words, and O(M d) for each hop.
Equals softmax attention: one hop without temporal encoding is attention of one head with scale 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, cast

import numpy as np
import torch
from annotated_types import Ge, Le
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from unrolled.fields import Count, FromData, Size
from unrolled.models.checks import check_targets
from unrolled.models.config import ModelConfig
from unrolled.models.heads import mean_nll, token_nll
from unrolled.models.story import StoryModel

Tying = Literal["adjacent", "layer_wise"]
Encoding = Literal["printed", "code", "bag"]
INIT_STD = 0.1


def printed(j: Tensor, J: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """Position encoding as printed in section 4.1: l_kj = (1 - j / J) - (k / d) (1 - 2 j / J).

    Args:
        j: place of a word in its sentence, from 1.
        J: number of words of the sentence.
        d: width; k runs from 1 to d.

    Returns:
        a and b of l_kj = a + b k / d.
    """
    return 1 - j / J, 2 * j / J - 1


def code(j: Tensor, J: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """Position encoding of the authors' code: l_kj = 1 + 4 (k - (d + 1) / 2) (j - (J + 1) / 2) / (d J).

    Its mean is 1, and it is about twice the printed one. Arguments and result are those of `printed`. In the
    authors' code, J is the length of the longest sentence of the data; here, J is the length of the sentence
    itself, as printed, so that padding has no effect.
    """
    slope = 4 * (j - (J + 1) / 2) / J
    return 1 - slope * (d + 1) / (2 * d), slope


def bag(j: Tensor, J: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """No position encoding, l_kj = 1: a sentence is the sum of its words. Arguments as for `printed`."""
    return torch.ones_like(j / J), torch.zeros_like(j / J)


ENCODINGS: dict[str, Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]] = {
    f.__name__: f for f in (printed, code, bag)
}


@dataclass(kw_only=True)
class MemN2NConfig(ModelConfig):
    """The fields of an end-to-end memory network.

    Attributes:
        vocab_size: number of words, answers included.
        d_model: width of the embeddings, d.
        n_hops: number of hops, K.
        memory_size: maximum number of sentences with temporal encoding.
        tying: "adjacent" or "layer_wise".
        position_encoding: "printed", "code" or "bag", the functions of this module; models with "code" learn
            tasks that models with "printed" do not.
        temporal: add temporal encodings, which depend on the place of a sentence.
        linear_start: number of training batches at the start in which p = u . m, without the softmax. This
            avoids bad minima (section 4.2). Evaluation uses the form that the next training batch will use.
        noise: in training, a random number of empty memories, up to this fraction of the number of sentences,
            is inserted at random places.
        seed: of that randomness.
    """

    vocab_size: Annotated[Size, FromData("vocab_size")]
    d_model: Size = 50
    n_hops: Size = 3
    memory_size: Annotated[Size, FromData("memory_size")] = 50
    tying: Tying = "adjacent"
    position_encoding: Encoding = "code"
    temporal: bool = True
    linear_start: Count = 0
    noise: Annotated[float, Ge(0), Le(1)] = 0.1
    seed: Count = 0

    @property
    def needs(self) -> dict[str, object]:
        """Answers only: no places of supporting sentences after them."""
        return {"supporting": 0}


class MemN2N(StoryModel):
    """An end-to-end memory network.

    The parameters are the tables `A`, `C`, `B` and `W`, `[vocab_size,d]`; with temporal encoding, also `T_A`
    and `T_C`, `[memory_size,d]`; with layer-wise tying, also `H [d,d]`. Tied parameters are one tensor. All
    are drawn from N(0, 0.1^2).
    """

    model_name = "memory_network"
    config_type = MemN2NConfig
    config: MemN2NConfig

    def __init__(self, config: MemN2NConfig) -> None:
        super().__init__(config)
        adjacent, width = config.tying == "adjacent", config.d_model

        def tables(count: int, rows: int) -> nn.ParameterList:
            return nn.ParameterList(INIT_STD * torch.randn(rows, width) for _ in range(count))

        self.words = tables(self._n_read + (0 if adjacent else 2), config.vocab_size)
        self.places = tables(self._n_read if config.temporal else 0, config.memory_size)
        self.H = None if adjacent else nn.Parameter(INIT_STD * torch.randn(width, width))
        self.batches: Tensor  # number of training batches so far; saved, so that a run can be resumed
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))
        self.n_words = config.vocab_size
        self.max_sentences = config.memory_size if config.temporal else None

    @property
    def linear(self) -> bool:
        """Whether the hops have no softmax; see `MemN2NConfig.linear_start`."""
        return self.config.linear_start > 0 and int(self.batches) < self.config.linear_start

    @property
    def A(self) -> list[nn.Parameter]:  # noqa: N802
        """The table of each hop's keys."""
        return self._of_hops(self.words, 0)

    @property
    def C(self) -> list[nn.Parameter]:  # noqa: N802
        """The table of each hop's values."""
        return self._of_hops(self.words, 1)

    @property
    def T_A(self) -> list[nn.Parameter]:  # noqa: N802
        """The temporal encodings of `A`."""
        return self._of_hops(self.places, 0) if self.config.temporal else []

    @property
    def T_C(self) -> list[nn.Parameter]:  # noqa: N802
        """The temporal encodings of `C`."""
        return self._of_hops(self.places, 1) if self.config.temporal else []

    @property
    def B(self) -> nn.Parameter:  # noqa: N802
        """The table of the question."""
        return cast(nn.Parameter, self.words[0 if self.config.tying == "adjacent" else 2])

    @property
    def W(self) -> nn.Parameter:  # noqa: N802
        """The table of the answers."""
        return cast(nn.Parameter, self.words[-1])

    def answer(self, inputs: Tensor, padding: Tensor) -> Tensor:
        """Logits of the answers, `[B,vocab_size]`."""
        return self._read(inputs, padding)[0]

    def weights(self, inputs: Tensor, padding: Tensor) -> Tensor:
        """Weight of each sentence in each hop, `[B,hops,M]`."""
        return self._read(inputs, padding)[1]

    def loss(self, inputs: Tensor, targets: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Mean cross-entropy in nats of the answers `targets [B]`; -100 is ignored."""
        logits = self(inputs, key_padding_mask=key_padding_mask)
        check_targets(targets, inputs.shape[:1], self.config.vocab_size)
        return mean_nll(token_nll(logits, targets), targets)

    def _read(self, inputs: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        absent, linear = padding[:, :-1].all(-1), self.linear
        if self.training:
            self.batches += 1
        encoding = self.config.position_encoding
        parts = embed(inputs[:, :-1], padding[:, :-1], list(self.words)[: self._n_read], encoding)
        if self.config.temporal:
            ages = self._ages(absent)
            parts = [part + F.embedding(ages, table) for part, table in zip(parts, self.places, strict=True)]
        (u,) = embed(inputs[:, -1], padding[:, -1], [self.B], encoding)
        read = []
        for hop in range(self.config.n_hops):
            m, c = (parts[hop], parts[hop + 1]) if self.H is None else parts
            p = torch.einsum("bd,bmd->bm", u, m)
            if not linear:
                # a finite minimum: a story of padding only must not give NaN; its weights become 0 below
                p = p.masked_fill(absent, torch.finfo(p.dtype).min).softmax(-1)
            p = p.masked_fill(absent, 0)
            o = torch.einsum("bm,bmd->bd", p, c)
            u = (u if self.H is None else F.linear(u, self.H)) + o
            read.append(p)
        return F.linear(u, self.W), torch.stack(read, 1)

    @property
    def _n_read(self) -> int:
        """Number of tables that embed the memory."""
        return self.config.n_hops + 1 if self.config.tying == "adjacent" else 2

    def _of_hops(self, tables: nn.ParameterList, first: int) -> list[nn.Parameter]:
        step = 1 if self.config.tying == "adjacent" else 0
        return [tables[first + step * hop] for hop in range(self.config.n_hops)]

    def _ages(self, absent: Tensor) -> Tensor:
        """Count the sentences after each one, `[B,M]`; in training, inserted empty memories count too."""
        present = (~absent).long()
        after = present.flip(1).cumsum(1).flip(1) - present
        if not self.training or self.config.noise == 0:
            return after
        rng = np.random.default_rng((self.config.seed, int(self.batches)))
        count, size = present.sum(1, keepdim=True), self.config.memory_size
        most = torch.ceil(self.config.noise * count)
        empty = (torch.from_numpy(rng.random(count.shape)).to(count.device) * (most + 1)).long()
        usable = torch.arange(size, device=count.device) < count + empty
        # `count` of the usable places at random; sentence number n from the end gets the n-th of them
        drawn = torch.from_numpy(rng.random((len(count), size))).to(count.device).masked_fill(~usable, 2)
        chosen = drawn.argsort(1).argsort(1) < count
        return (~chosen).long().argsort(stable=True, dim=1).gather(1, after)


def embed(words: Tensor, padding: Tensor, tables: Sequence[Tensor], encoding: Encoding) -> list[Tensor]:
    """Sum the embedded words of sentences with a position encoding: sum_j l_j o A x_j.

    Every encoding is l_kj = a_j + b_j k / d, so that a sentence is a weighted sum of rows of A and of rows of
    A times k / d. All tables are read in one embedding bag.

    Args:
        words: ids `[...,J]`.
        padding: of the same shape, True at padding, which has no place in the sentence.
        tables: embeddings A, each `[vocab_size,d]`.
        encoding: name of the encoding.

    Returns:
        For each table `[...,d]`.
    """
    (n_words, d), dtype = tables[0].shape, tables[0].dtype
    present = (~padding).flatten(0, -2).to(dtype)
    a, b = ENCODINGS[encoding](present.cumsum(-1), present.sum(-1, keepdim=True).clamp(min=1), d)
    ramp = torch.arange(1, d + 1, device=words.device, dtype=dtype) / d
    rows = torch.cat([torch.cat(list(tables), 1), torch.cat([table * ramp for table in tables], 1)])
    ids = words.flatten(0, -2)
    weights = torch.cat([a * present, b * present], 1)
    summed = F.embedding_bag(torch.cat([ids, ids + n_words], 1), rows, mode="sum", per_sample_weights=weights)
    return list(torch.split(summed.reshape(*words.shape[:-1], len(tables) * d), d, -1))
