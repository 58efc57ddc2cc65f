"""`UnrolledForCausalLM`: a decoder that transformers can train and generate from."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from unrolled.contract import UnsupportedError
from unrolled.decode.packing import Weights
from unrolled.interop.hf._cache_name import CACHE, either
from unrolled.interop.hf._model import Count, UnrolledPreTrainedModel
from unrolled.interop.hf._planned import current, generation
from unrolled.interop.hf._reading import ReadsTokens
from unrolled.interop.hf.cache import StateCache
from unrolled.interop.hf.config import UnrolledConfig
from unrolled.interop.hf.model import UnrolledModel
from unrolled.models import Decoder, DecoderState
from unrolled.ops.masks import any_padding
from unrolled.ops.options import check_integers


class UnrolledForCausalLM(ReadsTokens, UnrolledPreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """A `Decoder` for transformers: `generate`, pipelines, `Trainer`, `save_pretrained`.

    The cache is a `StateCache` of one `StateLayer`, which holds the state of the whole decoder. If the state
    of the attention has constant size, so has the cache. A cache can be continued by any number of tokens,
    padded or not, with the same results as one forward pass over all tokens.

    `cache` also takes a `DecoderState`, as from `Decoder.prefill`; it is not modified.

    Tokens equal to the `pad_token_id` of the generation config are padding if that id is outside the
    vocabulary, even where `attention_mask` is 1, as in `generate` for rows that have ended.
    """

    _is_stateful = True  # a state cannot be rolled back to an earlier token

    model: Decoder

    _decodes = True

    def __init__(self, config: UnrolledConfig) -> None:
        super().__init__(config)
        if config.start_token and self.generation_config.bos_token_id is None:
            self.generation_config.bos_token_id = config.vocab_size

    @property
    def base_model(self) -> UnrolledModel:
        """The model without its output layer, with the same weights."""
        return UnrolledModel.of(self)

    @classmethod
    def _make(cls, config: UnrolledConfig) -> Decoder:
        return Decoder(config.decoder_config())

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: StateCache | DecoderState | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        logits_to_keep: int = 0,
        past_key_values: StateCache | DecoderState | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[object, ...]:
        """Return the logits of the token that follows each position.

        Args:
            input_ids: [B, T] long, the tokens after those that the cache has read.
            attention_mask: [B, T], or [B, S + T] with the S positions that the cache has read; 0 at padding.
            cache: the state after the earlier tokens; a `StateCache` is updated.
            labels: [B, T] long, equal to `input_ids`: this method shifts them. -100 and padding are ignored.
            use_cache: whether to return a cache; by default as in the config, unless there are labels.
            return_dict: False returns a tuple.
            num_items_in_batch: number of labels other than -100 in all batches of a step, by which the summed
                loss is divided; in evaluation, labels at padding are subtracted from it.
            logits_to_keep: number of positions, at the end, whose logits are returned and, with a cache,
                computed; 0 means all. `generate` sets it to 1.
            past_key_values: `cache`, by its name before transformers 5.24.
            others: arguments of other models of transformers; each must be None or False.

        Returns:
            `loss` if there are labels; `logits` [B, T, vocab_size], or [B, logits_to_keep, vocab_size];
            the cache, named `past_key_values` before transformers 5.24 and `cache` since.

        Raises:
            UnsupportedError: the mask is a mask of query-key pairs, or one of `others` is given.
            ValueError: the cache is of another model or batch, a mask or token is out of range, or
                `logits_to_keep` is not a whole number, or is given with labels, whose loss needs all logits.
        """
        self._refuse(others)
        check_integers(0, logits_to_keep=logits_to_keep)
        if labels is not None and logits_to_keep:
            raise ValueError(f"logits_to_keep is {logits_to_keep}, but must be 0 with labels")
        otherwise = self.config.use_cache and labels is None
        given = either(cache, past_key_values)
        logits, padding, after = self._run(
            input_ids, attention_mask, given, use_cache, otherwise, logits_to_keep or None
        )
        loss = None if labels is None else self._loss(logits, labels, padding, num_items_in_batch)
        named: dict[str, Any] = {CACHE: after}
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **named)
        return self._returned(output, return_dict)

    def generate(
        self,
        inputs: Tensor | None = None,
        *args: Any,
        cache: StateCache | DecoderState | None = None,
        past_key_values: StateCache | DecoderState | None = None,
        weights: Weights | None = None,
        **kwargs: Any,
    ) -> Any:
        """Continue `inputs` [B, T]; see `GenerationMixin.generate`.

        On a CPU, a plan (`unrolled.decode.plan`) reads all but the first few tokens, if it can run the model
        and no dropout acts.

        Args:
            inputs: token ids, including those that `cache` has read.
            args: as for `GenerationMixin.generate`.
            cache: a `StateCache` to continue, which is updated, or a `DecoderState`, which is not modified.
            past_key_values: `cache`, by its name before transformers 5.24.
            weights: form of the weights of the plan, which then reads all tokens, without dropout; fp32 by
                default.
            kwargs: as for `GenerationMixin.generate`.

        Raises:
            UnsupportedError: `weights` is given, but a plan cannot run the model, `use_cache` is False, or
                `forward` is compiled.
            ValueError: `cache` has read all of the inputs, or positions that do not match `attention_mask`.
        """
        ids, mask = kwargs.get("input_ids") if inputs is None else inputs, kwargs.get("attention_mask")
        given = either(cache, past_key_values)
        begun = self._cache(given)
        if begun is not None:
            if isinstance(given, DecoderState) and mask is not None and begun.only is not None:
                begun.only.seen = _positions_read(given, mask)
            whole = mask if mask is not None else ids
            if whole is not None and (seen := begun.get_seq_length()) >= whole.shape[1]:
                raise ValueError(
                    f"cache has read {seen} positions, but must have read fewer than the "
                    f"{whole.shape[1]} of the inputs, which include the tokens already read"
                )
            kwargs[CACHE] = begun
        if weights is not None and self._is_compiled():
            raise UnsupportedError(
                f"weights is {weights!r}, but a compiled model runs without a plan; leave out weights, or "
                "do not compile the model"
            )
        with generation(self.model, weights):
            return super().generate(inputs, *args, **kwargs)

    def _is_compiled(self) -> bool:
        """Whether `model.compile()` or `model.forward = torch.compile(model.forward)` was called."""
        return self._compiled_call_impl is not None or hasattr(self.forward, "_torchdynamo_orig_callable")

    def prepare_inputs_for_generation(
        self, *args: Any, tokenizer: object = None, **kwargs: Any
    ) -> dict[str, object]:
        """Make the arguments of a call of `forward` in `generate`, without `tokenizer`.

        The tokenizer is only for the stopping criterion of `stop_strings`, but transformers passes it on too.
        """
        taken: dict[str, object] = super().prepare_inputs_for_generation(*args, **kwargs)
        return taken

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the model takes no cache of transformers

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, object], *args: Any, **kwargs: Any
    ) -> bool:
        """Give `generate` a cache from the start, since prefilling in chunks needs one."""
        done: bool = super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, *args, **kwargs
        )
        call, pad = current(self.model), generation_config.pad_token_id
        if call is not None:
            call.pad = pad if isinstance(pad, int) else None
        if generation_config.use_cache is not False:
            self._check_takes_cache()
            model_kwargs.setdefault(CACHE, StateCache())
        elif call is not None and call.weights is not None:
            raise UnsupportedError(
                f"weights is {call.weights!r}, but a plan needs the cache; leave out use_cache=False"
            )
        return done

    def _padding(self, attention_mask: Tensor | None, input_ids: Tensor, seen: int) -> Tensor | None:
        padding = super()._padding(attention_mask, input_ids, seen)
        call = current(self.model)
        pad = self.generation_config.pad_token_id if call is None or call.pad is None else call.pad
        if not isinstance(pad, int) or 0 <= pad < self.model.n_ids:
            return padding
        also = any_padding(input_ids == pad)
        if padding is None or also is None:
            return padding if also is None else also
        return also | padding

    def _loss(self, logits: Tensor, labels: Tensor, padding: Tensor | None, n_items: Count) -> Tensor:
        # Labels at padding, and of the first token after padding, are not predicted.
        ignored = None if padding is None else padding | torch.cat([padding[:, :1], padding[:, :-1]], dim=1)
        return self._token_loss(logits, labels, ignored, n_items, first=1)


def _positions_read(state: DecoderState, attention_mask: Tensor) -> int:
    """Return the number of positions of `attention_mask` [B, T] that a state has read.

    The state itself counts valid tokens only.
    """
    if len(state.position) != len(attention_mask):  # an error that is raised later
        return int(state.position.max())
    counts = nn.functional.pad((attention_mask != 0).cumsum(dim=1), (1, 0))
    places = (counts == state.position.unsqueeze(1).to(counts.device)).all(dim=0).nonzero()
    if not len(places):
        raise ValueError(
            f"cache has read {state.position.tolist()} tokens of its rows, "
            "but must have read as many as attention_mask has up to some position"
        )
    return int(places[-1])
