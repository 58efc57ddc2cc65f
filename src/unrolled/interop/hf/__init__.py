"""Models of this library in Hugging Face transformers, and the reverse. Needs the extra `hf`.

Importing this package registers the classes below with transformers, so that `AutoConfig`,
`AutoModelForCausalLM` and so on find them by the `model_type` "unrolled" of a config. It also registers the
attention of linearized models. No other import of this library has such a side effect.
"""

from unrolled.extras import how_to_install

try:
    import transformers
except ImportError as error:
    raise ImportError(f"unrolled.interop.hf needs transformers: {how_to_install('hf')}") from error

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from unrolled.interop.hf.accelerate import accelerate, restore
from unrolled.interop.hf.cache import StateCache, StateLayer
from unrolled.interop.hf.causal_lm import UnrolledForCausalLM
from unrolled.interop.hf.config import UnrolledConfig
from unrolled.interop.hf.convert import (
    character_tokenizer,
    from_transformers,
    is_saved_by_transformers,
    load,
    text_tokenizer,
    to_transformers,
)
from unrolled.interop.hf.linearize import linearize, load_linearized, new_parameters, state_cache
from unrolled.interop.hf.masked_lm import UnrolledForMaskedLM
from unrolled.interop.hf.model import UnrolledModel
from unrolled.interop.hf.sequence_classification import UnrolledForSequenceClassification
from unrolled.interop.hf.weights import import_weights

__all__ = [
    "StateCache",
    "StateLayer",
    "UnrolledConfig",
    "UnrolledForCausalLM",
    "UnrolledForMaskedLM",
    "UnrolledForSequenceClassification",
    "UnrolledModel",
    "accelerate",
    "character_tokenizer",
    "from_transformers",
    "import_weights",
    "is_saved_by_transformers",
    "linearize",
    "load",
    "load_linearized",
    "new_parameters",
    "restore",
    "state_cache",
    "text_tokenizer",
    "to_transformers",
]

transformers.AutoConfig.register(UnrolledConfig.model_type, UnrolledConfig, exist_ok=True)
for auto, kind in (
    (transformers.AutoModel, UnrolledModel),
    (transformers.AutoModelForCausalLM, UnrolledForCausalLM),
    (transformers.AutoModelForMaskedLM, UnrolledForMaskedLM),
    (transformers.AutoModelForSequenceClassification, UnrolledForSequenceClassification),
):
    auto.register(UnrolledConfig, kind, exist_ok=True)
# `register` does not add the name, and `Trainer` shifts the labels that it smooths only for these names.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[UnrolledConfig.model_type] = UnrolledForCausalLM.__name__
