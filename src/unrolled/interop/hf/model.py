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
    """The bare model of transformers, without an output layer: it returns the hidden vector of each position.

    It is a `Decoder` where the config has `is_decoder`, and then continues a cache as `UnrolledForCausalLM`
    does, or an `Encoder`. Folders of all our classes can be loaded as one, without the output layer.
    """

    model: Any  # a Decoder, whose head is the identity, or an Encoder

    @classmethod
    def _make(cls, config: UnrolledConfig) -> Decoder | Encoder:
        if not config.is_decoder:
            return Encoder(config.encoder_config("hidden"))
        decoder = Decoder(config.decoder_config())
        decoder.set_submodule("head", nn.Identity())
        return decoder

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
    ) -> BaseModelOutputWithPast | tuple[object, ...]:
        """Hidden vectors, the outputs of the last block's norm.

        Args:
            input_ids: [B, T] long, for a decoder the tokens after those that the cache has read.
            attention_mask: [B, T], or [B, S + T] with the S positions that the cache has read; 0 at padding.
            token_type_ids: [B, T] long, the `segments` of an encoder that has some; all 0 by default.
            global_attention_mask: [B, T], nonzero at global tokens; see `global_mask` of `Encoder.forward`.
            past_key_values: the state of a decoder after the tokens before; it is updated.
            use_cache: whether a decoder returns a cache; by default as the config says.
            return_dict: False for a tuple.
            others: arguments of other models of transformers; each None or False.

        Returns:
            `last_hidden_state` [B, T, d_model]; `past_key_values` of a decoder.

        Raises:
            UnsupportedError: the mask is one of query-key pairs, an encoder is given a cache, a decoder is
                given segments, or one of `others` is given.
            ValueError: the cache is of another model or batch, or a mask or token is out of range.
        """
        refuse_others(others)
        cache = None
        if self.config.is_decoder:
            if token_type_ids is not None:
                raise UnsupportedError(
                    "token_type_ids are given, but a decoder has no segments; leave them out"
                )
            otherwise = self.config.use_cache
            hidden, _, cache = self._run(input_ids, attention_mask, past_key_values, use_cache, otherwise)
        else:
            if past_key_values is not None:
                raise UnsupportedError("past_key_values is given, but an encoder has no cache; leave it out")
            hidden, _ = encode(self.model, input_ids, attention_mask, token_type_ids, global_attention_mask)
        output = BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=cache)
        return self._returned(output, return_dict)
