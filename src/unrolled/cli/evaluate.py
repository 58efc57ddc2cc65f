"""`unrolled evaluate`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from unrolled.cli._bleu import SEARCH, TEST_PART, bleu_reporter
from unrolled.cli._options import DataDir, Device, Force, Weights, refuse


def evaluate(
    run_dir: Annotated[
        Path, typer.Argument(help="Run folder of unrolled train, or folder of unrolled quantize.")
    ],
    part: Annotated[
        str | None,
        typer.Option("--split", help=f"For translation: the split to translate; by default {TEST_PART}."),
    ] = None,
    beam_size: Annotated[
        int | None,
        typer.Option(min=1, help=f"Beam size; 1 is greedy; by default {SEARCH['beam_size']}, for speech 1."),
    ] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help=f"Higher favours longer output; default {SEARCH['length_penalty']}.")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="For tokens: evaluate in windows of this length, by default that of training."),
    ] = None,
    positions: Annotated[
        bool,
        typer.Option("--positions", help="For tokens: also for ranges of positions, with standard errors."),
    ] = False,
    weights: Annotated[
        Weights | None, typer.Option(help="For decoders of tokens: round the weights to this form first.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File for the translations, or for other tasks the figures as JSON.")
    ] = None,
    data_dir: DataDir = None,
    device: Device = None,
    force: Force = False,
) -> None:
    """Evaluate the best weights of a run on the whole validation split: loss, and accuracy, BLEU or errors.

    The loss is that of training: nats per token, label, answer or bit, the mean squared error, or the ranking
    loss per target. For tokens, labels, answers and bits, the accuracy is reported too; for translations, the
    BLEU of sacrebleu with its signature; for speech, the error rate of phones or words. The whole split is
    evaluated, whatever train.eval_batches is.

    --positions shows how a model uses its context, and with a larger --length, whether it works beyond the
    length that it was trained on. Standard errors are those of windows, because the tokens of a window depend
    on each other.

    --weights shows what rounding the weights costs: the loss is that of the rounded weights.

    \b
    Examples:
      unrolled evaluate runs/digits
      unrolled evaluate runs/book --positions --length 1024 --out book.json
      unrolled evaluate runs/book --weights int8
      unrolled evaluate runs/speech --beam-size 8
      unrolled evaluate runs/multi30k --split test_2017_flickr --out de.txt
    """
    import json
    from dataclasses import replace

    from unrolled.cli import _scores, run_config
    from unrolled.cli._device import choose, require_cpu
    from unrolled.cli._models import packed_as
    from unrolled.cli._output import is_report
    from unrolled.cli._planned import Planned
    from unrolled.decode import load_model, plan
    from unrolled.files import write_file
    from unrolled.folders import check_file

    settings = run_config.read_saved(run_dir, data_dir)
    packed_as(run_dir, weights)
    model: Any = load_model(run_dir)
    run = run_config.reopen(run_dir, settings)
    task = run.dataset.task
    if task != "tokens":
        for_tokens = {"--length": length, "--positions": positions or None, "--weights": weights}
        refuse(for_tokens, f"predicting tokens, but the task of {run_dir} is {task!r}")
    if weights is None:
        model = model.to(choose(device)).eval()
    else:
        require_cpu(device, weights)
        model = Planned(model, plan(model, weights))
    if length is not None:
        run = replace(run, dataset=_scores.in_windows(run.dataset, model.config, length))
    if task == "translation":
        search = {"beam_size": beam_size, "length_penalty": length_penalty}
        report_bleu = bleu_reporter(model, run.dataset, part or TEST_PART, search, out, force)
        _scores.measure(model, run)
        report_bleu()
        return
    for_translation = {"--split": part, "--length-penalty": length_penalty}
    refuse(for_translation, f"translations, but the task of {run_dir} is {task!r}")
    if task != "transcription":
        refuse({"--beam-size": beam_size}, f"translations and speech, but the task of {run_dir} is {task!r}")
    if out is not None:
        check_file(out, lambda: is_report(out, _scores.KEYS), force=force)
    figures = _scores.measure(model, run, positions, beam_size or 1) | (
        {} if weights is None else {"weights": weights}
    )
    if out is not None:
        write_file(out, f"{json.dumps(figures, indent=1)}\n")
        typer.echo(f"written: {out}")
