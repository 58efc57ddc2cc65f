r"""The fixed vector: no attention, every query reads the last state of the encoder.

    w_t(s) = 1 for the last s that is no padding, else 0        c_t = m_S = h_S

m_s is a vector of the memory, S its length. Behind a bidirectional encoder m_S = [h->_S; h<-_S].

Cho et al. 2014, "Learning Phrase Representations using RNN Encoder-Decoder for Statistical Machine
Translation", arXiv 1406.1078, section 2.2, where c = h_T; RNNencdec in Bahdanau et al. 2014, arXiv 1409.0473.

Cost, with memory S vectors of M: time O(T S M), as others have it, memory O(T S); state O(S M), fixed.
Cannot: look at any other place, so a long source has to fit into one vector; be a layer of a decoder.
Equals softmax attention: to a memory of length 1.
"""

from torch import Tensor

from unrolled.alignment.base import Alignment, MemoryState


class FixedAttention(Alignment):
    """Reads the last vector of the memory, whatever the query. It has no parameters.

    Args:
        query_dim, memory_dim: see `Alignment`.
    """

    def weigh(self, query: Tensor, state: MemoryState) -> Tensor:
        """1 at the last place that is no padding; all 0 where there is none."""
        remaining = (~state.padding).flip(1).cumsum(1).flip(1)  # places from s on that are no padding
        last = (remaining == 1) & ~state.padding
        B, S = last.shape
        return last.to(state.memory.dtype).unsqueeze(1).expand(B, query.shape[1], S)
