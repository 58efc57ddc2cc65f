"""`unrolled info`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

MANY = 1024  # tokens, for models without a maximum length


def info(
    run_dir: Annotated[
        Path | None,
        typer.Argument(
            help="Run folder, or output of unrolled quantize, to describe instead of the installation."
        ),
    ] = None,
) -> None:
    """Describe this installation, or the size, best loss, state and settings of a run.

    \b
    Examples:
      unrolled info
      unrolled info runs/digits
    """
    table = Table.grid(padding=(0, 2))
    for name, value in (_installation() if run_dir is None else _run(run_dir)).items():
        table.add_row(name, Text(str(value)))
    Console().print(table)


def _installation() -> dict[str, Any]:
    import platform

    import torch

    import unrolled
    from unrolled.data import data_folder

    cuda = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "unrolled": unrolled.__version__,
        "torch": torch.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "devices": ", ".join(["cpu", *(f"cuda:{index} ({name})" for index, name in enumerate(cuda))]),
        "threads": torch.get_num_threads(),
        "kernels": _kernels(),
        "data files": data_folder(),
    }


def _kernels() -> str:
    from unrolled.ops import native

    if native.available():
        return f"C++, {native.instruction_set()} (of {', '.join(native.instruction_sets())})"
    return f"plain PyTorch: {native.missing()}"


def _run(run_dir: Path) -> dict[str, Any]:
    import torch

    from unrolled.cli.run_config import JOBS, unit
    from unrolled.decode import load_model
    from unrolled.folders import RUN_FILE
    from unrolled.models.limits import n_positions
    from unrolled.ops.state import nbytes
    from unrolled.training import read_log

    model: Any = load_model(run_dir).eval()
    units = [unit(task, type(model)) for task, job in JOBS.items() if model.model_name in job.kinds]
    losses = [line["best"] for line in read_log(run_dir / "log.jsonl") if line["event"] == "eval"]
    described: dict[str, Any] = {
        "parameters": f"{sum(x.numel() for x in model.parameters()):,}",
        "best loss": f"{losses[-1]:.4f} {units[0] if len(units) == 1 else ''}".rstrip()
        if losses
        else "unknown",
    }
    if model.model_name in JOBS["tokens"].kinds:
        with torch.inference_mode():
            for tokens in (1, n_positions(model) or model.config.max_length or MANY):
                ids = torch.zeros(1, tokens, dtype=torch.long)
                _, state = model.prefill(ids, model.init_state(1))
                described[f"state after {tokens}"] = f"{nbytes(state):,} bytes per sequence"
    settings = run_dir / RUN_FILE
    if settings.exists():
        described["settings"] = settings.read_text(encoding="utf-8").rstrip()
    return described
