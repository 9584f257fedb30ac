"""How tokens are chosen where a request does not say: as the model's makers recommend, unless the settings say more."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from ingot.engine.request import Sampling
from ingot.errors import BadRequest, nearest_name
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import BodyReading, FieldKind, Int, Number
from ingot.protocol.terms import Terms

SAMPLING_DEFAULT_FIELDS: Final[Mapping[str, FieldKind]] = {
    "temperature": Number(bounds.TEMPERATURE),
    "top_p": Number(bounds.TOP_P),
    "top_k": Int(bounds.TOP_K),
    "min_p": Number(bounds.MIN_P),
    "repetition_penalty": Number(bounds.REPETITION_PENALTY),
}
"""What of a generation_config.json chooses tokens. The rest of such a file is for other programs."""
GREEDY: Final = "do_sample"

log = logging.getLogger(__name__)


def sampling_defaults(recommended: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> Sampling:
    """`recommended` is what a generation_config.json holds; what makes no sense there is left out, with a warning.

    `overrides` have been checked by `sampling_override_problem`.
    """
    found = {
        name: value for name in SAMPLING_DEFAULT_FIELDS if (value := _recommended_value(recommended, name)) is not None
    }
    if recommended.get(GREEDY) is False:
        found.setdefault("temperature", 0.0)
    return with_sampling_defaults(
        Sampling(), found | {name: _read_sampling_value(name, value) for name, value in (overrides or {}).items()}
    )


def with_sampling_defaults(defaults: Sampling, said: Mapping[str, Any]) -> Sampling:
    """`defaults` with what a request says itself; None is nothing said."""
    given = {name: value for name, value in said.items() if value is not None}
    if "top_k" in given:
        given["top_k"] = max(0, given["top_k"])  # -1 is another way to say all
    if "seed" in given:
        given["seed"] %= 2**64  # 64 bits wide on the wire, signed; generators take them unsigned
    return replace(defaults, **given)


def sampling_body(sampling: Sampling) -> dict[str, float | int]:
    """The defaults that are not simply off, for clients to see."""
    plain = Sampling()
    return {
        name: value for name in SAMPLING_DEFAULT_FIELDS if (value := getattr(sampling, name)) != getattr(plain, name)
    }


def sampling_override_problem(overrides: Mapping[str, Any]) -> str | None:
    for name, value in overrides.items():
        if name not in SAMPLING_DEFAULT_FIELDS:
            near = nearest_name(name, SAMPLING_DEFAULT_FIELDS)
            known = f"did you mean {near}?" if near else f"known are {', '.join(SAMPLING_DEFAULT_FIELDS)}"
            return f"{name!r} is nothing that requests leave to the server; {known}"
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
        log.warning("the model's generation_config.json is not followed there: %s", error.message)
        return None


def _read_sampling_value(name: str, value: Any) -> Any:
    return SAMPLING_DEFAULT_FIELDS[name].parse(value, name, BodyReading(Terms((), 1, 1.0)))
