"""`unrolled schema`."""

from pathlib import Path
from typing import Annotated

import typer

from unrolled.cli._options import Force
from unrolled.cli._output import is_report


def schema(
    out: Annotated[
        Path | None, typer.Option(help="File to write the schema to; by default, it is printed.")
    ] = None,
    force: Force = False,
) -> None:
    """Print the JSON Schema of a run's YAML file, which editors use to complete and check the file.

    \b
    Examples:
      unrolled schema --out run.schema.json

    In Visual Studio Code with the YAML extension, and in any editor with yaml-language-server, the first line
    of the YAML file names the schema:

    \b
      # yaml-language-server: $schema=run.schema.json
    """
    import json

    from unrolled.cli._run_schema import run_schema
    from unrolled.files import write_file
    from unrolled.folders import check_file

    if out is None and force:
        raise ValueError("--force is for --out, but no file is named")
    if out is not None:
        check_file(out, lambda: is_report(out, {"$schema", "$defs"}), force=force)
    text = json.dumps(run_schema(), indent=2) + "\n"
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_file(out, text)
