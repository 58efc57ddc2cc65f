r"""The fixed vector: no attention, every query reads the last state of the encoder.

    w_t(s) = 1 for the last s that is not padding, else 0        c_t = m_S = h_S

m_s is vector s of the memory, S the number of vectors without padding, and h_s the state of the encoder after
token s. With a bidirectional encoder, m_S = [h->_S; h<-_S] instead.

Cho et al. 2014, "Learning Phrase Representations using RNN Encoder-Decoder for Statistical Machine
Translation", arXiv 1406.1078, section 2.2, where c = h_T; RNNencdec in Bahdanau et al. 2014, arXiv 1409.0473.

Cost, for a memory of S vectors M wide: time O(T S M), as of the others, memory O(T S); state O(S M).
Cannot: read any other position, so a long source has to fit into one vector; be a layer of a decoder.
Equals softmax attention: to a memory of length 1.
"""

from torch import Tensor

from unrolled.alignment.base import Alignment, MemoryState


class FixedAttention(Alignment):
    """Reads the last vector of the memory for every query. It has no parameters.

    Args:
        query_dim, memory_dim: see `Alignment`.
    """

    def weigh(self, query: Tensor, state: MemoryState) -> Tensor:
        """Return 1 at the last position that is not padding; all 0 in rows of padding only."""
        remaining = (~state.padding).flip(1).cumsum(1).flip(1)  # valid positions from s on
        last = (remaining == 1) & ~state.padding
        B, S = last.shape
        return last.to(state.memory.dtype).unsqueeze(1).expand(B, query.shape[1], S)
