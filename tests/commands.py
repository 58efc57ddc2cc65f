"""Run commands of the library in this process, and read the folders that they write."""

from pathlib import Path

from typer.testing import CliRunner, Result

from unrolled.cli import app


def run(*arguments: object, **options: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


def works(*arguments: object) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def error(*arguments: object) -> str:
    """Return the one sentence of a command that must fail."""
    result = run(*arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    assert not result.stdout
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert lines[0] == result.stderr.splitlines()[-1]
    return lines[0].removeprefix("error: ")


def filled(words: list[str], made: Path, out: Path) -> list[str]:
    """Put the folders into a command that names them {made} and {out}."""
    return [word.format(made=made, out=out) for word in words]


def everything(folder: Path) -> dict[str, bytes | None]:
    """Read a folder: the bytes of each file, None for a folder."""
    return {str(x.relative_to(folder)): x.read_bytes() if x.is_file() else None for x in folder.rglob("*")}
