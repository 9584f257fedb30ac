"""Every numeric bound of request fields, in one table. A pair is (least, most), both allowed."""

from __future__ import annotations

from typing import Final

IntRange = tuple[int, int]
Range = tuple[float, float]

# how much is generated
MAX_TOKENS: Final[IntRange] = (1, 16_777_216)
LEGACY_MAX_TOKENS: Final[IntRange] = (0, 16_777_216)  # completions with `echo` may generate nothing
LEGACY_MAX_TOKENS_DEFAULT: Final = 16
MIN_TOKENS: Final[IntRange] = (0, 16_777_216)
THINKING_BUDGET: Final[IntRange] = (0, 16_777_216)
CHOICES: Final[IntRange] = (1, 128)
BEST_OF: Final[IntRange] = (1, 128)
SEQUENCES: Final = 256  # prompts times answers of one request

# how a token is sampled
TEMPERATURE: Final[Range] = (0.0, 2.0)
TOP_P: Final[Range] = (0.0, 1.0)
TOP_K: Final[IntRange] = (-1, 1_000_000)  # 0 and -1 are all
MIN_P: Final[Range] = (0.0, 1.0)
PENALTY: Final[Range] = (-2.0, 2.0)
REPETITION_PENALTY: Final[Range] = (0.01, 10.0)
LOGIT_BIAS: Final[Range] = (-100.0, 100.0)
LOGIT_BIAS_ENTRIES: Final = 1024
SEED: Final[IntRange] = (-(2**63), 2**63 - 1)
TOP_LOGPROBS: Final[IntRange] = (0, 20)
LEGACY_LOGPROBS: Final[IntRange] = (0, 5)
LEAST_LOGPROB: Final = -9999.0  # JSON has no infinity

KEPT_SHARE: Final[Range] = (0.01, 1.0)  # of a prompt under specprefill

# when it stops
STOP_STRINGS: Final = 16
STOP_STRING_CHARS: Final = 1024
STOP_TOKENS: Final = 256
LEAST_TIMEOUT_S: Final = 0.001

PRIORITY: Final[IntRange] = (-10, 10)  # lower goes first

# what is sent
MESSAGES: Final = 65_536
PARTS: Final = 4096
TOOL_CALLS: Final = 1024
TOOLS: Final = 1024
PAGE: Final[IntRange] = (1, 100)  # items of one list
SERVER_CALLS: Final[IntRange] = (1, 128)  # by the server itself, for one response
TOOL_NAME_CHARS: Final = 128
TOOL_DESCRIPTION_CHARS: Final = 262_144
PROMPTS: Final = 256
PROMPT_TOKENS: Final = 16_777_216
EMBEDDING_INPUTS: Final = 2048
RERANK_DOCUMENTS: Final = 2048
TOP_N: Final[IntRange] = (1, 1_000_000)
INSTRUCTION_CHARS: Final = 65_536
NAME_CHARS: Final = 256
IDENTIFIER_CHARS: Final = 1024
METADATA_ENTRIES: Final = 16
METADATA_KEY_CHARS: Final = 64
METADATA_VALUE_CHARS: Final = 512
GRAMMAR_CHARS: Final = 262_144
GRAMMAR_CHOICES: Final = 4096
TEMPLATE_NUMBER: Final[Range] = (-1e9, 1e9)
TEMPLATE_TEXT_CHARS: Final = 65_536
UNKNOWN_FIELDS: Final = 64  # of one body
FIELD_NAME_CHARS: Final = 64  # a longer name is not a misspelling of a known one
TTL_S: Final[Range] = (0.0, 1e9)  # seconds that a model stays loaded
