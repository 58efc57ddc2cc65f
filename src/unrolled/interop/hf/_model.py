"""The base of the classes for transformers: it holds a model of this library, and loads and saves it."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from unrolled.contract import IGNORED, UnsupportedError
from unrolled.folders import CONFIG_FILE
from unrolled.interop.hf import digest
from unrolled.interop.hf.config import UnrolledConfig
from unrolled.interop.hf.hub import folder_of
from unrolled.models import Decoder, Encoder
from unrolled.ops.masks import any_padding

Output = TypeVar("Output", bound=ModelOutput)
Count = Tensor | int | None
"""The number of labels by which a summed loss is divided; None for a mean over the batch."""
OUTPUTS = ("output_attentions", "output_hidden_states")  # of other models; configs may have them too
GIVES_POSITIONS = ". generate_batch gives it, and so does assisted decoding to its assistant"
HEADS = ("model.head.", "model.head_hidden.")
FOR_HUB = (
    "repo_id",
    "commit_message",
    "commit_description",
    "private",
    "token",
    "revision",
    "create_pr",
    "tags",
)
"""The arguments of `push_to_hub`."""
OF_FETCHING = ("cache_dir", "force_download", "local_files_only", "revision", "token")
FIXED_VOCABULARY = "the vocabulary of a model is fixed: make a model of another vocab_size instead"


class UnrolledPreTrainedModel(PreTrainedModel):  # type: ignore[no-untyped-call]  # of its __init_subclass__
    """A `Decoder` or `Encoder` as a model of transformers, in the attribute `model`."""

    config_class = UnrolledConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _no_split_modules = ["AttentionBlock", "Block"]  # noqa: RUF012

    _decodes: ClassVar[bool | None] = None  # whether the model is a decoder; None: as the config says

    config: UnrolledConfig
    model: Decoder | Encoder

    def __init__(self, config: UnrolledConfig) -> None:
        if self._decodes is not None and config.is_decoder != self._decodes:
            config = deepcopy(config)  # other models may share the object
            config.is_decoder = self._decodes
        super().__init__(config)
        # transformers makes models on the meta device and fills in the tensors of the file. But these models
        # draw random features from a CPU generator, and a head that the file lacks needs its initial weights.
        with torch.device("cpu"):
            self.model = self._make(config)
        self.post_init()  # type: ignore[no-untyped-call]

    @classmethod
    def _make(cls, config: UnrolledConfig) -> Decoder | Encoder:
        raise NotImplementedError

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path,
        *args: Any,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Read a model that `save_pretrained` wrote; see `PreTrainedModel.from_pretrained`.

        The output layer may be missing, as when a model is fine-tuned to another task; then it keeps its
        initial weights.

        Raises:
            ValueError: any other tensor is missing, or a file is damaged or was changed.
        """
        source = pretrained_model_name_or_path
        local = _folder(source, kwargs) / str(kwargs.get("subfolder", ""))
        documents = {}
        if (local / CONFIG_FILE).exists():
            UnrolledConfig.from_pretrained(local)  # before the digest, since its error names a missing field
            variant = kwargs.get("variant")
            stale = digest.replaced_by_shards(local, variant)  # after a crash; transformers would load it
            documents = digest.check([*stale, *digest.weights_files(local, variant)])
        kwargs["use_safetensors"] = True  # the pickle format can execute code
        loaded: Any
        try:
            loaded = super().from_pretrained(source, *args, output_loading_info=True, **kwargs)
        except SafetensorError as error:
            raise ValueError(f"a weights file of {source} is not readable: {error}") from error
        model: Self
        model, info = loaded
        model.model.documents = documents
        absent = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
        if lost := sorted(name for name in absent if not name.startswith(HEADS)):
            raise ValueError(
                f"{model.name_or_path} lacks {len(lost)} tensors of {cls.__name__}, the first is {lost[0]!r}"
            )
        for x in (*model.parameters(), *model.buffers()):
            # Copies: tensors of a file may be unaligned, which changes the rounding of some products.
            x.data = x.data.clone()
        if absent:
            fresh = cls._make(model.config).state_dict(prefix="model.")
            with torch.no_grad():
                for name, x in model.state_dict().items():
                    if name in absent:
                        x.copy_(fresh[name])
        return (model, info) if output_loading_info else model

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | Path, is_main_process: bool = True, **kwargs: Any
    ) -> None:
        """Write the model and its documents; see `PreTrainedModel.save_pretrained`.

        The weights file holds a SHA-256 of itself, the config and the documents, for `from_pretrained`.
        """
        push = kwargs.pop("push_to_hub", False)
        of_hub = {name: kwargs.pop(name) for name in FOR_HUB if name in kwargs}
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if is_main_process:
            variant = kwargs.get("variant")
            for file in digest.replaced_by_shards(save_directory, variant):
                file.unlink()
            digest.seal(save_directory, self.model.documents, variant)
            if push:  # transformers would do so before the files are complete
                self.push_to_hub(of_hub.pop("repo_id", Path(save_directory).name), **of_hub)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of the tokens."""
        return self.model.embedding

    def get_output_embeddings(self) -> nn.Module | None:
        """The output layer; None if it is the embedding table, or not a linear layer."""
        project = getattr(self.model.head, "project", None)
        return project if isinstance(project, nn.Module) else None

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Refuse another embedding.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(FIXED_VOCABULARY)

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Refuse another output layer.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(FIXED_VOCABULARY)

    def resize_token_embeddings(self, *args: object, **kwargs: object) -> nn.Embedding:
        """Refuse another size of the vocabulary.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(FIXED_VOCABULARY)

    def _returned(self, output: Output, return_dict: bool | None) -> Output | tuple[object, ...]:
        """Return an output as a dictionary or a tuple; for None, as the config says."""
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

    def _token_loss(
        self, logits: Tensor, labels: Tensor, ignored: Tensor | None, n_items: Count, *, first: int = 0
    ) -> Tensor:
        """The loss of transformers for labels [B, T], without labels at `ignored` or before `first`."""
        if ignored is not None:
            given, labels = labels, labels.masked_fill(ignored, IGNORED)
            if not self.training:  # in training, all batches of a step need the same divisor
                n_items = n_targets(n_items, given[:, first:], labels[:, first:])
        loss: Tensor = self.loss_function(
            logits, labels, vocab_size=self.config.vocab_size, num_items_in_batch=n_items
        )
        return loss

    def _refuse(self, others: Mapping[str, object]) -> None:
        """Refuse arguments that only other models have, unless they are None or False, as peft passes them.

        Raises:
            UnsupportedError: one of them has another value, here or in the config.
        """
        of_config = {name: getattr(self.config, name, False) for name in OUTPUTS}
        for name, value in (of_config | dict(others)).items():
            if value is not None and value is not False:
                hint = GIVES_POSITIONS if name == "position_ids" and self.can_generate() else ""
                raise UnsupportedError(f"{name} is given, but not supported; leave it out{hint}")

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: the models initialise their own weights."""


def key_padding_mask(attention_mask: Tensor | None, input_ids: Tensor, seen: int = 0) -> Tensor | None:
    """Convert a mask of transformers, 1 or True at valid tokens, into a padding mask, True at padding.

    Args:
        attention_mask: [B, T], or [B, seen + T] including the positions before `input_ids`; None for no
            padding.
        input_ids: [B, T].
        seen: number of positions read before.

    Returns:
        [B, T]; None if there is no padding, except while compiling, when the values are not known.

    Raises:
        UnsupportedError: the mask is a mask of query-key pairs.
        ValueError: the mask or `input_ids` has another shape.
    """
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}, but must have [batch, length]")
    if attention_mask is None:
        return None
    if attention_mask.dim() > 2:
        raise UnsupportedError(
            f"attention_mask has shape {list(attention_mask.shape)}, but only padding can be masked; "
            "use a mask [batch, length] instead"
        )
    batch_size, length = input_ids.shape
    if attention_mask.shape not in ((batch_size, length), (batch_size, seen + length)):
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}, "
            f"but must have [{batch_size}, {seen + length}]"
        )
    return any_padding(attention_mask[:, attention_mask.shape[1] - length :] == 0)


def without_padding(input_ids: Tensor, padding: Tensor | None) -> Tensor:
    """Replace ids at padding, which may lie outside the vocabulary, by id 0."""
    return input_ids if padding is None else input_ids.masked_fill(padding, 0)


def encode(
    model: Encoder, ids: Tensor, mask: Tensor | None, segments: Tensor | None, global_mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Run an encoder on the inputs of transformers; return its output and the padding.

    Raises:
        UnsupportedError, ValueError: as `key_padding_mask`, or as the model.
    """
    padding = key_padding_mask(mask, ids)
    is_global = None if global_mask is None else global_mask != 0
    tokens = without_padding(ids, padding)
    return model(tokens, key_padding_mask=padding, segments=segments, global_mask=is_global), padding


def n_targets(counted: Count, given: Tensor, kept: Tensor) -> Count:
    """Return the divisor of a summed loss, without labels at padding, which `Trainer` counts.

    Labels at padding are not in the summed loss, so their share is subtracted.

    Args:
        counted: number of labels other than -100 on all devices, as `Trainer` counts them; None for the mean
            over this batch.
        given: labels of this batch.
        kept: the same labels, with -100 at ignored labels.
    """
    if counted is None:
        return None
    return counted * (kept != IGNORED).sum().clamp(min=1) / (given != IGNORED).sum().clamp(min=1)


def _folder(source: str | Path | None, options: Mapping[str, Any]) -> Path:
    """Return the folder of a model; if there is none, a path that does not exist."""
    given = {name: options[name] for name in OF_FETCHING if name in options}
    try:
        return Path(str(source)) if source is None else folder_of(source, **given)
    except Exception:  # `from_pretrained` of transformers says what is wrong
        return Path(str(source))
