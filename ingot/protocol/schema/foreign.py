"""Fields that other servers know and their clients send, with what becomes of each.

- `Alias`: means the same as a field of ours, and is read as that.
- `Passed`: has no effect, and the receipt names it, unless it asks for nothing.
- `Refused`: the answer would be another one than was asked for, so it is a 400 that says what to send.

What is in no table is passed over and named too, unless it is a slip of the pen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ingot.protocol.schema.fields import Kind, Refused
from ingot.protocol.schema.unheeded import Passed


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of `field`, which wins where both are given."""

    field: str


Foreign = Mapping[str, Alias | Kind]

SAMPLERS: Final[Foreign] = {
    "top_a": Passed(0, 0.0),
    "top_n_sigma": Passed(0, 0.0, -1, -1.0),
    "typical_p": Passed(1, 1.0),
    "typical": Passed(1, 1.0),
    "tfs": Passed(1, 1.0),
    "tfs_z": Passed(1, 1.0),
    "mirostat": Passed(0),
    "mirostat_mode": Passed(0),
    "dry_multiplier": Passed(0, 0.0),
    "xtc_probability": Passed(0, 0.0),
    "dynatemp_range": Passed(0, 0.0),
    "smoothing_factor": Passed(0, 0.0),
    "length_penalty": Passed(1, 1.0),
    "early_stopping": Passed(False),
    "use_beam_search": Refused("is not supported: answers are drawn, not searched. Send false.", (False,)),
    "logits_processors": Refused("is not supported: a request cannot bring code.", ([],)),
    "allowed_token_ids": Refused("is not supported: name the texts that are allowed, as structured_outputs.choice."),
    "bad_words": Refused("is not supported: send logit_bias with the tokens to avoid.", ([],)),
}
GUIDED: Final[Foreign] = {
    "guided_json": Refused("is not known here by that name: send structured_outputs.json."),
    "guided_regex": Refused("is not known here by that name: send structured_outputs.regex."),
    "guided_choice": Refused("is not known here by that name: send structured_outputs.choice."),
    "guided_grammar": Refused("is not known here: send structured_outputs.grammar, in Lark's notation."),
    "guided_decoding_backend": Passed(),
    "guided_whitespace_pattern": Passed(),
    "grammar": Refused("is not known here: send structured_outputs.grammar, in Lark's notation.", ("",)),
    "json_schema": Refused("is not known here by that name: send structured_outputs.json."),
    "regex": Refused("is not known here by that name: send structured_outputs.regex."),
    "ebnf": Refused("is not known here: send structured_outputs.grammar, in Lark's notation."),
    "structural_tag": Refused("is not known here by that name: send response_format of that type."),
}
_HELD_ELSEWHERE: Final = Refused(
    "is not supported here: /v1/chat/completions holds answers to a form by that name.", ("", {}, {"type": "text"})
)
HELD_IN_CHAT: Final[Foreign] = {
    **{name: _HELD_ELSEWHERE if isinstance(kind, Refused) else kind for name, kind in GUIDED.items()},
    "structured_outputs": _HELD_ELSEWHERE,
    "response_format": _HELD_ELSEWHERE,
}
"""The same, for protocols that hold answers to nothing by such a name."""
SERVING: Final[Foreign] = {
    "models": Passed([]),
    "route": Passed(),
    "provider": Passed(),
    "transforms": Passed([]),
    "plugins": Passed([]),
    "usage": Passed({"include": True}),
    "tool_stream": Passed(True),
    "return_token_ids": Passed(False),
    "return_tokens_as_token_ids": Passed(False),
    "skip_special_tokens": Passed(True),
    "spaces_between_special_tokens": Passed(True),
    "cache_prompt": Passed(True),
    "truncate_prompt_tokens": Refused("is not supported: no prompt is ever cut. Shorten it.", (-1,)),
    "prompt_logprobs": Refused("is not supported: send `echo` and `logprobs` to /v1/completions."),
    "extra_body": Refused("is a client's own: its fields go into the body itself.", ({},)),
}


def limits(field: str, *names: str) -> Foreign:
    """Names of the most tokens to generate, for a protocol that calls it `field`."""
    return {name: Alias(field) for name in ("max_new_tokens", "n_predict", "num_predict", *names)}


SHARED: Final[Foreign] = {
    **SAMPLERS,
    **SERVING,
    "repeat_penalty": Alias("repetition_penalty"),
    "stop_sequences": Alias("stop"),
}
CHAT: Final[Foreign] = {
    **SHARED,
    **GUIDED,
    **limits("max_completion_tokens", "max_output_tokens"),
    "echo": Refused("is not supported: the prompt is given back by /v1/completions alone. Send false.", (False,)),
    "best_of": Refused("is not supported: /v1/completions compares answers.", (1,)),
    "documents": Refused("is not supported: put documents into the messages.", ([],)),
}
INFILL: Final[Foreign] = {
    **SHARED,
    **{name: Alias("n_predict") for name in ("max_tokens", "max_completion_tokens", "max_new_tokens")},
    "id_slot": Passed(-1),
    "samplers": Passed(),
    "n_indent": Passed(0),
    "n_keep": Passed(0, -1),
    "n_discard": Passed(0),
    "n_cache_reuse": Passed(0),
    "min_keep": Passed(0),
    "repeat_last_n": Passed(-1),
    "t_max_prompt_ms": Passed(0),
    "t_max_predict_ms": Passed(0),
    "timings_per_token": Passed(False),
    "return_progress": Passed(False),
    "return_tokens": Passed(False),
    "n_cmpl": Refused("is not supported: /v1/completions gives several answers, with suffix and n.", (1,)),
    "post_sampling_probs": Refused("is not supported: log-probabilities are the model's own. Send false.", (False,)),
    "grammar": Refused("is not supported: what is filled in is held to no grammar.", ("",)),
    "json_schema": Refused("is not supported: what is filled in is held to no schema."),
    "lora": Refused("is not supported: send the field adapter, with its name.", ([],)),
}
COMPLETIONS: Final[Foreign] = {
    **SHARED,
    **HELD_IN_CHAT,
    **limits("max_tokens", "max_completion_tokens", "max_output_tokens"),
}
RESPONSES: Final[Foreign] = {
    **SHARED,
    **HELD_IN_CHAT,
    **limits("max_output_tokens", "max_tokens", "max_completion_tokens"),
}
MESSAGES: Final[Foreign] = {**HELD_IN_CHAT, "models": Passed([]), "provider": Passed(), "stop": Alias("stop_sequences")}
