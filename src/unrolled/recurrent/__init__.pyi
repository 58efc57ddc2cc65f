# Written by `make format`.
from typing import Any, Literal, overload

from unrolled.recurrent._bidirectional import Bidirectional as Bidirectional
from unrolled.recurrent._bidirectional import BidirectionalState as BidirectionalState
from unrolled.recurrent._layer import RecurrentLayer as RecurrentLayer
from unrolled.recurrent._lstm import lstm_step as lstm_step
from unrolled.recurrent._stacked import Stacked as Stacked
from unrolled.recurrent._stacked import StackedState as StackedState
from unrolled.recurrent.gru import GRU
from unrolled.recurrent.gru_reset_before import GRUResetBefore
from unrolled.recurrent.kronecker import KroneckerRNN
from unrolled.recurrent.kronecker_lstm import KroneckerLSTM
from unrolled.recurrent.linear_attention import LinearAttentionCell
from unrolled.recurrent.low_rank_lstm import LowRankLSTM
from unrolled.recurrent.low_rank_rnn import LowRankRNN
from unrolled.recurrent.lstm import LSTM
from unrolled.recurrent.lstmn import LSTMN
from unrolled.recurrent.ntm import NTM
from unrolled.recurrent.rnn import RNN

def names() -> list[str]: ...
@overload
def load(name: Literal["gru"]) -> type[GRU]: ...
@overload
def load(name: Literal["gru_reset_before"]) -> type[GRUResetBefore]: ...
@overload
def load(name: Literal["kronecker"]) -> type[KroneckerRNN]: ...
@overload
def load(name: Literal["kronecker_lstm"]) -> type[KroneckerLSTM]: ...
@overload
def load(name: Literal["linear_attention"]) -> type[LinearAttentionCell]: ...
@overload
def load(name: Literal["low_rank_lstm"]) -> type[LowRankLSTM]: ...
@overload
def load(name: Literal["low_rank_rnn"]) -> type[LowRankRNN]: ...
@overload
def load(name: Literal["lstm"]) -> type[LSTM]: ...
@overload
def load(name: Literal["lstmn"]) -> type[LSTMN]: ...
@overload
def load(name: Literal["ntm"]) -> type[NTM]: ...
@overload
def load(name: Literal["rnn"]) -> type[RNN]: ...
@overload
def load(name: str) -> type[RecurrentLayer[Any]]: ...
