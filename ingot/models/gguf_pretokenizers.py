"""How byte-level BPE vocabularies cut text before merging, by the name that `tokenizer.ggml.pre` gives it.

A wrong cut gives wrong tokens without an error, so a name that is not in the table is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from ingot.errors import ModelError, nearest

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_SEED = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"

# Words end where lower case turns to upper, so that CamelCase comes apart.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%(tail)s"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%(tail)s"
    rf"|%(digits)s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_TEKKEN = _CASED % {"tail": "", "digits": r"\p{N}"}
_GPT4O = _CASED % {"tail": f"{_CONTRACTION}?", "digits": r"\p{N}{1,3}"}


@dataclass(frozen=True, slots=True)
class Cut:
    """`patterns` are applied in turn, each to the pieces that the ones before left."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a piece that is a token by itself is taken without merging
    begins: bool = False  # texts begin with the BOS token unless the file says otherwise
    nfc: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_LLAMA3_CUT = Cut((_LLAMA3,), whole_words=True, begins=True)
_DIGITS_CUT = Cut((r"\p{N}", _GPT2))

CUTS: dict[str, Cut] = {
    "default": Cut((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": Cut((_GPT2,)),
    "phi-2": Cut((_GPT2,)),
    "trillion": Cut((_GPT2,)),
    "smollm": _DIGITS_CUT,
    "starcoder": _DIGITS_CUT,
    "refact": _DIGITS_CUT,
    "codeshell": _DIGITS_CUT,
    "minerva-7b": _DIGITS_CUT,
    "llama-bpe": _LLAMA3_CUT,
    "llama3": _LLAMA3_CUT,
    "llama-v3": _LLAMA3_CUT,
    "falcon3": _LLAMA3_CUT,
    "pixtral": _LLAMA3_CUT,
    "midm-2.0": _LLAMA3_CUT,
    "smaug-bpe": Cut((_LLAMA3,)),
    "dbrx": Cut((_LLAMA3,)),
    "qwen2": Cut((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": Cut((_QWEN2,), nfc=True),
    "megrez": Cut((_QWEN2,)),
    "tekken": Cut((_TEKKEN,), whole_words=True, begins=True),
    "gpt-4o": Cut((_GPT4O,)),
    "seed-coder": Cut((_SEED,)),
    "deepseek-coder": Cut((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
}


def cut(name: object) -> Cut:
    if name is None:
        raise ModelError("the file lacks tokenizer.ggml.pre: it is too old to say how its text is cut into tokens")
    if not isinstance(name, str) or name not in CUTS:
        near = nearest(str(name), CUTS)
        hint = f" (nearest: {near})" if near else ""
        raise ModelError(
            f"tokenizer.ggml.pre is {name!r}, which is not supported{hint}; supported are: {', '.join(CUTS)}"
        )
    return CUTS[name]
