"""The command `lazyio`."""

from __future__ import annotations

import io
import json
import signal
import sys
import warnings
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from lazyio.bench.command import bench
from lazyio.bench_engine import bench_engine
from lazyio.errors import LazyIOError, Unsupported
from lazyio.interrupts import Terminated, terminable
from lazyio.run import run
from lazyio.version import __version__

_FAILED = 2
# 128 and the number of the signal, SIGINT or SIGTERM, as shells have it, and typer.
_INTERRUPTED, _TERMINATED = 130, 143


class _Commands(TyperGroup):
    """Turns what a command may raise into one line on stderr and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with terminable():
                return super().invoke(ctx)
        except BrokenPipeError:
            raise  # whoever read our output has seen enough; typer ends quietly
        except Terminated:
            raise typer.Exit(_TERMINATED) from None
        except (LazyIOError, OSError) as error:
            _say(f"error: {_text_of(error)}")
            raise typer.Exit(_FAILED) from None


app = typer.Typer(
    cls=_Commands,
    help="Rows of per-layer embedding tables, read from disk as fast as the device allows.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line; the entry point of the package."""
    status = _INTERRUPTED
    try:
        _run()
    except SystemExit as end:
        if end.code not in (_INTERRUPTED, _TERMINATED):
            raise
        status = end.code
    except KeyboardInterrupt:
        pass
    else:
        return
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # impatience does not keep it from ending in order
    _say("interrupted" if status == _INTERRUPTED else "terminated")
    sys.exit(status)


def _run() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # replies may have characters that a terminal has not
    warnings.showwarning = lambda message, *_, **__: _say(f"warning: {message}")
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"lazyio {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="A model file, the first of its parts, or a folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show the tables of a model, where they lie, and how the mode auto would read them."""
    from rich.console import Console

    from lazyio import inspect as facts
    from lazyio.inspect_view import show

    tables = facts.inspect(path)
    if as_json:
        print(json.dumps(facts.as_json(path, tables), indent=2))
    else:
        show(tables, Console(highlight=False))


kernels = typer.Typer(help="The GPU's kernels.", no_args_is_help=True)
app.add_typer(kernels, name="kernels")


@kernels.command("check")
def check_kernels(
    only: Annotated[str | None, typer.Option(metavar="NAME", help="Check this kernel alone.")] = None,
    interpret: Annotated[bool, typer.Option("--interpret", help="Small cases, on the CPU, without a GPU.")] = False,
) -> None:
    """Compare every kernel with its reference on this machine's GPU; exit with 1 if one differs or misses a fault."""
    from rich.console import Console

    if find_spec("torch") is None:
        raise Unsupported("kernels run on torch, which is not installed: pip install 'lazyio[engine]'")
    from lazyio.kernels.check import check_all

    if not check_all(only, interpret, Console(highlight=False)):
        raise typer.Exit(1)


app.command()(bench)
app.command()(bench_engine)
app.command()(run)


@app.command()
def settings() -> None:
    """Print all settings: their environment variables, defaults, accepted values, and modes in which they matter."""
    from lazyio.settings import document

    print(document(), end="")


def _say(line: str) -> None:
    print(f"lazyio: {' '.join(line.split())}", file=sys.stderr)


def _text_of(error: Exception) -> str:
    """Our own messages are complete; the system's are put without the number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)
