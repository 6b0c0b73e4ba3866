"""The entry point of the `outrider` command: exit codes, and errors as one clear line.

Exit codes: 0 done, 1 something failed while running, 2 wrong usage, 130 interrupted. A plain text that --max-tokens cuts
off is done. A text that has to follow a structure (a JSON schema, a regular expression, a grammar) and is cut off before
the structure is complete has failed: the exit code is 1.

This module imports nothing that takes time: before `main` runs, an interrupt still shows Python's own traceback.
"""

from __future__ import annotations

import os
import sys

from outrider.cli import interrupts


def main() -> None:
    """Run the command line and exit."""
    try:
        interrupts.watch()
        _run()
    except KeyboardInterrupt:
        # CPython remembers an interrupt that fell into code made from a string, as that of a dataclass is, and ends the
        # process by the signal although the exception was caught. Running any string makes it forget.
        exec("")
        sys.exit(interrupts.EXIT_CODE)
    finally:
        if interrupts.caught():
            _end_engines()
            interrupts.show_cursor()


def _end_engines() -> None:
    """Wait for the threads of engines, or leave without them where a load is in a stage that nothing can break off."""
    engines = sys.modules.get("outrider.engine.hosting.thread")
    if engines is not None and not engines.end_all_threads(engines.LONGEST_STAGE):
        interrupts.leave()


def _run() -> None:
    """The verb that was asked for; what it raises becomes an exit code."""
    # Only this process: the library's own loading bars would tear the display, and ours shows the same.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from outrider.cli.app import app
    from outrider.errors import InputError, OutriderError

    try:
        app(standalone_mode=True)
    except OutriderError as error:
        _leave(error, 2 if isinstance(error, InputError) else 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        _leave(f"unexpected {type(error).__name__}: {error} (outrider --debug ... shows where)", 1)


def _leave(problem: object, code: int) -> None:
    """One line, or the whole traceback where it was asked for."""
    if interrupts.caught():  # the error is what became of the interrupt
        raise KeyboardInterrupt
    import traceback

    import typer

    if os.environ.get("OUTRIDER_DEBUG"):
        traceback.print_exc()
    typer.secho(f"outrider: {problem}", err=True, fg=typer.colors.RED)
    sys.exit(code)


if __name__ == "__main__":
    main()
