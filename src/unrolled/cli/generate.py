"""`unrolled generate`."""

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from unrolled.cli._options import DataDir, Device, Force, Weights, refuse, takes_sampling
from unrolled.cli._output import check_picture

if TYPE_CHECKING:
    from torch import Tensor

    from unrolled.data import Vocabulary

Engine = Literal["torch", "onnx"]
DEFAULT_TOKENS = 200
DEFAULT_IMAGES = 16
DEFAULT_COMPLETIONS = 4


@takes_sampling
def generate(
    run_dir: Annotated[
        Path | None,
        typer.Argument(help="Run folder of unrolled train, or folder of unrolled export or quantize."),
    ] = None,
    *,
    demo: Annotated[
        bool,
        typer.Option(
            "--demo", help="Use a model that comes with the library: of digits with --out, else of text."
        ),
    ] = False,
    prompt: Annotated[
        str | None, typer.Option(help="Text to continue; by default a line break, if the model knows it.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=0, help=f"Maximum number of new tokens; by default {DEFAULT_TOKENS}.")
    ] = None,
    sampling: dict[str, Any],
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling; random by default.")] = None,
    num_samples: Annotated[
        int | None, typer.Option(help=f"Number of samples; by default 1 text or {DEFAULT_IMAGES} images.")
    ] = None,
    complete: Annotated[
        int | None,
        typer.Option(
            metavar="ROWS",
            help="Complete images of the validation split from their first ROWS rows, each "
            f"{DEFAULT_COMPLETIONS} times, or --num-samples times.",
        ),
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop after this text; repeatable.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="PNG file for images; by default RUN_DIR/samples.png.")
    ] = None,
    device: Device = None,
    engine: Annotated[Engine, typer.Option(help="torch, or onnx for a folder of unrolled export.")] = "torch",
    graph: Annotated[
        str | None, typer.Option(help="With --engine onnx: plain (default), fused or int8.")
    ] = None,
    weights: Annotated[
        Weights | None, typer.Option(help="Round the weights of a decoder to this form; CPU only.")
    ] = None,
    data_dir: DataDir = None,
    force: Force = False,
) -> None:
    """Generate from the best weights of a run: text streamed to stdout, or a PNG sheet of images.

    \b
    With a model that comes with the library:
      unrolled generate --demo --prompt "ROMEO:"
      unrolled generate --demo --out digits.png

    \b
    Text:
      unrolled generate runs/book --prompt "Once upon" --tokens 50
      unrolled generate runs/book --num-samples 3 --min-p 0.1 --stop "."
      unrolled generate runs/book --weights int8

    \b
    Images:
      unrolled generate runs/digits --num-samples 100 --out digits.png
      unrolled generate runs/digits --complete 4 --out completed.png

    \b
    An exported model in ONNX Runtime:
      unrolled generate exported --engine onnx --prompt "Once upon"

    A model of plain ids, such as one trained on the copy task, reads and writes ids separated by spaces.
    """
    from unrolled import generation
    from unrolled.cli import _sheets, run_config
    from unrolled.data import Vocabulary

    folder = _folder(run_dir, demo, out)
    vocabulary = Vocabulary.load(folder)
    if engine == "onnx":
        refuse({"--weights": weights}, "--engine torch: an exported model has the weights of its graphs")
        model = _load_graph(folder, graph, device)
        sampling = model.manifest.sampling | sampling
    else:
        if graph is not None:
            raise ValueError(f"--graph is {graph}, but requires --engine onnx")
        model = _load_run(folder, device, weights)
    vocabulary.check(model.config.vocab_size)
    draw = partial(generation.generate, model, seed=seed, **sampling)
    if vocabulary.shape is None:
        for_images = {"--out": out, "--complete": complete, "--data-dir": data_dir, "--force": force or None}
        refuse(for_images, f"images, but {folder} was not trained on images")
        if prompt is None and vocabulary.is_text:
            known = vocabulary.characters
            prompt = "\n" if known is None or "\n" in known else known[0]
        if not prompt:
            given = "missing" if prompt is None else "empty"
            raise ValueError(f"--prompt is {given}, but must have a token: this model has no start symbol")
        _check_utf8("--prompt", prompt)
        ids = vocabulary.encode(prompt)
        _write(vocabulary, draw, prompt, ids, _room(model, ids, tokens), num_samples, stop or [])
    else:
        texts = {"--prompt": prompt, "--tokens": tokens, "--stop": stop or None}
        refuse(texts, f"text, but {folder} was trained on images")
        sheet = out or folder / "samples.png"
        check_picture(sheet, "generate", force)
        if complete is None:
            refuse({"--data-dir": data_dir}, "--complete")
            count = DEFAULT_IMAGES if num_samples is None else num_samples
            images, told = _sheets.drawn(draw, vocabulary.shape, count), f"{count} images"
        else:
            run: Any = run_config.reopen(folder, run_config.read_saved(folder, data_dir))
            count = DEFAULT_COMPLETIONS if num_samples is None else num_samples
            originals = run.dataset.images("val")[: _sheets.COMPLETED]
            images = _sheets.completed(draw, originals, complete, count)
            told = f"{len(originals)} images, each completed {count} times,"
        _sheets.write(images, model.config.vocab_size, sheet)
        typer.echo(f"{told} in {sheet}", err=True)


def _check_utf8(option: str, text: str) -> None:
    """Refuse a text for which the shell passed on bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{option} is not valid UTF-8") from None


def _folder(run_dir: Path | None, demo: bool, out: Path | None) -> Path:
    """Return the folder of the model: that of a run, or one that comes with the library."""
    from unrolled import demo_models

    if demo:
        if run_dir is not None:
            raise ValueError(f"RUN_DIR is {run_dir}, but must be left out with --demo")
        return demo_models.path("text" if out is None else "digits")
    if run_dir is None:
        raise ValueError(
            "RUN_DIR is missing: name the folder of a model, or use the library's own with --demo"
        )
    return run_dir


def _load_graph(folder: Path, graph: str | None, device: str | None) -> Any:
    """Load an exported model."""
    from unrolled.interop import onnx

    if device not in (None, "cpu"):
        raise ValueError(f"--device is {device}, but --engine onnx runs on the CPU")
    return onnx.load(folder, graph or "plain")


def _load_run(folder: Path, device: str | None, weights: Weights | None) -> Any:
    """Load the model of a folder: as a plan for packed weights or `weights`, else as a module on a device.

    If the kernels that a plan needs are missing, packed weights are unpacked into a module.
    """
    from unrolled.cli._device import choose, require_cpu
    from unrolled.cli._models import is_exported, load_for, packed_as
    from unrolled.decode import load, plan
    from unrolled.ops import native

    if (packed := packed_as(folder, weights)) is not None:
        require_cpu(device, packed)
        return load(folder) if native.available() else load_for("tokens", folder)
    if is_exported(folder):
        raise ValueError(
            f"{folder} is a folder of unrolled export: use --engine onnx, or unrolled transcribe for speech"
        )
    if weights is None:
        return load_for("tokens", folder).to(choose(device))
    require_cpu(device, weights)
    return plan(load_for("tokens", folder), weights)


def _room(model: Any, prompt: list[int], tokens: int | None) -> int:
    """Return the number of tokens to generate; reject more than the model has positions for."""
    from torch import nn

    from unrolled.decode import Plan
    from unrolled.models.limits import n_positions

    if isinstance(model, Plan):
        positions = model.n_positions
    else:
        positions = n_positions(model) if isinstance(model, nn.Module) else model.config.n_positions
    if positions is None:
        return DEFAULT_TOKENS if tokens is None else tokens
    read = len(prompt) + int(model.config.start_token)
    room = positions - read + 1  # the last token is generated, but not read
    learned = model.config.n_positions is not None
    hint = "; model.positions=rotary, sinusoidal and none set no limit" if learned else ""
    if room < 1:
        raise ValueError(
            f"--prompt has {len(prompt)} tokens, too many for the {positions} positions of the model{hint}"
        )
    if tokens is None:
        return min(DEFAULT_TOKENS, room)
    if tokens > room:
        raise ValueError(
            f"--tokens {tokens} is too many: the model has {positions} positions, which leave {room} after "
            f"this prompt{hint}"
        )
    return tokens


def _write(
    vocabulary: "Vocabulary",
    draw: "partial[list[Tensor]]",
    prompt: str,
    ids: list[int],
    tokens: int,
    num_samples: int | None,
    stop: list[str],
) -> None:
    """Print each sample after its prompt: a single one as it is generated, several with separators."""
    for text in stop:
        if not text:
            raise ValueError("--stop is empty, but must be a text")
        _check_utf8("--stop", text)
    if vocabulary.kind == "tokenizer":  # a stop text may begin and end within tokens
        stops, texts = [] if vocabulary.end is None else [[vocabulary.end]], stop
    else:
        stops, texts = [vocabulary.encode(text) for text in stop], []
    draw([ids], 0, stop=stops)  # rejects invalid options before anything is printed
    if num_samples in (None, 1):
        sample = _Sample(vocabulary, ids, texts)
        typer.echo(prompt, nl=False)
        draw([ids], tokens, stop=stops, on_token=lambda row, token: sample.add(token, echo=True))
        typer.echo()
        return
    samples: dict[int, _Sample] = defaultdict(lambda: _Sample(vocabulary, ids, texts))
    rows = draw(
        [ids],
        tokens,
        stop=stops,
        num_samples=num_samples,
        on_token=lambda row, token: samples[row].add(token),
    )
    for row in range(len(rows)):
        typer.echo(("---\n" if row else "") + prompt + samples[row].text)


class _Sample:
    """The text of a sample after a prompt, up to the end of a stop text."""

    def __init__(self, vocabulary: "Vocabulary", prompt: list[int], stops: list[str]) -> None:
        self._read, self._stops, self.text = vocabulary.reader(prompt), stops, ""

    def add(self, token: int, *, echo: bool = False) -> bool:
        """Add a token; return False once the text contains a stop text."""
        known, self.text = len(self.text), self.text + self._read(token)
        ends = [self.text.find(stop) + len(stop) for stop in self._stops if stop in self.text]
        self.text = self.text[: min(ends, default=None)]
        if echo:
            typer.echo(self.text[known:], nl=False)
        return not ends
