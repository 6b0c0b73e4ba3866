"""Ctrl-C: exit code 130 and no traceback, at any moment of the command."""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # `typing` is not imported: until `watch` has run, an interrupt still shows a traceback
if TYPE_CHECKING:
    from types import FrameType

EXIT_CODE = 130
_IMPORT_SYSTEM = "<frozen importlib."
_SHOW_CURSOR = b"\x1b[?25h"

_caught = False


def watch() -> None:
    """Take Ctrl-C over for the rest of the process, unless whoever started the command had it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _unraisable


def caught() -> bool:
    """Whether Ctrl-C was pressed: an error that follows may be an interrupt in disguise."""
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
