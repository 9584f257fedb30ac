"""The one place that imports mlx-lm, and leaves the process as it found it.

mlx-lm lowers RLIMIT_NOFILE while it is imported, the hard limit included, which an ordinary user cannot raise
again. So that import sees a `resource` module whose `setrlimit` does nothing; the real one is untouched.
"""

from __future__ import annotations

import importlib
import inspect
import os
import resource
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def _process_unchanged() -> Iterator[None]:
    inert = types.ModuleType("resource")
    inert.__dict__.update({name: value for name, value in vars(resource).items() if not name.startswith("__")})
    inert.__dict__["setrlimit"] = lambda *_: None
    environment = dict(os.environ)
    sys.modules["resource"] = inert
    try:
        yield
    finally:
        sys.modules["resource"] = resource
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


def import_upstream(name: str) -> types.ModuleType:
    """Import `mlx_lm`, or another project's package that builds on it, or one of their modules."""
    if name.partition(".")[0] in sys.modules:
        return importlib.import_module(name)
    with _process_unchanged():
        return importlib.import_module(name)


import_upstream("mlx_lm")

from mlx_lm.models import cache as caches  # noqa: E402
from mlx_lm.models import rope_utils  # noqa: E402
from mlx_lm.models.activations import SwigluOAI  # noqa: E402
from mlx_lm.models.base import create_attention_mask  # noqa: E402
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchGLU, SwitchLinear  # noqa: E402
from mlx_lm.utils import (  # noqa: E402
    infer_quant_config,
    load_config,
    load_model,
    quantize_model,
    save_config,
    save_model,
)

model_classes: Any = inspect.signature(load_model).parameters["get_model_classes"].default
"""How mlx-lm itself finds the classes of a model."""

ArraysCache: Any = caches.ArraysCache
"""Typed loosely: what mlx-lm declares of it is less than what its models use."""

__all__ = [
    "ArraysCache",
    "QuantizedSwitchLinear",
    "SwiGLU",
    "SwigluOAI",
    "SwitchGLU",
    "SwitchLinear",
    "caches",
    "create_attention_mask",
    "infer_quant_config",
    "load_config",
    "load_model",
    "model_classes",
    "quantize_model",
    "rope_utils",
    "save_config",
    "save_model",
]
