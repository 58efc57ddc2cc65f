"""Training a linearized model in two stages: attention transfer, then fine-tuning.

Both are runs of `unrolled.training.train`, with its log, its checkpoints and its resume.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from unrolled.contract import IGNORED, Dataset
from unrolled.files import save_tensors
from unrolled.interop.hf.linearize import RECORD, linearized_layers, new_parameters
from unrolled.training import TrainConfig, TrainResult, train
from unrolled.training.checkpoint import fingerprint


@dataclass(frozen=True)
class Stage:
    """What a run of one stage is about, so that it is not resumed for another model.

    Attributes:
        name: "transfer" or "finetune".
        attention: what was put into which layer.
        start: sums up the weights that the run began with.
        lora: rank of the updates; 0 for full ones.
    """

    name: str
    attention: dict[str, Any] = field(default_factory=dict)
    start: str = ""
    lora: int = 0


class _Trained(nn.Module):
    """A model among `train`'s: it keeps only the weights that are trained."""

    def __init__(self, model: Any, config: Stage) -> None:
        super().__init__()
        self.model, self.config = model, config

    def save(self, path: Path) -> None:
        """Write the weights that are trained into a folder."""
        trained = {name: x.detach().contiguous() for name, x in self.named_parameters() if x.requires_grad}
        save_tensors(trained, path / "trained.safetensors")


class AttentionTransfer(_Trained):
    """Stage 1: each replaced layer learns to give what softmax attention gives for the same input.

        loss = mean over layers of  |student(x) - teacher(x)|^2 / |teacher(x)|^2

    x is what the layer reads in the teacher, so that no layer has to make up for those below it (teacher
    forcing). Only what is new in the student is trained, such as its feature maps. Zhang et al. 2024,
    "LoLCATs", arXiv 2410.10254, by whom the error is not divided; divided, all layers count alike.

    Args:
        student: a linearized model; all of it that is not new is frozen.
        teacher: the model before; it is not changed.

    Raises:
        ValueError: there is nothing new in the student, or the models are not the same otherwise.
    """

    def __init__(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        new = new_parameters(student)
        if not new:
            raise ValueError(
                "the linearized layers have no parameters of their own to train: choose a learned feature "
                "map, such as feature_map='hedgehog', or go on to fine-tuning"
            )
        super().__init__(student, _stage("transfer", student))
        for name, parameter in student.named_parameters():
            parameter.requires_grad_(name in new)
        self.layers = linearized_layers(student)
        originals = dict(teacher.named_modules())
        if missing := [name for name in self.layers if name not in originals]:
            raise ValueError(f"teacher has no module {missing[0]!r}, which was replaced in student")
        self.pairs = [(originals[name], layer) for name, layer in self.layers.items()]
        teacher.train(False)
        self._teacher: tuple[Any] = (teacher,)  # in a tuple, since its weights are not among those of the run

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode: a target must not depend on dropout."""
        return super().train(False)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss for tokens `[B,T]`; `targets` are not used."""
        with torch.no_grad(), _recording([original for original, _ in self.pairs]) as calls:
            self._teacher[0](input_ids=inputs, use_cache=False)
        errors = []
        for (args, kwargs, wanted), (_, layer) in zip(calls, self.pairs, strict=True):
            kwargs["attention_mask"] = None  # made for softmax; there is no padding
            got = layer(*args, **kwargs)[0]
            errors.append((got - wanted).square().mean() / wanted.square().mean())
        return torch.stack(errors).mean()


class FineTuning(_Trained):
    """Stage 2: the linearized model goes on learning to predict the next token.

    With `lora`, the projections of the replaced layers learn updates of that rank, W + B A, beside what is
    new in them; all else stays. Without, everything is trained. Hu et al. 2021, "LoRA", arXiv 2106.09685.

    Args:
        model: a linearized causal language model.
        lora: rank of the updates; 0 for full ones.
        seed: of the random start of A.
    """

    def __init__(self, model: PreTrainedModel, *, lora: int = 0, seed: int = 0) -> None:
        stage = _stage("finetune", model, lora)
        new = set(new_parameters(model))
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        trained: Any = model
        if lora:
            names = [
                f"{name}.mechanism.{own}"
                for name in linearized_layers(model)
                for own in ("qkv_proj", "out_proj")
            ]
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                trained = get_peft_model(model, LoraConfig(r=lora, lora_alpha=lora, target_modules=names))
            for name, parameter in trained.base_model.model.named_parameters():
                if name in new:
                    parameter.requires_grad_(True)
        super().__init__(trained, stage)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of `targets [B,T]`, in nats; -100 is not counted."""
        return token_loss(self.model, inputs, targets)

    def merged(self) -> Any:
        """Return the model itself, with low-rank updates added to the weights."""
        return self.model.merge_and_unload() if self.config.lora else self.model


class LanguageModel(_Trained):
    """A causal language model of transformers as it is, for `train` and `evaluate`."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, _stage("model", model))

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of `targets [B,T]`, in nats; -100 is not counted."""
        return token_loss(self.model, inputs, targets)


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
    """Run stage 1 (see `AttentionTransfer`): trains `student` in place, or goes on where it was stopped.

    The losses of the result are those of `AttentionTransfer`, not nats. `run_dir` holds log and checkpoint.
    """
    with _frozen_as_found(student):
        return train(
            AttentionTransfer(student, teacher), data, config, run_dir, resume=resume, progress=progress
        )


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
    """Run stage 2 (see `FineTuning`): trains `model` in place, or goes on where it was stopped.

    Low-rank updates are added to the weights at the end, so that nothing of them is left.
    """
    with _frozen_as_found(model):
        stage = FineTuning(model, lora=lora, seed=config.seed)
        try:
            return train(stage, data, config, run_dir, resume=resume, progress=progress)
        finally:
            stage.merged()


def token_loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of `targets [B,T]`, the tokens that follow `inputs [B,T]`; -100 is not counted."""
    logits = model(input_ids=inputs, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


@contextmanager
def _recording(modules: list[nn.Module]) -> Iterator[list[tuple[Any, dict[str, Any], Tensor]]]:
    """List the arguments and the first output of each call of `modules`, in the order of the calls."""
    calls: list[tuple[Any, dict[str, Any], Tensor]] = []

    def record(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        calls.append((args, dict(kwargs), output[0]))

    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in modules]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _frozen_as_found(model: nn.Module) -> Iterator[None]:
    """Put back which parameters are trained, and the mode, when the block ends."""
    wanted = {name: x.requires_grad for name, x in model.named_parameters()}
    try:
        yield
    finally:
        for name, x in model.named_parameters():
            x.requires_grad_(wanted[name])


def _stage(name: str, model: PreTrainedModel, lora: int = 0) -> Stage:
    attention = copy.deepcopy(getattr(model.config, RECORD, None) or {})
    return Stage(name, attention, fingerprint(*model.state_dict().values()), lora)
