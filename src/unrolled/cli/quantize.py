"""`unrolled quantize`."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unrolled.cli._options import DataDir, Force, Weights

if TYPE_CHECKING:
    from torch import Tensor

    from unrolled.cli.run_config import Run
    from unrolled.decode import Plan
    from unrolled.models import Decoder

SAMPLE = 16_384  # tokens that int4 rounding is fitted to


def quantize(
    run_dir: Annotated[Path, typer.Argument(help="Run folder of unrolled train.")],
    weights: Annotated[Weights, typer.Option(help="The form of the weights.")] = "int8",
    out: Annotated[Path | None, typer.Option(help="The folder to write; by default RUN_DIR-WEIGHTS.")] = None,
    data_dir: DataDir = None,
    force: Force = False,
) -> None:
    """Round the best weights of a run, and write them to a folder, packed for generation on a CPU.

    A weight of a matrix takes 32 bits (fp32), 16 (bf16), 8 (int8) or 4.5 (int4; 8 in the output
    layer and in matrices with fewer than 64 outputs). A weight of an embedding takes 16 bits, or 32 with
    fp32. Any other weight takes 32 bits. If the data of the run can be opened, the loss before and after
    rounding is measured on the whole validation split, and int4 rounds such that the model changes least on a
    sample of the training split.

    \b
    Examples:
      unrolled quantize runs/book
      unrolled generate runs/book-int8 --prompt "Once upon"
      unrolled quantize runs/book --weights int4 --out book4
    """
    from unrolled.cli._models import load_for
    from unrolled.decode import packed_form, plan
    from unrolled.folders import (
        PLAN_FILE,
        RUN_FILE,
        TEMPLATE_FILE,
        WEIGHTS_FILE,
        check_folder,
        writing_folder,
    )

    if packed_form(run_dir) is not None:
        raise ValueError(f"{run_dir} holds packed weights, in {PLAN_FILE}, but must hold {WEIGHTS_FILE}")
    model = load_for("tokens", run_dir)
    if out is None:
        named = run_dir if run_dir.name not in ("", "..") else run_dir.resolve()
        out = named.with_name(f"{named.name}-{weights}")
    if out.resolve() == run_dir.resolve():
        raise ValueError(f"{out} is the model's own folder, but must be another one")
    run = _opened(run_dir, data_dir)
    planned = plan(model, weights, sample=_sample(run) if weights == "int4" else None)
    check_folder(out, f"the same weights of {run_dir}", lambda: _same(out, planned), force=force)
    with writing_folder(out, [WEIGHTS_FILE]) as folder:  # a weights file there would be read instead
        planned.save(folder)
        for name in (RUN_FILE, TEMPLATE_FILE):
            if (run_dir / name).exists():
                shutil.copyfile(run_dir / name, folder / name)
    before, after = (
        (folder / name).stat().st_size for folder, name in ((run_dir, WEIGHTS_FILE), (out, PLAN_FILE))
    )
    typer.echo(
        f"{out}: {after:,} bytes with {weights} weights, {after / before:.0%} of the {before:,} before"
    )
    if run is not None:
        _compare(run, model.float().eval(), planned)


def _same(folder: Path, planned: "Plan") -> bool:
    """Return whether a folder holds this plan."""
    from unrolled.decode import load

    try:
        found = load(folder)
    except (ValueError, OSError):
        return False
    mine, its = planned.tensors(), found.tensors()
    return (
        (found.config, found.weights, found.documents) == (planned.config, planned.weights, planned.documents)
        and mine.keys() == its.keys()
        and all(its[name].equal(x) for name, x in mine.items())
    )


def _opened(source: Path, data_dir: Path | None) -> "Run | None":
    """Open the data of a run, or print why they cannot be opened."""
    from unrolled.cli import run_config

    try:
        run = run_config.reopen(source, run_config.read_saved(source, data_dir))
        next(iter(run.dataset.eval_batches(1)))
    except (ValueError, OSError, ImportError) as error:
        typer.echo(f"the loss was not measured: {error}", err=True)
        return None
    return run


def _sample(run: "Run | None") -> "Tensor | None":
    """Return tokens of the training split."""
    if run is None:
        return None
    import torch

    found: list[Tensor] = []
    while sum(x.numel() for x in found) < SAMPLE:
        batch = run.dataset.batch("train", step=len(found), batch_size=run.train.batch_size, seed=0)
        found.append(batch.inputs)
    return torch.cat(found)


def _compare(run: "Run", model: "Decoder", planned: "Plan") -> None:
    """Print the loss in fp32 and with the weights of a plan."""
    from dataclasses import replace

    from unrolled import training
    from unrolled.cli._planned import Planned

    length = next(iter(run.dataset.eval_batches(1))).inputs.shape[1]
    config = replace(run.train, bf16=False)
    readers: list[Any] = [model, Planned(model, planned)]
    scores = [training.evaluate_positions(each, run.dataset, config, [(0, length)])[0] for each in readers]
    before, after = (score.loss for score in scores)
    typer.echo(
        f"validation loss {before:.4f} nats/token in fp32, {after:.4f} in {planned.weights}: "
        f"{after - before:+z.4f}, over all {scores[0].targets:,} targets"
    )
