"""Default sampling parameters: those of the model's generation_config.json, unless the settings override them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from ingot.engine.request import Sampling
from ingot.errors import BadRequest, nearest_name
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import BodyReading, FieldKind, Int, Number
from ingot.protocol.terms import NO_TERMS

SAMPLING_DEFAULT_FIELDS: Final[Mapping[str, FieldKind]] = {
    "temperature": Number(bounds.TEMPERATURE),
    "top_p": Number(bounds.TOP_P),
    "top_k": Int(bounds.TOP_K),
    "min_p": Number(bounds.MIN_P),
    "repetition_penalty": Number(bounds.REPETITION_PENALTY),
}
"""The fields of a generation_config.json that are used here."""
GREEDY: Final = "do_sample"

log = logging.getLogger(__name__)


def sampling_defaults(recommended: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> Sampling:
    """`recommended` is a generation_config.json; invalid values are left out with a warning.

    `overrides` have been checked by `sampling_override_problem`.
    """
    values = {
        name: value for name in SAMPLING_DEFAULT_FIELDS if (value := _recommended_value(recommended, name)) is not None
    }
    if recommended.get(GREEDY) is False:
        values.setdefault("temperature", 0.0)
    return with_sampling_defaults(
        Sampling(), values | {name: _read_sampling_value(name, value) for name, value in (overrides or {}).items()}
    )


def with_sampling_defaults(defaults: Sampling, values: Mapping[str, Any]) -> Sampling:
    """`defaults` with a request's own values, of which None means the default."""
    values = {name: value for name, value in values.items() if value is not None}
    if "top_k" in values:
        values["top_k"] = max(0, values["top_k"])  # -1 means all, too
    if "seed" in values:
        values["seed"] %= 2**64  # 64 bits wide on the wire, signed; generators take them unsigned
    return replace(defaults, **values)


def sampling_body(sampling: Sampling) -> dict[str, float | int]:
    """The defaults that are not off, for clients to see."""
    plain = Sampling()
    return {
        name: value for name in SAMPLING_DEFAULT_FIELDS if (value := getattr(sampling, name)) != getattr(plain, name)
    }


def sampling_override_problem(overrides: Mapping[str, Any]) -> str | None:
    for name, value in overrides.items():
        if name not in SAMPLING_DEFAULT_FIELDS:
            near = nearest_name(name, SAMPLING_DEFAULT_FIELDS)
            hint = f"did you mean {near}?" if near else f"there are {', '.join(SAMPLING_DEFAULT_FIELDS)}"
            return f"{name!r} is not a sampling default; {hint}"
        try:
            _read_sampling_value(name, value)
        except BadRequest as error:
            return error.message.rstrip(".")
    return None


def _recommended_value(config: Mapping[str, Any], name: str) -> float | int | None:
    if config.get(name) is None:
        return None
    try:
        return _read_sampling_value(name, config[name])
    except BadRequest as error:
        log.warning("a value of the model's generation_config.json is not used: %s", error.message)
        return None


def _read_sampling_value(name: str, value: Any) -> Any:
    return SAMPLING_DEFAULT_FIELDS[name].parse(value, name, BodyReading(NO_TERMS))
