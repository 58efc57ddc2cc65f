"""`UnrolledModel`: a decoder or an encoder without its output layer."""

from copy import copy
from typing import Any, Self

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from unrolled.contract import UnsupportedError
from unrolled.interop.hf._cache_name import CACHE, either
from unrolled.interop.hf._model import UnrolledPreTrainedModel, encode
from unrolled.interop.hf._reading import ReadsTokens
from unrolled.interop.hf.cache import StateCache
from unrolled.interop.hf.config import UnrolledConfig
from unrolled.models import Decoder, DecoderState, Encoder


class UnrolledModel(ReadsTokens, UnrolledPreTrainedModel):  # type: ignore[no-untyped-call]
    """The bare model, without an output layer, for transformers; it returns the hidden vector of each token.

    If the config has `is_decoder`, it holds a `Decoder`, and continues a cache like `UnrolledForCausalLM`;
    else it holds an `Encoder`. The folders of all classes here can be loaded as an `UnrolledModel`, without
    the output layer.
    """

    model: Any  # a Decoder, whose head is the identity, or an Encoder

    @classmethod
    def of(cls, model: UnrolledPreTrainedModel) -> Self:
        """Return a model without its output layer; both have the same weights."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.config, made.training, made.model = model.config, model.training, copy(model.model)
        made.model._modules = {**made.model._modules, "head": nn.Identity()}
        return made

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
        cache: StateCache | DecoderState | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        past_key_values: StateCache | DecoderState | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast | tuple[object, ...]:
        """Return the hidden vectors, which are the outputs of the norm after the last block.

        Args:
            input_ids: [B, T] long; for a decoder, the tokens after those that the cache has read.
            attention_mask: [B, T], or [B, S + T] with the S positions that the cache has read; 0 at padding.
            token_type_ids: [B, T] long, the `segments`, for an encoder that has segments; all 0 by default.
            global_attention_mask: [B, T], nonzero at global tokens; see `global_mask` of `Encoder.forward`.
            cache: the state of a decoder after the earlier tokens; a `StateCache` is updated.
            use_cache: whether a decoder returns a cache; by default as in the config.
            return_dict: False returns a tuple.
            past_key_values: `cache`, by its name before transformers 5.24.
            others: arguments of other models of transformers; each must be None or False.

        Returns:
            `last_hidden_state` [B, T, d_model]; the cache of a decoder, named `past_key_values` before
            transformers 5.24 and `cache` since.

        Raises:
            UnsupportedError: the mask is a mask of query-key pairs, an encoder is given a cache, a decoder is
                given segments, or one of `others` is given.
            ValueError: the cache is of another model or batch, or a mask or token is out of range.
        """
        self._refuse(others)
        given, after = either(cache, past_key_values), None
        if self.config.is_decoder:
            if token_type_ids is not None:
                raise UnsupportedError(
                    "token_type_ids are given, but a decoder has no segments; leave them out"
                )
            otherwise = self.config.use_cache
            hidden, _, after = self._run(input_ids, attention_mask, given, use_cache, otherwise)
        else:
            if given is not None:
                raise UnsupportedError("cache is given, but an encoder has no cache; leave it out")
            hidden, _ = encode(self.model, input_ids, attention_mask, token_type_ids, global_attention_mask)
        named: dict[str, Any] = {CACHE: after}
        output = BaseModelOutputWithPast(last_hidden_state=hidden, **named)
        return self._returned(output, return_dict)
