"""Lists the files of transformers' models once while transformers is imported.

While it is imported, it opens more than two thousand files and finds the names that each exports. It needs this list
for two packages, but remembers it under two names of one folder. The second list takes a tenth of the time until the
first token.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def list_models_once() -> None:
    """Import transformers, and the package of its models. What they hold is what they would hold without this."""
    from transformers.utils import import_utils as lists

    models = Path(lists.__file__).parents[1] / "models"
    stock = getattr(lists, "create_import_structure_from_path", None)
    if stock is None or "transformers.models" in sys.modules:
        return

    def listed(path: Any) -> Any:
        """The list by the name under which it is remembered."""
        return stock(models if os.fspath(path) == str(models / "__init__.py") else path)

    lists.create_import_structure_from_path = listed
    try:
        import_module("transformers.models")
    finally:
        lists.create_import_structure_from_path = stock
