"""Read tokens with or without a cache, for the classes for transformers that hold a decoder."""

from functools import cached_property
from typing import Any

from torch import Tensor

from unrolled.contract import UnsupportedError
from unrolled.decode import Plan
from unrolled.interop.hf._model import key_padding_mask, without_padding
from unrolled.interop.hf._planned import current, reader
from unrolled.interop.hf.cache import StateCache, StateLayer
from unrolled.models import Decoder, DecoderState
from unrolled.ops.state import leaves


class ReadsTokens:
    """Runs the decoder in the attribute `model` on a prompt, a part of one, or a token."""

    model: Decoder

    def _run(
        self,
        ids: Tensor,
        mask: Tensor | None,
        past: object,
        use_cache: bool | None,
        otherwise: bool,
        logits_to_keep: int | None = None,
    ) -> tuple[Tensor, Tensor | None, StateCache | None]:
        """Read tokens after those of a cache.

        Args:
            ids, mask, past, use_cache: `input_ids`, `attention_mask` and so on of `forward` in transformers.
            otherwise: the default of `use_cache` without a cache.
            logits_to_keep: number of positions, at the end, whose output is returned; all by default.

        Returns:
            The output of the decoder, [B, T, ...] or [B, logits_to_keep, ...]; the padding [B, T], or None;
            the cache, or None without `use_cache`.
        """
        cache = self._cache(past)
        if use_cache is None:
            use_cache = cache is not None or otherwise
        if use_cache and cache is None:
            cache = StateCache()
        padding = self._padding(mask, ids, 0 if cache is None else cache.get_seq_length())
        tokens = without_padding(ids, padding)
        if cache is None or cache.only is None:
            out = self.model(tokens, key_padding_mask=padding)
            return out if logits_to_keep is None else out[:, -logits_to_keep:], padding, None
        out = self._read(tokens, cache.only, padding, logits_to_keep)
        return out, padding, cache if use_cache else None

    def _padding(self, attention_mask: Tensor | None, input_ids: Tensor, seen: int) -> Tensor | None:
        return key_padding_mask(attention_mask, input_ids, seen)

    def _read(
        self, tokens: Tensor, layer: StateLayer, padding: Tensor | None, logits_to_keep: int | None
    ) -> Tensor:
        if current(self.model) is None:  # `generate` has checked it
            self._check_takes_cache()
        runner: Any = reader(self.model, tokens.shape[1])
        plan = runner if isinstance(runner, Plan) else None
        state: Any = layer.latest  # in the form of the plan
        if plan is None or layer.plan is not plan:
            state = self.model.init_state(len(tokens)) if layer.state is None else layer.state
            state = state if plan is None else plan.from_model(state)
        out: Tensor
        if tokens.shape[1] == 1 and padding is None:
            of_plan = {} if plan is None else {"in_place": True}  # `layer.state` gives copies only
            out, state = runner.step(tokens[:, 0], state, **of_plan)
            out = out.unsqueeze(1)
        else:
            out, state = runner.prefill(
                tokens, state, key_padding_mask=padding, logits_to_keep=logits_to_keep
            )
        layer.put(state, tokens.shape[1], plan)
        if plan is not None and (call := current(self.model)) is not None:
            call.written.add(layer)
        return out

    def _check_takes_cache(self) -> None:
        """Refuse several devices, and hooks of modules that run by other methods than `forward`."""
        if len(set((getattr(self, "hf_device_map", None) or {}).values())) > 1:
            raise UnsupportedError(
                "the weights are on several devices, where the model cannot continue a state; load it on one "
                "device, or call it with use_cache=False"
            )
        own, stack = self.model, self.model.stack
        hooks = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "forward"}
        attention = [block.attention for block in stack.layers]
        for module in (own, own.positions, stack, *stack.layers, *attention):
            if any(vars(module).get(name) for name in hooks):
                named = own.named_modules(prefix="model")
                name = next(name for name, each in named if each is module)
                raise UnsupportedError(
                    f"{name} has a hook or a forward of its own, which is not called with a cache; "
                    "call the model with use_cache=False"
                )

    def _cache(self, given: object) -> StateCache | None:
        if isinstance(given, DecoderState):
            given = StateCache.of(given, int(given.position.max()) if len(given.position) else 0)
        if given is None:
            return None
        if not isinstance(given, StateCache) or given.only is None:
            raise ValueError(
                f"cache is a {type(given).__name__}, but must be a StateCache of one StateLayer "
                "or a DecoderState"
            )
        if given.only.plan is None and given.only.state is not None:
            self._check_state(given.only.state)
        return given

    def _check_state(self, state: object) -> None:
        """Refuse a state whose sizes are those of another model; the batch is checked elsewhere."""
        found = leaves(state) if isinstance(state, DecoderState) else {}
        expected = self._state_sizes
        if found.keys() != expected.keys() or any(
            (x.dim() if isinstance(expected[name], int) else tuple(x.shape[1:])) != expected[name]
            for name, x in found.items()
        ):
            raise ValueError(
                "cache holds a state of another model: its tensors have other names or sizes than "
                "those of this one's init_state"
            )

    @cached_property
    def _state_sizes(self) -> dict[str, tuple[int, ...] | int]:
        """Sizes of the tensors of a state by name, without the batch; or the number of axes if it grows."""
        growing = [block.attention.supports.recurrence != "constant" for block in self.model.stack.layers]
        found = leaves(self.model.init_state(1))
        return {
            name: x.dim() if name != "position" and growing[int(name.split(".")[1])] else tuple(x.shape[1:])
            for name, x in found.items()
        }
