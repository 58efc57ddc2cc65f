r"""Memory network with supervised memories: selects supporting sentences one by one, then an answer.

    o_k = argmax_i s_O([x, m_o1, ..., m_o(k-1)], m_i)        of a story of sentences m_i and a question x
    r   = argmax_w s_R([x, m_o1, ..., m_oK], w)              over the words
    s(x, y) = Phi_x(x)^T U^T U Phi_y(y)                      s_O with U_O, s_R with U_R

Phi counts words regardless of their order, each word in one of three copies: as part of the question, of a
memory chosen before, or of the candidate y. That is 3 |W| features for |W| words.

A candidate of s_O also has K features of its write time, which Phi_x lacks. The first is -a_i / memory_size,
where a_i is the number of sentences after m_i. Each of the others, at most K - 1, belongs to a memory chosen
before: it is 1 if m_i is newer than that memory, else 0. In the paper, a feature says which of two
compared memories is older, and a loop over all memories keeps the winner. Here the difference of their write
times says which is newer, and by how much. So two memories are compared by the difference of their scores,
and the winner of the loop, in any order, is the argmax:

    s_O(x, y) - s_O(x, y') = Phi_x(x)^T U^T U (Phi_y(y) - Phi_y(y') + Phi_t(x, y, y'))

Weston, Chopra & Bordes 2014, "Memory Networks", arXiv 1410.3916, section 3.1, eq. 2-8, and 3.4 with the write
time changed as above. Input is split into words, and all memories are scored: sections 3.2 and 3.3 are not
implemented.

Cost: time O(M J d) for M sentences of J words, O(M d) for each hop, and O(|W| d) for the answer.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from unrolled.contract import IGNORED
from unrolled.fields import FromData, Positive, Size
from unrolled.models.checks import check_targets
from unrolled.models.config import ModelConfig
from unrolled.models.story import StoryModel
from unrolled.ops.observing import may_read
from unrolled.ops.precision import accumulated

INIT_STD = 0.1
QUESTION, CHOSEN, CANDIDATE = range(3)  # the copies of a word


@dataclass(kw_only=True)
class MemNNConfig(ModelConfig):
    """The fields of a memory network.

    Attributes:
        vocab_size: number of words, answers included, |W|.
        memory_size: maximum number of sentences; write times are divided by it.
        d_model: rows of U_O and U_R, d.
        n_hops: number of supporting sentences that are chosen, K, from 1 to 3.
        margin: margin of the ranking loss between the target's score and the others.
    """

    vocab_size: Annotated[Size, FromData("vocab_size")]
    memory_size: Annotated[Size, FromData("memory_size")] = 50
    d_model: Size = 50
    n_hops: Annotated[int, Ge(1), Le(3), FromData("supporting")] = 2
    margin: Positive = 0.1

    @property
    def needs(self) -> dict[str, object]:
        """The places of the supporting sentences, one per hop, after each answer."""
        return {"supporting": self.n_hops}


class MemNN(StoryModel):
    """A memory network that learns from given supporting sentences.

    A choice has no gradient: `U_O` and `U_R` are trained only through the scores that the loss compares.
    `forward` returns the scores s_R of the answers, given the memories that the network chooses. `attend`
    returns 1 for the sentence that a hop chooses and 0 for the others; all 0 where there is no sentence.

    The parameters are the transposed matrices: `U_O [3 vocab_size + n_hops, d]`, whose last rows are those of
    the write time, and `U_R [3 vocab_size, d]`. Both are drawn from N(0, 0.1^2).
    """

    model_name = "memnn"
    config_type = MemNNConfig
    loss_unit = "ranking loss/target"
    config: MemNNConfig

    def __init__(self, config: MemNNConfig) -> None:
        super().__init__(config)
        n_features, d = 3 * config.vocab_size, config.d_model
        self.U_O = nn.Parameter(INIT_STD * torch.randn(n_features + config.n_hops, d))
        self.U_R = nn.Parameter(INIT_STD * torch.randn(n_features, d))
        self.n_words, self.max_sentences = config.vocab_size, config.memory_size

    def answer(self, inputs: Tensor, padding: Tensor) -> Tensor:
        """Score the answers, given the memories that the network chooses, `[B,vocab_size]`."""
        return self._answer(inputs, padding, self._choose(inputs, padding, None)[1])

    def weights(self, inputs: Tensor, padding: Tensor) -> Tensor:
        """Mark the sentence that each hop chooses, `[B,hops,M]`."""
        _, chosen = self._choose(inputs, padding, None)
        absent = padding[:, :-1].all(-1)
        return F.one_hot(chosen, absent.shape[1]).masked_fill(absent.unsqueeze(1), 0).to(self.U_O.dtype)

    def loss(self, inputs: Tensor, targets: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Margin ranking loss, eq. 6-8 with sums over all wrong candidates; the mean over the targets.

        Each target, a supporting sentence or the answer, adds sum_{y wrong} max(0, margin - s(x, right) +
        s(x, y)). Later hops and the answer read the given supporting sentences; where one is missing, they
        read the sentence that the network chooses. The paper samples one wrong y of each sum at a time.

        Args:
            inputs: as for `forward`.
            targets: `[B,1+n_hops]`: the answer, then the places of the supporting sentences, from 0 to M - 1,
                in the order in which they are to be chosen; -100 for none.
            key_padding_mask: as for `forward`.

        Raises:
            ValueError: as `forward`, or targets of another shape, or a place where there is no sentence.
        """
        padding = self.padding_of(inputs, key_padding_mask)
        present = ~padding[:, :-1].all(-1)
        shape = (len(inputs), 1 + self.config.n_hops)
        check_targets(targets, shape, max(self.config.vocab_size, present.shape[1]))
        answers, facts = targets[:, 0], targets[:, 1:]
        check_targets(answers, shape[:1], self.config.vocab_size)
        _check_facts(facts, present)
        scores, chosen = self._choose(inputs, padding, facts)
        total = ranking(self._answer(inputs, padding, chosen), answers, self.config.margin).sum()
        for score, fact in zip(scores, facts.unbind(1), strict=True):
            total = total + ranking(score, fact, self.config.margin, present).sum()
        return total / (targets != IGNORED).sum().clamp(min=1)

    def _choose(self, inputs: Tensor, padding: Tensor, facts: Tensor | None) -> tuple[list[Tensor], Tensor]:
        """Return s_O `[B,M]` of each hop and its sentence, `[B,hops]`: that of `facts` where given."""
        n_words = 3 * self.config.vocab_size
        absent = padding[:, :-1].all(-1)
        present = (~absent).long()
        ages = present.flip(1).cumsum(1).flip(1) - present  # number of sentences after each one
        x = self._embed(self.U_O, inputs[:, -1], padding[:, -1], QUESTION)
        y = self._embed(self.U_O, inputs[:, :-1], padding[:, :-1], CANDIDATE)
        y = y - (ages.to(y.dtype) / self.config.memory_size).unsqueeze(-1) * self.U_O[n_words]
        scores, chosen = [], []
        for hop in range(self.config.n_hops):
            score = torch.einsum("bd,bmd->bm", x, y)
            choice = score.masked_fill(absent, -torch.inf).argmax(1)
            if facts is not None:
                choice = torch.where(facts[:, hop] == IGNORED, choice, facts[:, hop])
            scores.append(score)
            chosen.append(choice)
            if hop + 1 < self.config.n_hops:  # the next hop also reads this choice, and what is newer
                x = x + self._embed(self.U_O, *_at(inputs, padding, choice), CHOSEN)
                newer = (ages < ages.gather(1, choice.unsqueeze(1))).to(y.dtype)
                y = y + newer.unsqueeze(-1) * self.U_O[n_words + 1 + hop]
        return scores, torch.stack(chosen, 1)

    def _answer(self, inputs: Tensor, padding: Tensor, chosen: Tensor) -> Tensor:
        x = self._embed(self.U_R, inputs[:, -1], padding[:, -1], QUESTION)
        for choice in chosen.unbind(1):
            x = x + self._embed(self.U_R, *_at(inputs, padding, choice), CHOSEN)
        return F.linear(x, self.U_R[CANDIDATE * self.config.vocab_size :])

    def _embed(self, table: Tensor, words: Tensor, padding: Tensor, copy: int) -> Tensor:
        """U Phi of sentences `[...,J]` in one of the copies of the words: `[...,d]`."""
        ids = (words + copy * self.config.vocab_size).flatten(0, -2)
        present = (~padding).flatten(0, -2).to(table.dtype)
        summed = F.embedding_bag(ids, table, mode="sum", per_sample_weights=present)
        return summed.reshape(*words.shape[:-1], table.shape[1])


def ranking(scores: Tensor, right: Tensor, margin: float, candidates: Tensor | None = None) -> Tensor:
    """sum_{y != right} max(0, margin - s_right + s_y) for each row; 0 without a right candidate.

    Args:
        scores: `[B,N]`.
        right: `[B]`, -100 for none.
        margin: of the hinge.
        candidates: `[B,N]`, False for scores to ignore; all True by default.

    Returns:
        `[B]`, in at least fp32.
    """
    scores = accumulated(scores)
    place = right.clamp(min=0).unsqueeze(1)
    hinge = (margin - scores.gather(1, place) + scores).clamp(min=0)
    wrong = torch.ones_like(scores, dtype=torch.bool) if candidates is None else candidates
    wrong = wrong.scatter(1, place, False) & (right != IGNORED).unsqueeze(1)
    return hinge.masked_fill(~wrong, 0).sum(1)


def _at(inputs: Tensor, padding: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Return the words of the sentences at `place [B]` and their padding, `[B,J]`."""
    index = place.reshape(-1, 1, 1).expand(-1, 1, inputs.shape[2])
    return inputs.gather(1, index).squeeze(1), padding.gather(1, index).squeeze(1)


def _check_facts(facts: Tensor, present: Tensor) -> None:
    if not may_read(facts):
        return
    given = facts != IGNORED
    if (facts >= present.shape[1]).any() or not present.gather(1, facts.masked_fill(~given, 0))[given].all():
        places = f"places of sentences in [0, {present.shape[1]}), or {IGNORED}"
        raise ValueError(f"targets names a supporting sentence where there is none, but must hold {places}")
