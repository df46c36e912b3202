"""How a command ends with one message if the user can solve the problem."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import typer


@contextlib.contextmanager
def plain_errors(verbose: bool = False, *, resumes: bool = True, new_folder: Path | None = None) -> Iterator[None]:
    """Ends the command with one message and a non-zero status if the user can solve the problem.

    Args:
        verbose: Raise the error instead, with its traceback.
        resumes: Whether the same command continues after an interruption.
        new_folder: The folder that a command writes only if it is new, so that its files prevent a second call.
    """
    has_earlier_files = new_folder is not None and new_folder.is_dir() and any(new_folder.iterdir())
    try:
        yield
    except KeyboardInterrupt as error:
        if new_folder and new_folder.exists() and not has_earlier_files:
            advice = f"the result is incomplete; remove {new_folder} or choose another --out, and repeat the command"
        elif resumes:
            advice = "finished work is kept; repeat the command, without --from, to continue"
        else:
            advice = "the result is incomplete; repeat the command"
        typer.echo(f"\ninterrupted: {advice}", err=True)
        signal_number = error.args[0] if error.args else signal.SIGINT
        raise typer.Exit(128 + signal_number) from None
    except Exception as error:
        from mcis.datasets.errors import UserError

        user_error: UserError | None
        if isinstance(error, UserError):
            user_error = error
        else:  # Ray and its workers wrap the errors that they raise
            from mcis.platform.engine.errors import user_error_in

            user_error = user_error_in(error)
        if user_error is None or verbose:
            raise
        typer.echo(f"error: {user_error}", err=True)
        raise typer.Exit(1) from None
