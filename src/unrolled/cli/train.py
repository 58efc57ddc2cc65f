"""`unrolled train`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unrolled.cli._options import DataDir, Device, Force

if TYPE_CHECKING:
    import torch

    from unrolled.cli.run_config import Run
    from unrolled.training import Forecast, TrainResult


def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings, with values in YAML; they override --config."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A YAML file with the sections data, model, train and run_dir.")
    ] = None,
    data_dir: DataDir = None,
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Resume from the last checkpoint, or start over.")
    ] = True,
    device: Device = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Estimate memory and time from ten steps; write nothing."),
    ] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard files.")] = False,
    wandb: Annotated[
        str | None,
        typer.Option(metavar="PROJECT", help="Also send the log to this project of Weights & Biases."),
    ] = None,
    force: Force = False,
) -> None:
    """Train a model on a data set. Repeat the command to resume a run.

    \b
    The data set determines the task, and model.name the model (default first):
      predict tokens     decoder, perceiver_ar, recurrent_lm
      give a label       encoder, perceiver, perceiver_io
      translate          encoder_decoder, rnn_seq2seq, luong_seq2seq,
                         lstmn_seq2seq, deep_lstmn_seq2seq
      answer (babi)      memory_network; memnn, if data.supporting is 1, 2 or 3
      predict bits       ntm; segmenter, which finds the pixels of moving_mnist
      add (adding)       ntm_numbers
      transcribe speech  transcriber, bilstm_transcriber

    \b
    From settings alone:
      unrolled train data.name=digits run_dir=runs/digits
      unrolled train data.name=text data.path=book.txt run_dir=runs/book
      unrolled train data.name=imdb run_dir=runs/imdb
      unrolled train data.name=multi30k run_dir=runs/multi30k
      unrolled train data.name=imdb model.name=perceiver run_dir=runs/latents
      unrolled train data.name=digits model.name=recurrent_lm run_dir=runs/lstm
      unrolled train data.name=babi "data.tasks=\\[1, 2]" run_dir=runs/babi
      unrolled train data.name=copy_bits run_dir=runs/ntm
      unrolled train data.name=an4 model.attention=linear run_dir=runs/speech
      unrolled train data.name=mqar model.attention=delta_net run_dir=runs/recall

    \b
    With a recipe, a set of settings that train well together:
      unrolled train data.name=text model.recipe=small-lm run_dir=runs/small

    \b
    From a file, with settings changed:
      unrolled train --config book.yaml train.lr=3e-4 run_dir=runs/slower
      unrolled train --config book.yaml "model.attention=\\[linear, softmax]"

    \b
    Estimate the memory and time of a run:
      unrolled train --dry-run --config book.yaml
      torchrun --nproc-per-node 2 -m unrolled train --dry-run --config book.yaml

    \b
    On several processes or machines; batch_size is the total over all:
      torchrun --nproc-per-node 2 -m unrolled train --config book.yaml
      torchrun --nnodes 4 --nproc-per-node 8 --max-restarts 3 \\
        --rdzv-backend c10d --rdzv-endpoint host:29500 \\
        -m unrolled train --config big.yaml train.shard=8

    \b
    The file book.yaml:
      data: {name: text, path: book.txt, length: 256}
      model: {d_model: 128, n_layers: 2, positions: rotary}
      train: {steps: 2000, batch_size: 12, lr: 1e-3}
      run_dir: runs/book

    \b
    The run folder will hold
      model.safetensors, config.json   the weights with the best validation loss
      last.safetensors                 the last checkpoint, if not sharded
      last.json, last/                 the last checkpoint, if sharded
      log.jsonl                        the losses
      run.yaml                         all settings, in the form of book.yaml
      vocabulary.json                  what the token ids stand for
    """
    from unrolled import training
    from unrolled.cli import run_config
    from unrolled.cli._device import choose
    from unrolled.cli._wandb import ID_FILE, Tracker
    from unrolled.folders import PLAN_FILE, RUN_FILE, WEIGHTS_FILE, check_folder, contents
    from unrolled.training.processes import joined

    training.keep_freed_memory()
    with joined() as processes:
        with processes.agreed():
            where = choose(device)
            values = run_config.read(config, overrides or [], data_dir)
            run = run_config.resolve(values, where)
            if resume:
                run = _in_its_precision(run, values)

            def made_before() -> bool:
                found = contents(run.run_dir)
                begun = {"last.safetensors", "last.json"} & found or not {WEIGHTS_FILE, PLAN_FILE} & found
                return (RUN_FILE in found and bool(begun)) or found <= {"wandb", ID_FILE}  # it failed there

            if processes.first:
                what = "a run of unrolled train with its checkpoint"
                check_folder(run.run_dir, what, made_before, force=force)
            model = run.new_model(where)
            tracker = Tracker(wandb, run) if wandb is not None and processes.first and not dry_run else None

        if dry_run:
            forecast = training.dry_run(model, run.dataset, run.train, run.run_dir, resume=resume)
            if processes.first:
                _print(forecast, run, where)
                _report_warm_up(forecast.steps, run)
            return

        if processes.first:
            parameters = sum(x.numel() for x in model.parameters())
            others = "" if processes.alone else f"{processes.size} processes, "
            typer.echo(f"{parameters:,} parameters, {others}run folder {run.run_dir}", err=True)
            if run.train.seconds is None:
                _report_warm_up(run.train.steps, run)

        def start(resumed: bool) -> None:
            if tracker is not None:
                tracker.start(resumed)  # first, since it may fail
            run.save()

        try:
            result = training.train(
                model,
                run.dataset,
                run.train,
                run.run_dir,
                resume=resume,
                tensorboard=tensorboard,
                on_start=start,
                outdated=run_config.MODEL_FILES,
                on_line=lambda line: None if tracker is None else tracker.send(line),
            )
        finally:
            if tracker is not None:
                tracker.finish()
        if processes.first:
            _report_loss(result, run)
        result.raise_if_interrupted()
        if processes.first:
            if run.train.seconds is not None:
                _report_warm_up(result.steps, run)
            _report_use(run)


def _in_its_precision(run: "Run", values: Mapping[str, Any]) -> "Run":
    """Return the run with the precision of the run that it resumes, unless `values` set `train.bf16`.

    The choice of a recipe depends on the device, which may be another one now.
    """
    from unrolled.cli import run_config
    from unrolled.folders import RUN_FILE

    if "bf16" in (values.get("train") or {}) or not (run.run_dir / RUN_FILE).exists():
        return run
    saved = run_config.read_saved(run.run_dir).get("train") or {}
    return replace(run, train=replace(run.train, bf16=saved.get("bf16", run.train.bf16)))


def _report_warm_up(steps: int, run: "Run") -> None:
    """Say so if a run ends before the learning rate has reached its highest value."""
    if steps < (rising := run.train.warmup_steps):
        typer.echo(
            f"the learning rate reaches only {steps / rising:.0%} of train.lr: it rises for "
            f"train.warmup_steps={rising} steps, and the run has {steps}",
            err=True,
        )


def _report_loss(result: "TrainResult", run: "Run") -> None:
    """Print the best loss of a training."""
    import math

    from unrolled.cli import run_config

    vocabulary, task = run.dataset.vocabulary, run.dataset.task
    if result.best_val is not None:
        bits = f", {result.best_val / math.log(2):.3f} bits/level" if vocabulary.kind == "image" else ""
        unit = run_config.unit(task, run.kind)
        typer.echo(f"best validation loss {result.best_val:.3f} {unit}{bits}", err=True)


def _report_use(run: "Run") -> None:
    """Print the command that uses the model."""
    import shlex

    vocabulary, task = run.dataset.vocabulary, run.dataset.task
    folder = shlex.quote(str(run.run_dir))
    if task == "tokens":
        prompt = ' --prompt "1 2 3"' if vocabulary.kind == "ids" else ""
        typer.echo(f"generate with it: unrolled generate {folder}{prompt}", err=True)
    elif task == "translation":
        typer.echo(f'translate with it: unrolled translate {folder} "..."', err=True)
    elif task == "transcription":
        typer.echo(f"transcribe with it: unrolled transcribe {folder} sound.wav", err=True)
    else:
        typer.echo(f"use it: unrolled.models.load({str(run.run_dir)!r})", err=True)


def _print(f: "Forecast", run: "Run", device: "torch.device") -> None:
    """Print the results of a dry run, one line per quantity."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from unrolled.bench.units import brief_time, duration, size

    memory = {"weights": f.weight_bytes, "gradients": f.gradient_bytes, "optimiser": f.optimizer_bytes}
    memory |= {"states": f.carried_bytes} if f.carried_bytes else {}
    lines = {
        "model": f"{run.kind.model_name}, {f.parameters:,} parameters",
        "memory": " + ".join(f"{size(x)} {name}" for name, x in memory.items()),
    }
    if f.taken is not None:
        lines["activations"] = f"{size(f.taken.activation_bytes)} at most, gradients of weights not counted"
    if f.measured and f.peak_bytes is not None:
        holder = "the whole process" if device.type == "cpu" else "torch on the GPU"
        lines["peak"] = f"{size(f.peak_bytes)}, {holder} in {f.measured} steps"
    if f.taken is not None and f.taken.kept_bytes:
        lines["segments"] = f"{size(f.taken.kept_bytes)} of states between them, in a temporary file"
    if f.processes > 1:
        lines["processes"] = f"{f.processes}; memory is that of the first"
    if f.processes > 1 and f.taken is not None:
        lines["processes"] += f", which sends {size(f.taken.sent_bytes)} in a step"
    if f.measured:
        count = f"{f.steps - f.step:,} to go, {f.step:,} done," if f.step else f"{f.steps:,}"
        examples = run.train.batch_size * run.train.accumulate
        unit = "tokens" if run.dataset.task in ("tokens", "translation") else "targets"
        speed = f"{brief_time(f.step_seconds)} each, {f.tokens / f.step_seconds:,.0f} {unit}/s"
        lines["steps"] = f"{count} of {examples:,} examples, {f.tokens:,.0f} {unit}: {speed}"
        if f.mfu is not None:
            lines["MFU"] = f"{f.mfu:.0%} of the processor's speed in linear layers"
        lines["evaluations"] = f"{f.evaluations:,} of {brief_time(f.evaluation_seconds)}"
        lines["time"] = duration(f.seconds)
    else:
        lines["steps"] = f"{f.steps:,}, all done"
    lines["folder"] = f"{run.run_dir}, where nothing was written"
    table = Table.grid(padding=(0, 2))
    for name, line in lines.items():
        table.add_row(name, Text(line))
    Console().print(table)
