"""`UnrolledModel`: a decoder or an encoder without its output layer."""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from unrolled.contract import UnsupportedError
from unrolled.interop.hf._model import UnrolledPreTrainedModel, encode, refuse_others
from unrolled.interop.hf._reading import ReadsTokens
from unrolled.interop.hf.cache import StateCache
from unrolled.interop.hf.config import UnrolledConfig
from unrolled.models import Decoder, DecoderState, Encoder


class UnrolledModel(ReadsTokens, UnrolledPreTrainedModel):  # type: ignore[no-untyped-call]
    """What transformers calls a bare model: it puts out the hidden vector of each position.

    It is a `Decoder` where the config has `is_decoder`, and then continues a cache as `UnrolledForCausalLM`
    does, or an `Encoder`. Folders of all our classes can be read as one: the output layer stays behind.
    """

    model: Any  # a Decoder, whose head puts out what it reads, or an Encoder

    @staticmethod
    def _make(config: UnrolledConfig) -> Decoder | Encoder:
        if not config.is_decoder:
            return Encoder(config.encoder_config("hidden"))
        decoder: Any = Decoder(config.decoder_config())
        decoder.head = nn.Identity()
        return decoder  # type: ignore[no-any-return]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        past_key_values: StateCache | DecoderState | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Hidden vectors, as they leave the last block's norm.

        Args:
            input_ids: [B, T] long, for a decoder the tokens after those that the cache has read.
            attention_mask: [B, T], or [B, S + T] with the S positions that the cache has read; 0 at padding.
            token_type_ids: [B, T] long, the `segments` of an encoder that has some; all 0 by default.
            global_attention_mask: [B, T], not 0 at global tokens; see `global_mask` of `Encoder.forward`.
            past_key_values: what a decoder has read before; it is brought up to date.
            use_cache: whether a decoder returns a cache; by default as the config says.
            return_dict: False for a tuple.
            others: what other models of transformers take; each None or False.

        Returns:
            `last_hidden_state` [B, T, d_model]; `past_key_values` of a decoder.

        Raises:
            UnsupportedError: the mask says which position may see which, an encoder is given a cache, or a
                decoder segments, or one of `others` is asked for.
            ValueError: the cache is of another model or batch, or a mask or token is impossible.
        """
        refuse_others(others)
        cache = None
        if self.config.is_decoder:
            if token_type_ids is not None:
                raise UnsupportedError(
                    "token_type_ids are given, but a decoder has no segments; leave them out"
                )
            hidden, _, cache = self._run(
                input_ids, attention_mask, past_key_values, use_cache, otherwise=self.config.use_cache
            )
        else:
            if past_key_values is not None:
                raise UnsupportedError("past_key_values is given, but an encoder has no cache; leave it out")
            hidden, _ = encode(self.model, input_ids, attention_mask, token_type_ids, global_attention_mask)
        return self._given(
            BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=cache), return_dict
        )
