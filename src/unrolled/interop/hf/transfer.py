"""Train a linearized model in two stages: attention transfer, then fine-tuning.

Both stages are runs of `unrolled.training.train`, with a log and checkpoints, and can be resumed.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Self

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from unrolled.contract import IGNORED, Dataset
from unrolled.files import save_tensors
from unrolled.interop.hf.linearize import RECORD, linearized_layers, new_parameters
from unrolled.models.mode import evaluation_mode
from unrolled.training import TrainConfig, TrainResult, train
from unrolled.training.checkpoint import fingerprint

Call = tuple[tuple[object, ...], dict[str, object], Tensor]
"""Positional and keyword arguments of a call, and its first output."""


@dataclass(frozen=True)
class Stage:
    """Identifies a run of one stage, so that it is not resumed with another model.

    Attributes:
        name: "transfer" or "finetune".
        attention: the mechanism and options of each replaced layer.
        start: checksum of the weights that the run began with.
        lora: rank of the LoRA updates; 0 if all weights are trained.
    """

    name: str
    attention: dict[str, object] = field(default_factory=dict)
    start: str = ""
    lora: int = 0


class _Trained(nn.Module):
    """A model for `train` that saves only its trained weights."""

    def __init__(self, model: PreTrainedModel | PeftModel, config: Stage) -> None:
        super().__init__()
        self.model, self.config = model, config

    def save(self, path: Path) -> None:
        """Write the trained weights into a folder."""
        trained = {name: x.detach() for name, x in self.named_parameters() if x.requires_grad}
        save_tensors(trained, path / "trained.safetensors")

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of `targets [B,T]`, in nats; -100 is ignored."""
        return token_loss(self.model, inputs, targets)


class AttentionTransfer(_Trained):
    """Stage 1: each replaced layer learns to reproduce softmax attention for the same input.

        loss = mean over layers of  |student(x) - teacher(x)|^2 / |teacher(x)|^2

    x is the input of the layer in the teacher, so that no layer has to correct errors of the layers below it
    (teacher forcing). Only the new parameters of the student are trained, such as feature maps. Zhang et al.
    2024, "LoLCATs", arXiv 2410.10254; there, the error is not divided by |teacher(x)|^2. The division gives
    all layers the same weight.

    Args:
        student: a linearized model; all parameters but the new ones are frozen.
        teacher: the model before the replacement; it is not modified.

    Raises:
        ValueError: the student has no new parameters, or the teacher lacks one of the replaced layers.
    """

    def __init__(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        new = new_parameters(student)
        if not new:
            raise ValueError(
                "the linearized layers have no parameters of their own to train: choose a learned feature "
                "map, such as feature_map='hedgehog', or continue with fine-tuning"
            )
        super().__init__(student, _stage("transfer", student))
        for name, parameter in student.named_parameters():
            parameter.requires_grad_(name in new)
        self.layers = linearized_layers(student)
        originals = dict(teacher.named_modules())
        if missing := [name for name in self.layers if name not in originals]:
            raise ValueError(f"teacher has no module {missing[0]!r}, which was replaced in student")
        self.pairs = [(originals[name], layer) for name, layer in self.layers.items()]
        self._teacher = (teacher,)  # in a tuple, so that it is not a submodule

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode: the targets must not depend on dropout."""
        return super().train(False)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss for tokens `[B,T]`; `targets` are not used."""
        (teacher,), originals = self._teacher, [original for original, _ in self.pairs]
        with torch.no_grad(), evaluation_mode(teacher), _recording(originals) as calls:
            teacher(input_ids=inputs, use_cache=False)
        errors = []
        for (args, kwargs, target), (_, layer) in zip(calls, self.pairs, strict=True):
            given = signature(layer.forward).bind(*args, **kwargs)
            given.arguments["attention_mask"] = None  # the mask was made for softmax; there is no padding
            found = layer(*given.args, **given.kwargs)[0]
            errors.append((found - target).square().mean() / target.square().mean())
        return torch.stack(errors).mean()


class FineTuning(_Trained):
    """Stage 2: the linearized model is fine-tuned to predict the next token.

    With `lora` above 0, the new parameters are trained, and the projections of the replaced layers learn
    updates of this rank, W + B A; all other parameters are frozen. With 0, all parameters are trained. Hu et
    al. 2021, "LoRA", arXiv 2106.09685.

    Args:
        model: a linearized causal language model.
        lora: rank of the LoRA updates; 0 trains all parameters instead.
        seed: seed of the random initial A.
    """

    def __init__(self, model: PreTrainedModel, *, lora: int = 0, seed: int = 0) -> None:
        stage = _stage("finetune", model, lora)
        new = set(new_parameters(model))
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        trained: PreTrainedModel | PeftModel = model
        if lora:
            owners = [f"{name}.mechanism" for name in linearized_layers(model)]
            names = [f"{owner}.{own}" for owner in owners for own in ("qkv_proj", "out_proj")]
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                trained = get_peft_model(model, LoraConfig(r=lora, lora_alpha=lora, target_modules=names))
            for name, parameter in model.named_parameters():  # peft has frozen the parameters in place
                if name in new:
                    parameter.requires_grad_(True)
        super().__init__(trained, stage)

    def merged(self) -> nn.Module:
        """Return the model itself, with low-rank updates added to the weights."""
        return self.model.merge_and_unload() if isinstance(self.model, PeftModel) else self.model


class LanguageModel(_Trained):
    """An unmodified causal language model of transformers, for `train` and `evaluate`."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, _stage("model", model))


def transfer(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    data: Dataset,
    config: TrainConfig,
    run_dir: str | Path,
    *,
    resume: bool = True,
    progress: bool = True,
) -> TrainResult:
    """Run or resume stage 1 (see `AttentionTransfer`), which trains `student` in place.

    The losses of the result are those of `AttentionTransfer`, not nats. `run_dir` holds the log and the
    checkpoint.
    """
    with _frozen_as_found(student):
        stage = AttentionTransfer(student, teacher)
        return train(stage, data, config, run_dir, resume=resume, progress=progress)


def finetune(
    model: PreTrainedModel,
    data: Dataset,
    config: TrainConfig,
    run_dir: str | Path,
    *,
    lora: int = 0,
    resume: bool = True,
    progress: bool = True,
) -> TrainResult:
    """Run or resume stage 2 (see `FineTuning`), which trains `model` in place.

    Low-rank updates are merged into the weights at the end.
    """
    with _frozen_as_found(model):
        stage = FineTuning(model, lora=lora, seed=config.seed)
        try:
            return train(stage, data, config, run_dir, resume=resume, progress=progress)
        finally:
            stage.merged()


def token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of `targets [B,T]`, the tokens that follow `inputs [B,T]`; -100 is ignored."""
    logits = model(input_ids=inputs, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


@contextmanager
def _recording(modules: list[nn.Module]) -> Iterator[list[Call]]:
    """Record the calls of `modules`, in their order."""
    calls: list[Call] = []

    def record(
        module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: tuple[Tensor, ...]
    ) -> None:
        calls.append((args, dict(kwargs), output[0]))

    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in modules]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _frozen_as_found(model: nn.Module) -> Iterator[None]:
    """Restore `requires_grad` of all parameters when the block ends."""
    before = {name: x.requires_grad for name, x in model.named_parameters()}
    try:
        yield
    finally:
        for name, x in model.named_parameters():
            x.requires_grad_(before[name])


def _stage(name: str, model: PreTrainedModel, lora: int = 0) -> Stage:
    attention = copy.deepcopy(getattr(model.config, RECORD, None) or {})
    return Stage(name, attention, fingerprint(*model.state_dict().values()), lora)
