"""How the scripts of this folder say what came of their tasks."""

import json
import traceback
from collections.abc import Callable, Mapping
from typing import Any


def report(tasks: Mapping[str, Callable[[], Any]]) -> None:
    """Prints one line of JSON: what each task gave, or how it failed."""
    made: dict[str, Any] = {}
    for name, task in tasks.items():
        try:
            made[name] = task()
        except Exception:  # whatever a client raises is for the test to read
            made[name] = {"failed": traceback.format_exc()}
    print(json.dumps(made))
