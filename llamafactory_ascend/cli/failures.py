"""How a command ends that cannot do its work: one error on stderr, exit code 2, no traceback."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from llamafactory_ascend.errors import AscendError


@contextmanager
def told(place: Path | None = None) -> Iterator[None]:
    """Print an AscendError, or what the system says about a file, and exit with 2.

    Args:
        place: what is written; a full disk does not say where it is full.
    """
    try:
        yield
    except BrokenPipeError:  # nobody reads stdout any more: not ours to say
        raise
    except AscendError as error:
        typer.echo(f"error {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        named = error.filename2 or error.filename or place
        typer.echo(f"error {f'{named}: ' if named else ''}{error.strerror or error}", err=True)
        raise typer.Exit(2) from None
