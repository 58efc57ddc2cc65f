"""Running the trials of an experiment, each in an ordinary run folder."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from unrolled import data, experiments, training
from unrolled.bench.machine import processor
from unrolled.bench.spectra import mean_mass
from unrolled.cli import run_config
from unrolled.cli._bleu import bleu
from unrolled.cli._error_rate import error_rate
from unrolled.cli._overlap import intersection_over_union
from unrolled.cli._scores import count_splits
from unrolled.contract import UnsupportedError
from unrolled.decode import load_model
from unrolled.experiments import SPECTRUM, Experiment, Figures, Results, Trial
from unrolled.files import read_object, write_file
from unrolled.ops.random_features import Projection
from unrolled.training.checkpoint import fingerprint

FIGURES = "figures.json"
"""The file in a run folder that holds the figures measured at the end of the run."""


def load(name: str) -> Experiment:
    """Read an experiment, by its name or from a file.

    Raises:
        ValueError: there is no such experiment, or its file is invalid.
    """
    path = experiments.path(name)
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist: name a .yaml file, or one of {', '.join(experiments.names())}"
        )
    return experiments.made_of(run_config.read(path, []), path)


def ended(
    experiment: Experiment, folder: Path, data_dir: Path | None = None, *, shipped: bool = False
) -> Results:
    """Collect the runs that have ended in a folder; if `shipped`, also those that come with the library.

    A run that comes with the library counts only if its settings and evaluations are still those of the
    experiment.

    Raises:
        ValueError: a run in the folder has other settings or evaluations, or its figures are damaged.
    """
    found: dict[Path, Figures] = {}
    results = Results(experiment, found)
    others = _shipped(experiment.name) if shipped else {}
    for contender in experiment.contenders:
        for _ in range(2):  # the other seeds are known only after the sweep
            for trial in results.trials(contender):
                other = others.get(trial.folder.as_posix())
                if trial.folder in found:
                    continue
                if _has_ended(folder, trial):
                    figures = _read(folder / trial.folder / FIGURES)
                    if "settings" in figures and not _fits(experiment, trial, figures):
                        run = run_config.resolve(_values(experiment, trial, folder, data_dir))
                        _check_same(experiment, run, figures)
                    found[trial.folder] = figures
                elif other is not None and _fits(experiment, trial, other):
                    found[trial.folder] = other
    return results


def _read(file: Path) -> Figures:
    """Read the figures of a run that has ended."""
    figures = read_object(file)
    if not {"loss", "evaluations", "curve", "batch"} <= figures.keys():
        raise ValueError(f"{file} is damaged: remove it, and repeat the command")
    return figures


def count(folder: Path) -> int:
    """Count the runs that have ended in the folder of an experiment, whatever their settings."""
    return len(list(folder.glob(f"*/*/{FIGURES}")))


def _shipped(name: str) -> dict[str, dict[str, Any]]:
    """Return the runs that come with the library; older ones have the processor of the last run."""
    found = experiments.obtained(name)
    if found is None:
        return {}
    return {place: {"processor": found["machine"]["processor"], **x} for place, x in found["runs"].items()}


def _fits(experiment: Experiment, trial: Trial, figures: Figures) -> bool:
    """Whether figures are of the settings and evaluations of a trial.

    Older results store only the names of their further evaluations, not the settings of these.
    """
    evaluate = run_config.plain(dict(experiment.evaluate))
    evaluated = (
        figures["evaluations"].keys() == evaluate.keys() and figures.get("evaluate", evaluate) == evaluate
    )
    return evaluated and bool(figures.get("settings") == run_config.plain(experiment.values(trial)))


def _values(experiment: Experiment, trial: Trial, folder: Path, data_dir: Path | None) -> dict[str, Any]:
    """Return the settings of a run, including its folder and, if it reads files, the data folder."""
    values = experiment.values(trial) | {"run_dir": str(folder / trial.folder)}
    if data_dir is not None and "data_dir" in data.options_of(values["data"]["name"]):
        values["data"] = values["data"] | {"data_dir": str(data_dir)}
    return values


def _check_same(
    experiment: Experiment, run: run_config.Run, figures: Figures, batch: str | None = None
) -> None:
    """Check that the run that ended in a folder has these settings, evaluations and, if given, first batch.

    Raises:
        ValueError: it differs.
    """
    known_by: dict[str, Any] = {"evaluate": run_config.plain(dict(experiment.evaluate))}
    known_by |= {} if batch is None else {"batch": batch}
    if differs := _difference(run, figures, known_by):
        raise ValueError(
            f"{run.run_dir} holds a run with another {differs} than {experiment.name} has now: remove it, or "
            "choose another folder with --out"
        )


def _check_all(experiment: Experiment, contenders: list[str], folder: Path, data_dir: Path | None) -> None:
    """Check the settings of contenders and of their evaluations, before any of them is trained.

    Raises:
        ValueError: as `run_config.check`, or there is no layer of the number of a spectrum.
    """
    for contender in contenders:
        values = _values(experiment, next(experiment.sweeps(contender)), folder, data_dir)
        settings = run_config.check(values)
        for name, changes in experiment.evaluate.items():
            others = dict(changes)
            layer = others.pop(SPECTRUM, None)
            run_config.check(experiments.merged(values, others))
            layers = settings.model.get("n_layers", getattr(settings.kind.config_type, "n_layers", None))
            if layer is not None and layers is not None and layer > layers:
                raise ValueError(f"{SPECTRUM} of {name} is {layer}, but {contender} has {layers} layers")


def _has_ended(folder: Path, trial: Trial) -> bool:
    return (folder / trial.folder / FIGURES).is_file()


def run(
    experiment: Experiment,
    folder: Path,
    contenders: list[str],
    data_dir: Path | None,
    device: torch.device,
    on_end: Callable[[Results], object],
    *,
    shipped: bool = False,
) -> Results:
    """Train the missing runs, contender by contender, and call `on_end` after each.

    `shipped` is as in `ended`.

    Raises:
        ValueError: a run in the folder has other settings or other data, or as `unrolled.training.train`.
        KeyboardInterrupt: on Ctrl-C; the same call continues from there.
    """
    training.keep_freed_memory()
    runs = dict(ended(experiment, folder, data_dir, shipped=shipped).runs)
    results = Results(experiment, runs)
    missing = [x for x in contenders if any(y.folder not in runs for y in results.trials(x))]
    _check_all(experiment, missing, folder, data_dir)
    for contender in contenders:
        for trial in _needed(experiment, results, contender):
            before = runs.get(trial.folder)
            if before is not None and not _has_ended(folder, trial):
                continue  # it comes with the library
            runs[trial.folder] = _measured(experiment, trial, folder, data_dir, device, before)
            if before is None:
                on_end(results)
    return results


def _needed(experiment: Experiment, results: Results, contender: str) -> Iterator[Trial]:
    """Yield the runs of a contender: the other seeds are known once those that are swept have ended."""
    swept = list(experiment.sweeps(contender))
    yield from swept
    yield from (x for x in results.seeds(contender) if x not in swept)


def _measured(
    experiment: Experiment,
    trial: Trial,
    folder: Path,
    data_dir: Path | None,
    device: torch.device,
    before: Figures | None,
) -> Figures:
    """Train and evaluate, unless that has been done with the same settings and data.

    A run that diverges has no measures, and the loss None.
    """
    run_dir, values = folder / trial.folder, _values(experiment, trial, folder, data_dir)
    run = run_config.resolve(values, device)
    first = run.dataset.batch("train", step=0, batch_size=run.train.batch_size, seed=run.train.seed)
    batch = fingerprint(first.inputs, first.targets)
    compared = {measure for expectation in experiment.expectations for measure in expectation.measures}
    if before is not None:
        _check_same(experiment, run, before, batch)
        if "accuracy" not in compared or before.get("accuracy") is not None or before["loss"] is None:
            return before
        if run.train.eval_batches is not None or run.dataset.task != "tokens":
            return before
        # The expectation was added after the run.
        found = {**before, "accuracy": _scores(load_model(run_dir).to(device).eval(), run)["accuracy"]}
        write_file(run_dir / FIGURES, f"{json.dumps(found, indent=1)}\n")
        return found
    model = run.new_model(device)
    _check_evaluations(experiment, run, values, model)
    try:
        result = training.train(
            model,
            run.dataset,
            run.train,
            run_dir,
            on_start=lambda resumed: run.save(),
            outdated=run_config.MODEL_FILES,
        )
    except FloatingPointError:
        none: dict[str, Any] = {
            "loss": None,
            "evaluations": {name: {} for name in experiment.evaluate},
            "batch": batch,
        }
        return _written(none, experiment, trial, run_dir, device)
    result.raise_if_interrupted()
    model = load_model(run_dir).to(device).eval()
    evaluations = {
        name: _evaluated(model, values, name, changes) for name, changes in experiment.evaluate.items()
    }
    figures = {
        **_scores(model, run, None if "accuracy" in compared else result.best_val),
        "seconds": result.seconds,
        "seconds_per_step": result.seconds / max(result.steps, 1),
        "parameters": sum(x.numel() for x in model.parameters()),
        "steps": result.steps,
        "evaluations": evaluations,
        "batch": batch,
    }
    return _written(figures, experiment, trial, run_dir, device)


def _check_evaluations(
    experiment: Experiment, run: run_config.Run, values: Mapping[str, Any], model: Any
) -> None:
    """Check before the training that the model of a run can be evaluated as the experiment says.

    Raises:
        ValueError: an evaluation has data that the model cannot read, or weights of other shapes, or measures
            the spectrum of a layer that computes no attention weights.
    """
    for name, changes in experiment.evaluate.items():
        try:
            examined, other, layer = _prepared(model, values, name, changes)
            if examined is model:
                run_config.check_fit(run.model, other.dataset, run.kind)
            if layer is not None:
                mean_mass(examined.eval(), other.dataset, layer, examples=1)
        except (ValueError, UnsupportedError) as error:
            raise ValueError(f"{run.run_dir} cannot be evaluated as {name!r}: {error}") from error
    model.train()


def _written(
    figures: Mapping[str, Any], experiment: Experiment, trial: Trial, run_dir: Path, device: torch.device
) -> Figures:
    """Write figures, and what they were measured of and on."""
    figures = {
        **figures,
        "curve": _curve(run_dir),
        "date": time.strftime("%Y-%m-%d %H:%M:%S%z"),
        "device": device.type,
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "evaluate": run_config.plain(dict(experiment.evaluate)),
        "settings": run_config.plain(experiment.values(trial)),
    }
    write_file(run_dir / FIGURES, f"{json.dumps(figures, indent=1)}\n")
    return figures


def _difference(run: run_config.Run, before: Figures, known_by: Mapping[str, Any]) -> str | None:
    """Name the first difference between the run that ended in a folder and the run to be measured there.

    A setting that did not exist yet when the run was saved counts as its default.
    """
    saved = run_config.read_saved(run.run_dir)
    if "data_dir" in run.data:  # the same files may lie elsewhere
        saved["data"]["data_dir"] = run.data["data_dir"]
    then, now = run_config.resolve(saved).settings(), run.settings()
    for section in ("data", "model", "train"):
        for key in {**now[section], **then[section]}:
            if then[section].get(key) != now[section].get(key):
                return f"{section}.{key}"
    return next((f"first {x}" if x == "batch" else x for x in known_by if before[x] != known_by[x]), None)


def _evaluated(
    model: Any, values: Mapping[str, Any], name: str, changes: Mapping[str, Any]
) -> dict[str, float | None]:
    """Evaluate a trained model with other settings of the data or the model, or measure one of its layers."""
    model, run, layer = _prepared(model, values, name, changes)
    return _scores(model, run) if layer is None else {"spectral_mass": mean_mass(model, run.dataset, layer)}


def _prepared(
    model: Any, values: Mapping[str, Any], name: str, changes: Mapping[str, Any]
) -> tuple[Any, run_config.Run, int | None]:
    """Return the model and the run of an evaluation, and the layer whose spectrum it measures, if any.

    Raises:
        ValueError: as `run_config.resolve`, or the weights of `model` do not fit other settings of it.
    """
    settings = dict(changes)
    layer = settings.pop(SPECTRUM, None)
    run = run_config.resolve(experiments.merged(values, settings))
    if any(key.startswith("model.") for key in settings):
        model = _refilled(run, model, name)
    return model, run, layer


def _refilled(run: run_config.Run, trained: Any, name: str) -> Any:
    """Make the model of a run with the weights of a trained model.

    Random matrices that are never trained, such as the rotations of Reformer, are the run's own where the
    trained model has none, or has them in another shape.

    Raises:
        ValueError: the weights do not fit.
    """
    model = run.new_model(next(trained.parameters()).device)
    weights = trained.state_dict()
    for place, part in model.named_modules():
        rows = weights.get(f"{place}.weight")
        if isinstance(part, Projection) and (rows is None or rows.shape != part.weight.shape):
            weights |= part.state_dict(prefix=f"{place}.")
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        first = " ".join(str(error).split("\n")[1:2]).strip()
        raise ValueError(f"the trained weights do not fit the evaluation {name!r}: {first}") from error
    return model.eval()


def _scores(model: Any, run: run_config.Run, loss: float | None = None) -> dict[str, float | None]:
    """Measure the loss of a model, unless it is given, and the other `MEASURES` that its task has.

    All are measured on the validation split, except BLEU, which is measured on a test split, and the
    accuracy of answers, labels and bits, which is that of the test split if there is one. The accuracy of
    tokens is measured only together with the loss, in one pass over the data. If `train.eval_batches` limits
    the evaluation, only the loss and what follows from it are measured.
    """
    config, task = run.train, run.dataset.task
    accuracy = errors = overlap = translated = None
    if loss is None and config.eval_batches is None and task == "tokens":
        length = next(iter(run.dataset.eval_batches(1))).inputs.shape[1]
        [score] = training.evaluate_positions(model, run.dataset, config, [(0, length)])
        loss, accuracy = score.loss, score.accuracy
    else:
        loss = training.evaluate(model, run.dataset, config) if loss is None else loss
        if config.eval_batches is None:
            if counts := count_splits(model, run.dataset, config.batch_size):
                right, count = counts.get("test", counts["validation"])
                accuracy = right / count
            if task == "transcription":
                errors = error_rate(model, run.dataset, config.batch_size, 1).rate
            elif task == "bits":
                overlap = intersection_over_union(model, run.dataset, config.batch_size)
            elif task == "translation":
                translated = bleu(model, run.dataset)
    bits = loss / math.log(2) if task in ("tokens", "bits") else None
    words = run.dataset.vocabulary.kind == "tokenizer"
    perplexity = math.exp(loss) if words and task == "tokens" else None
    return {
        "loss": loss,
        "bits": bits,
        "perplexity": perplexity,
        "accuracy": accuracy,
        "error_rate": errors,
        "iou": overlap,
        "bleu": translated,
    }


def _curve(run_dir: Path) -> dict[str, list[float]]:
    """Return the steps and the validation losses of a run."""
    lines = [line for line in training.read_log(run_dir / "log.jsonl") if line["event"] == "eval"]
    return {"step": [line["step"] for line in lines], "loss": [line["loss"] for line in lines]}
