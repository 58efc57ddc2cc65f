"""`unrolled export`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unrolled.cli._options import Force, Runtime, takes_sampling

if TYPE_CHECKING:
    from unrolled.data import Vocabulary


@takes_sampling
def export(
    run_dir: Annotated[
        list[Path],
        typer.Argument(help="Folder of unrolled train or unrolled quantize; several with --web."),
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    *,
    opset: Annotated[int, typer.Option(help="ONNX opset, 20 to 25.")] = 20,
    int8: Annotated[bool, typer.Option("--int8", help="Also write a graph with 8-bit matrices.")] = False,
    fused: Annotated[
        bool,
        typer.Option("--fused", help="Also write a graph with ONNX Runtime's linear attention operator."),
    ] = False,
    aot: Annotated[
        bool, typer.Option("--aot", help="Also compile a generation step for this machine, with AOTInductor.")
    ] = False,
    web: Annotated[bool, typer.Option("--web", help="Write a web page that runs the models.")] = False,
    webgpu: Annotated[bool, typer.Option("--webgpu", help="With --web: use WebGPU if available.")] = False,
    runtime: Runtime = None,
    sampling: dict[str, Any],
    force: Force = False,
) -> None:
    """Export the best weights of a run as ONNX graphs, with vocabulary and manifest.

    \b
      unrolled export runs/book exported --int8
      unrolled generate exported --engine onnx --prompt "Once upon"
      unrolled export runs/digits runs/digits-softmax page --web

    A graph maps tokens and a state to logits and the next state, for any batch size. It reads any number of
    tokens per call, or one with some mechanisms (see "length" in the manifest). The sampling options, from
    --temperature on, become the defaults of the exported model. The graph of a model of speech maps samples
    of sound to log-probabilities of symbols. Without --web, models of speech take only the options --opset
    and --force.
    """
    from unrolled.cli._page import write_page

    if web:
        for flag, on in {"--int8": int8, "--fused": fused, "--aot": aot}.items():
            if on:
                raise ValueError(f"{flag} cannot be used with --web, whose page runs the plain graph")
        write_page(run_dir, out, force=force, opset=opset, runtime=runtime, webgpu=webgpu, sampling=sampling)
        return
    if webgpu or runtime is not None:
        raise ValueError("--webgpu and --runtime require --web")
    if len(run_dir) > 1:
        raise ValueError(f"{len(run_dir)} runs were given, but must be one without --web")
    from unrolled.data import Vocabulary

    run, vocabulary = run_dir[0], Vocabulary.load(run_dir[0])
    if vocabulary.kind == "speech":
        options = {"--int8": int8, "--fused": fused, "--aot": aot, "--temperature and the like": sampling}
        for option, given in options.items():
            if given:
                raise ValueError(f"{option} cannot be used with models of speech")
        _export_speech(run, vocabulary, out, force, opset)
        return
    _export(run, vocabulary, out, force, aot, opset=opset, fused=fused, int8=int8, sampling=sampling)


def _export_speech(run: Path, vocabulary: "Vocabulary", out: Path, force: bool, opset: int) -> None:
    """Write the folder of a run of speech."""
    from unrolled.cli._models import load_for
    from unrolled.folders import check_folder, writing_folder
    from unrolled.interop import onnx

    model = load_for("transcription", run).float()
    check_folder(out, f"an export of {run}", lambda: onnx.is_export_of(out, model), force=force)
    with writing_folder(out, onnx.listed_files(out)) as folder:
        manifest = onnx.export_transcriber(model, folder, vocabulary=vocabulary, opset=opset)
    for graph in manifest.graphs.values():
        typer.echo(f"{out / graph['file']}: {graph['bytes']:,} bytes")


def _export(run: Path, vocabulary: "Vocabulary", out: Path, force: bool, aot: bool, **options: Any) -> None:
    """Write the folder of one run; the options are those of `interop.onnx.export`."""
    from unrolled.cli._models import load_for
    from unrolled.data import VOCABULARY_FILE
    from unrolled.folders import check_folder, writing_folder
    from unrolled.interop import onnx

    model = load_for("tokens", run)
    vocabulary.check(model.config.vocab_size)
    model = model.float()
    check_folder(out, f"an export of {run}", lambda: onnx.is_export_of(out, model), force=force)
    with writing_folder(out, onnx.listed_files(out)) as folder:
        manifest = onnx.export(model, folder, vocabulary=run / VOCABULARY_FILE, **options)
        written: dict[str, int] = {graph["file"]: graph["bytes"] for graph in manifest.graphs.values()}
        if aot:
            from unrolled.interop.aot import PACKAGE, export_aot

            typer.echo("compiling, which may take a minute", err=True)
            written[PACKAGE] = export_aot(model, folder).files[PACKAGE]["bytes"]
    for file, size in written.items():
        typer.echo(f"{out / file}: {size:,} bytes")
