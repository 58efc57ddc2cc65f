"""The command line. Each command is a module here, and imports torch only when it runs."""

import inspect
import os
import signal
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from unrolled.cli.attend import attend
from unrolled.cli.bench import bench
from unrolled.cli.compare import compare
from unrolled.cli.convert import convert
from unrolled.cli.demo import demo
from unrolled.cli.evaluate import evaluate
from unrolled.cli.export import export
from unrolled.cli.generate import generate
from unrolled.cli.info import info
from unrolled.cli.linearize import linearize
from unrolled.cli.list import mechanisms
from unrolled.cli.quantize import quantize
from unrolled.cli.reproduce import reproduce
from unrolled.cli.schema import schema
from unrolled.cli.serve import serve
from unrolled.cli.table import table
from unrolled.cli.tokenize import tokenize
from unrolled.cli.train import train
from unrolled.cli.transcribe import transcribe
from unrolled.cli.translate import translate


class _Commands(TyperGroup):
    """Turns errors into one sentence on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            number = getattr(error, "signal", signal.SIGINT)  # a signal ended the run
            by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
            if os.environ.get("RANK", "0") == "0":  # only the first process of torchrun prints
                typer.echo(f"interrupted{by}", err=True)
            raise typer.Exit(128 + number) from None
        except (typer.Exit, typer.Abort):
            raise  # normal exits of typer, such as --help
        except BrokenPipeError:
            raise  # the reader closed the pipe, as in `| head`; typer exits quietly
        except (ValueError, ArithmeticError, RuntimeError, MemoryError, OSError, ImportError) as error:
            if ctx.params["debug"]:
                raise
            if not getattr(error, "said_elsewhere", False):
                typer.secho(f"error: {_sentence(error)}", fg=typer.colors.RED, err=True)
            raise typer.Exit(2) from error


def _help(command: Callable[..., None]) -> str:
    """Return a docstring for --help: a paragraph is one line, because typer keeps line breaks.

    A paragraph that begins with a line of `\\b` keeps its lines.
    """
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(
        p.replace("\b\n", "\b") if p.startswith("\b") else p.replace("\n", " ") for p in paragraphs
    )


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False
)
# In the order of --help.
for command in (train, tokenize, generate, serve, convert, quantize, translate, transcribe, evaluate, schema):
    app.command(help=_help(command))(command)
app.command("list", help=_help(mechanisms))(mechanisms)
for command in (info, demo, bench, compare, linearize, attend, table, export, reproduce):
    app.command(help=_help(command))(command)


def options(
    debug: Annotated[
        bool, typer.Option("--debug", envvar="UNROLLED_DEBUG", help="Show the traceback of an error.")
    ] = False,
) -> None:
    """Attention you train as a transformer and run as an RNN.

    \b
    See it at work in a few minutes:
      unrolled demo

    \b
    Train on the digits that come with scikit-learn, then generate some:
      unrolled train data.name=digits run_dir=runs/digits
      unrolled generate runs/digits --out digits.png

    \b
    Train on your own text, then continue it:
      unrolled train data.name=text data.path=book.txt run_dir=runs/book
      unrolled generate runs/book --prompt "Once upon" --tokens 50
      unrolled serve runs/book
    """


app.callback(help=_help(options))(options)


def main() -> None:
    """Run the command line."""
    app()


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if "can't allocate memory: you tried to allocate" in str(error):  # torch's words
        return "the memory is full: make the model, the batch or the sequences smaller"
    return " ".join(str(error).split()) or type(error).__name__
