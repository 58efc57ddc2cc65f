"""`unrolled linearize`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unrolled.cli._options import Force
from unrolled.extras import how_to_install

if TYPE_CHECKING:
    from unrolled.training import TrainConfig


def linearize(
    model: Annotated[
        str, typer.Argument(help="A causal language model of transformers: a folder or a hub name.")
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write; an interrupted run resumes there.")],
    data: Annotated[list[Path], typer.Option(help="A UTF-8 text to train on; repeatable.")],
    attention: Annotated[str, typer.Option(help="The mechanism; see `unrolled list`.")] = "linear",
    feature_map: Annotated[
        str | None,
        typer.Option(help="Feature map of linear attention: hedgehog (default), t2r (also learned), ..."),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Option of the mechanism, such as window=64; repeatable.")
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Layers to replace, as in 0,2,3; default all.")] = None,
    transfer_steps: Annotated[int, typer.Option(help="Updates of stage 1, attention transfer.")] = 500,
    finetune_steps: Annotated[int, typer.Option(help="Updates of stage 2, fine-tuning.")] = 500,
    lora: Annotated[int, typer.Option(min=0, help="LoRA rank in stage 2; 0 trains all weights.")] = 0,
    transfer_lr: Annotated[float, typer.Option(help="Peak learning rate of stage 1.")] = 1e-2,
    finetune_lr: Annotated[float, typer.Option(help="Peak learning rate of stage 2.")] = 3e-4,
    length: Annotated[int, typer.Option(help="Tokens per window.")] = 256,
    batch_size: Annotated[int, typer.Option(help="Windows per update.")] = 16,
    val_fraction: Annotated[float, typer.Option(help="Fraction of the text held out for validation.")] = 0.1,
    eval_batches: Annotated[int | None, typer.Option(help="Batches per evaluation; all by default.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the new weights and the data order.")] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over.")] = False,
    force: Force = False,
) -> None:
    """Replace the softmax attention of a trained model and train the new parts: transfer, then fine-tuning.

    Stage 1 trains each replaced layer to reproduce the output of softmax attention for the same input.
    Stage 2 continues with next-token prediction. Weights are trained in fp32, and saved in the type that they
    had. OUT then holds the model and its tokenizer, linearize.json with the validation loss after each stage,
    and a log of each stage.
    """
    try:
        from unrolled.interop.hf.recipe import Recipe, run
    except ModuleNotFoundError as error:
        raise ImportError(f"{error.name} is missing: {how_to_install('hf')}") from error

    options = _options(option or [])
    if feature_map is not None and "feature_map" in options:
        raise ValueError("--feature-map and --option feature_map exclude each other: give one of them")
    if feature_map is not None or attention == "linear":
        options.setdefault("feature_map", feature_map or "hedgehog")
    recipe = Recipe(
        attention=attention,
        options=options,
        layers=None if layers is None else _numbers(layers),
        transfer=_stage(transfer_steps, transfer_lr, batch_size, seed, eval_batches),
        finetune=_stage(finetune_steps, finetune_lr, batch_size, seed, eval_batches),
        lora=lora,
    )
    losses = run(
        model, out, data, recipe, length=length, val_fraction=val_fraction, resume=not fresh, force=force
    )
    before = losses["before"]
    for name, loss in losses.items():
        typer.echo(f"{name:>12}  {loss:.4f} nats per token  {(loss / before - 1):+.1%}")
    typer.echo(f"wrote {out}")


def _stage(
    steps: int, lr: float, batch_size: int, seed: int, eval_batches: int | None
) -> "TrainConfig | None":
    from unrolled.training import TrainConfig

    if steps == 0:
        return None
    every = max(1, min(250, steps))
    return TrainConfig(
        steps=steps,
        lr=lr,
        min_lr=lr / 10,
        batch_size=batch_size,
        warmup_steps=min(50, steps // 10),
        weight_decay=0.0,
        eval_every=every,
        checkpoint_every=min(100, every),
        eval_batches=eval_batches,
        seed=seed,
    )


def _options(given: list[str]) -> dict[str, Any]:
    import json

    options = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals:
            raise ValueError(f"--option is {each!r}, but must be NAME=VALUE, as in window=64")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value  # a word
    return options


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--layers is {text!r}, but must be numbers, as in 0,2,3") from error
