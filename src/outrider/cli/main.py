"""The entry point of the `outrider` command: exit codes, and errors as one clear line.

Exit codes: 0 done, 1 something failed while running, 2 wrong usage, 130 interrupted. A plain text that --max-tokens cuts
off is done. A text that has to follow a structure (a JSON schema, a regular expression, a grammar) and is cut off before
the structure is complete has failed: the exit code is 1.

This module imports nothing that takes time: before `main` runs, an interrupt still shows Python's own traceback.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command line and exit."""
    try:
        watch()
        _run()
    except KeyboardInterrupt:
        # CPython remembers an interrupt that fell into code made from a string, as that of a dataclass is, and ends the
        # process by the signal although the exception was caught. Running any string makes it forget.
        exec("")
        sys.exit(EXIT_CODE)
    finally:
        if caught():
            _end_engines()
            show_cursor()


def _end_engines() -> None:
    """Wait for the threads of engines, or leave without them where a load is in a stage that nothing can break off."""
    engines = sys.modules.get("outrider.engine.thread")
    if engines is not None and not engines.end_all_threads(engines.LONGEST_STAGE):
        leave()


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
    if caught():  # the error is what became of the interrupt
        raise KeyboardInterrupt
    import traceback

    import typer

    if os.environ.get("OUTRIDER_DEBUG"):
        traceback.print_exc()
    typer.secho(f"outrider: {problem}", err=True, fg=typer.colors.RED)
    sys.exit(code)


# --- Ctrl-C: exit code 130 and no traceback, at any moment of the command.


TYPE_CHECKING = False  # `typing` is not imported: until `watch` has run, an interrupt still shows a traceback
if TYPE_CHECKING:
    from types import FrameType

EXIT_CODE = 130
_IMPORT_SYSTEM = "<frozen importlib."
_SHOW_CURSOR = b"\x1b[?25h"

_caught = False


def watch() -> None:
    """Take Ctrl-C over for the rest of the process, unless whoever started the command had it ignored. SIGHUP ends no
    server."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _unraisable
    verb = next((given for given in sys.argv[1:] if not given.startswith("-")), None)
    if verb == "serve" and hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # its profile is not read yet; later the server has a use for it


def caught() -> bool:
    """Tells whether Ctrl-C was pressed: an error that follows may be an interrupt in disguise."""
    return _caught


def show_cursor() -> None:
    """A spinner may have hidden it, and may not have come to its own end."""
    if os.isatty(2):
        os.write(2, _SHOW_CURSOR)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt where it arrives; elsewhere, and at the second Ctrl-C, leave at once.

    An exception inside an import does not arrive: libraries catch it, take the module for one that is not installed, and go
    on or fail with another error.
    """
    global _caught
    if _caught or _is_importing(frame):
        leave()
    _caught = True
    raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORT_SYSTEM):
            return True
        frame = frame.f_back
    return False


def _unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """A KeyboardInterrupt that fell into a finaliser cannot travel on from there."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        leave()
    sys.__unraisablehook__(unraisable)


def leave() -> None:
    """End the process without cleaning up."""
    show_cursor()
    os._exit(EXIT_CODE)


if __name__ == "__main__":
    main()
