"""Fields of other servers that clients send, and how each is handled.

- `Alias`: another name of one of our fields.
- `HintField`: has no effect and is named in the receipt, unless its value is harmless.
- `Refused`: without it the answer would be wrong, so it is a 400 that says what to send instead.

A field in no table is ignored and named in the receipt, unless it is a misspelling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ingot.protocol.schema.fields import FieldKind, HintField, Refused


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of `field`, which takes precedence."""

    field: str


ForeignFields = Mapping[str, Alias | FieldKind]

SAMPLERS: Final[ForeignFields] = {
    "top_a": HintField(0, 0.0),
    "top_n_sigma": HintField(0, 0.0, -1, -1.0),
    "typical_p": HintField(1, 1.0),
    "typical": HintField(1, 1.0),
    "tfs": HintField(1, 1.0),
    "tfs_z": HintField(1, 1.0),
    "mirostat": HintField(0),
    "mirostat_mode": HintField(0),
    "dry_multiplier": HintField(0, 0.0),
    "xtc_probability": HintField(0, 0.0),
    "dynatemp_range": HintField(0, 0.0),
    "smoothing_factor": HintField(0, 0.0),
    "length_penalty": HintField(1, 1.0),
    "early_stopping": HintField(False),
    "use_beam_search": Refused("is not supported: answers are sampled. Send false.", (False,)),
    "logits_processors": Refused("is not supported: a request cannot contain code.", ([],)),
    "allowed_token_ids": Refused("is not supported: name the texts that are allowed, as structured_outputs.choice."),
    "bad_words": Refused("is not supported: send logit_bias with the tokens to avoid.", ([],)),
}
GUIDED_DECODING: Final[ForeignFields] = {
    "guided_json": Refused("is not supported: send structured_outputs.json."),
    "guided_regex": Refused("is not supported: send structured_outputs.regex."),
    "guided_choice": Refused("is not supported: send structured_outputs.choice."),
    "guided_grammar": Refused("is not supported: send structured_outputs.grammar, in Lark's notation."),
    "guided_decoding_backend": HintField(),
    "guided_whitespace_pattern": HintField(),
    "grammar": Refused("is not supported: send structured_outputs.grammar, in Lark's notation.", ("",)),
    "json_schema": Refused("is not supported: send structured_outputs.json."),
    "regex": Refused("is not supported: send structured_outputs.regex."),
    "ebnf": Refused("is not supported: send structured_outputs.grammar, in Lark's notation."),
    "structural_tag": Refused("is not supported: send response_format of that type."),
}
_GRAMMARS_ELSEWHERE: Final = Refused(
    "is not supported here: send it to /v1/chat/completions.", ("", {}, {"type": "text"})
)
GRAMMARS_IN_CHAT: Final[ForeignFields] = {
    **{name: _GRAMMARS_ELSEWHERE if isinstance(kind, Refused) else kind for name, kind in GUIDED_DECODING.items()},
    "structured_outputs": _GRAMMARS_ELSEWHERE,
    "response_format": _GRAMMARS_ELSEWHERE,
}
"""The same, for protocols without such fields."""
SERVING_HINTS: Final[ForeignFields] = {
    "models": HintField([]),
    "route": HintField(),
    "provider": HintField(),
    "transforms": HintField([]),
    "plugins": HintField([]),
    "usage": HintField({"include": True}),
    "tool_stream": HintField(True),
    "return_token_ids": HintField(False),
    "return_tokens_as_token_ids": HintField(False),
    "skip_special_tokens": HintField(True),
    "spaces_between_special_tokens": HintField(True),
    "cache_prompt": HintField(True),
    "truncate_prompt_tokens": Refused("is not supported: prompts are never truncated.", (-1,)),
    "prompt_logprobs": Refused("is not supported: send `echo` and `logprobs` to /v1/completions."),
    "extra_body": Refused("belongs to the client: its fields go into the body itself.", ({},)),
}


def token_limit_aliases(field: str, *names: str) -> ForeignFields:
    """Other names of the token limit, which a protocol calls `field`."""
    return {name: Alias(field) for name in ("max_new_tokens", "n_predict", "num_predict", *names)}


SHARED: Final[ForeignFields] = {
    **SAMPLERS,
    **SERVING_HINTS,
    "repeat_penalty": Alias("repetition_penalty"),
    "stop_sequences": Alias("stop"),
}
CHAT: Final[ForeignFields] = {
    **SHARED,
    **GUIDED_DECODING,
    **token_limit_aliases("max_completion_tokens", "max_output_tokens"),
    "echo": Refused("is not supported: only /v1/completions returns the prompt. Send false.", (False,)),
    "best_of": Refused("is not supported: /v1/completions compares answers.", (1,)),
    "documents": Refused("is not supported: put documents into the messages.", ([],)),
}
INFILL: Final[ForeignFields] = {
    **SHARED,
    **{name: Alias("n_predict") for name in ("max_tokens", "max_completion_tokens", "max_new_tokens")},
    "id_slot": HintField(-1),
    "samplers": HintField(),
    "n_indent": HintField(0),
    "n_keep": HintField(0, -1),
    "n_discard": HintField(0),
    "n_cache_reuse": HintField(0),
    "min_keep": HintField(0),
    "repeat_last_n": HintField(-1),
    "t_max_prompt_ms": HintField(0),
    "t_max_predict_ms": HintField(0),
    "timings_per_token": HintField(False),
    "return_progress": HintField(False),
    "return_tokens": HintField(False),
    "n_cmpl": Refused("is not supported: /v1/completions gives several answers, with suffix and n.", (1,)),
    "post_sampling_probs": Refused("is not supported: log-probabilities are the model's own. Send false.", (False,)),
    "grammar": Refused("is not supported: infill has no grammars.", ("",)),
    "json_schema": Refused("is not supported: infill has no schemas."),
    "lora": Refused("is not supported: send the field adapter, with its name.", ([],)),
}
COMPLETIONS: Final[ForeignFields] = {
    **SHARED,
    **GRAMMARS_IN_CHAT,
    **token_limit_aliases("max_tokens", "max_completion_tokens", "max_output_tokens"),
}
RESPONSES: Final[ForeignFields] = {
    **SHARED,
    **GRAMMARS_IN_CHAT,
    **token_limit_aliases("max_output_tokens", "max_tokens", "max_completion_tokens"),
}
MESSAGES: Final[ForeignFields] = {
    **GRAMMARS_IN_CHAT,
    "models": HintField([]),
    "provider": HintField(),
    "stop": Alias("stop_sequences"),
}
