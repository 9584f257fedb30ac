"""Builds a Hugging Face tokenizer from the vocabulary in a GGUF file's metadata.

How byte-level BPE vocabularies split text before merging is named by `tokenizer.ggml.pre`. A wrong split gives wrong
tokens without an error, so a name that is not in the table is refused with ModelError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ingot.errors import ModelError, nearest_name

# Texts of tokens that end an answer, whichever of them the file names as its end token.
ENDINGS = frozenset(
    {
        *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>"),
        *("<turn|>", "<|tool_response>"),
    }
)
SPACE_MARK = "\u2581"


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The contents of tokenizer.json and tokenizer_config.json, and the ids for the other configs."""

    tokenizer: Tokenizer
    config: dict[str, Any]
    named_templates: dict[str, str]  # chat templates besides the default one
    bos_id: int | None
    eos_ids: tuple[int, ...]  # the first is the file's own end token
    pad_id: int | None


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    metadata: Mapping[str, Any]
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]

    def option(self, name: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}")

    def flag(self, name: str, default: bool) -> bool:
        value = self.option(name)
        return default if value is None else bool(value)

    def id(self, name: str) -> int | None:
        """A special token's id, by its key in the metadata."""
        value = self.option(f"{name}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise ModelError(f"tokenizer.ggml.{name}_token_id is {value!r}, which is no token")
        return value

    def token(self, name: str) -> str | None:
        number = self.id(name)
        return None if number is None else self.tokens[number]

    def of_type(self, *types: TokenType) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]


def build_tokenizer(metadata: Mapping[str, Any], embedding_rows: int) -> TokenizerFiles:
    """The tokenizer that the metadata describes. Raises ModelError for one that would tokenize differently."""
    vocabulary = _read_vocabulary(metadata, embedding_rows)
    kind = vocabulary.option("model")
    if kind == "gpt2":
        tokenizer, begins = _byte_level(vocabulary)
    elif kind == "llama":
        tokenizer, begins = _marked_spaces(vocabulary, _merges_by_score(vocabulary), prefixed=True), True
    elif kind == "gemma4":
        tokenizer, begins = _marked_spaces(vocabulary, _stated_merges(vocabulary), prefixed=False), True
    else:
        raise ModelError(f"tokenizer.ggml.model is {kind!r}; gpt2, llama and gemma4 are supported")
    _add_tokens(tokenizer, vocabulary)
    _add_ends(tokenizer, vocabulary, begins)
    default, named = _chat_templates(metadata)
    return TokenizerFiles(
        tokenizer=tokenizer,
        config=_tokenizer_config(vocabulary, default),
        named_templates=named,
        bos_id=vocabulary.id("bos"),
        eos_ids=_eos_ids(vocabulary),
        pad_id=vocabulary.id("padding"),
    )


def _read_vocabulary(metadata: Mapping[str, Any], embedding_rows: int) -> _Vocabulary:
    tokens = _list_of(metadata.get("tokenizer.ggml.tokens"), str)
    types = _list_of(metadata.get("tokenizer.ggml.token_type"), int)
    if tokens is None or types is None:
        raise ModelError("the file lacks its vocabulary (tokenizer.ggml.tokens and tokenizer.ggml.token_type)")
    if len(tokens) != len(types):
        raise ModelError(f"the file has {len(tokens)} tokens but {len(types)} token types")
    if len(tokens) > embedding_rows:
        raise ModelError(f"the file has {len(tokens)} tokens but 'token_embd.weight' has {embedding_rows} rows")
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for number, token in enumerate(tokens) if ids[token] != number)
        raise ModelError(f"the file has the token {twice!r} twice")
    return _Vocabulary(metadata, tokens, types, ids)


def _list_of(value: Any, kind: type) -> list[Any] | None:
    """`value`, if it is a list of such things."""
    return value if isinstance(value, list) and all(isinstance(item, kind) for item in value) else None


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    if vocabulary.flag("add_space_prefix", False):
        raise ModelError("tokenizer.ggml.add_space_prefix is set, which is not supported for gpt2 vocabularies")
    merges = _stated_merges(vocabulary)
    splitting = pretokenizer_named(vocabulary.option("pre"))
    tokenizer = Tokenizer(_bpe(vocabulary, merges, ignore_merges=splitting.whole_words))
    if splitting.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitting.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitting.begins


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    for left, right in merges:
        for token in (left, right, left + right):
            if token not in vocabulary.ids:
                raise ModelError(f"the vocabulary merges {left!r} and {right!r}, but {token!r} is no token")
    return models.BPE(vocab=vocabulary.ids, merges=merges, **options)


def _stated_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    merges = _list_of(vocabulary.option("merges"), str)
    if merges is None:
        raise ModelError("the file lacks tokenizer.ggml.merges")
    return [_split_merge(merge) for merge in merges]


def _split_merge(merge: str) -> tuple[str, str]:
    gap = merge.find(" ", 1)
    if gap < 0 or gap + 1 == len(merge):
        raise ModelError(f"tokenizer.ggml.merges holds {merge!r}, which is no pair of tokens")
    return merge[:gap], merge[gap + 1 :]


def _marked_spaces(vocabulary: _Vocabulary, merges: list[tuple[str, str]], *, prefixed: bool) -> Tokenizer:
    """SentencePiece's: texts whose spaces are marked, and bytes where there is no token. `prefixed`: texts begin with
    such a mark unless the file says otherwise."""
    if vocabulary.flag("remove_extra_whitespaces", False) or vocabulary.option("precompiled_charsmap"):
        raise ModelError("the vocabulary normalises its text (tokenizer.ggml), which is not supported")
    prefixed = vocabulary.flag("add_space_prefix", prefixed)
    has_bytes = bool(vocabulary.of_type(TokenType.BYTE))
    model = _bpe(
        vocabulary,
        merges,
        unk_token=vocabulary.token("unknown"),
        fuse_unk=True,
        byte_fallback=has_bytes,
    )
    tokenizer = Tokenizer(model)
    mark = normalizers.Replace(" ", SPACE_MARK)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), mark]) if prefixed else mark
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece joins any two neighbours that make a token, the best score first: merges, best first."""
    scores = _list_of(vocabulary.option("scores"), float)
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise ModelError("the file lacks tokenizer.ggml.scores, or has another number of them than tokens")
    # A user-defined token with a space in it is found only after spaces were marked, so by merging.
    spaced = [token for token in vocabulary.of_type(TokenType.USER_DEFINED) if SPACE_MARK in token]
    joined = vocabulary.of_type(TokenType.NORMAL) + spaced
    mergeable = frozenset(joined)
    ranked = sorted(joined, key=lambda token: -scores[vocabulary.ids[token]])
    return [
        (token[:middle], token[middle:])
        for token in ranked
        for middle in range(1, len(token))
        if token[:middle] in mergeable and token[middle:] in mergeable
    ]


def _add_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Adds the tokens that are never the result of merging."""
    special = {TokenType.CONTROL}
    if vocabulary.option("model") != "gpt2":
        special.add(TokenType.UNKNOWN)
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind in special, normalized=False)
            for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
            if token and (kind in special or kind == TokenType.USER_DEFINED)
        ]
    )


def _add_ends(tokenizer: Tokenizer, vocabulary: _Vocabulary, begins: bool) -> None:
    """Texts begin with BOS and end with EOS where the file says so."""
    bos, eos = vocabulary.token("bos"), vocabulary.token("eos")
    add_bos = vocabulary.flag("add_bos_token", begins and bos is not None)
    add_eos = vocabulary.flag("add_eos_token", False)
    if add_bos and bos is None:
        raise ModelError("tokenizer.ggml.add_bos_token is set, but there is no tokenizer.ggml.bos_token_id")
    if add_eos and eos is None:
        raise ModelError("tokenizer.ggml.add_eos_token is set, but there is no tokenizer.ggml.eos_token_id")
    before, after = [bos] if add_bos and bos else [], [eos] if add_eos and eos else []
    if not before and not after:
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)],
        special_tokens=[(token, vocabulary.ids[token]) for token in {*before, *after}],
    )


def _eos_ids(vocabulary: _Vocabulary) -> tuple[int, ...]:
    eos = vocabulary.id("eos")
    if eos is None:
        raise ModelError("the file lacks tokenizer.ggml.eos_token_id")
    named = [number for number in (vocabulary.id("eot"), vocabulary.id("eom")) if number is not None]
    whole = vocabulary.of_type(TokenType.CONTROL, TokenType.USER_DEFINED)
    by_text = [vocabulary.ids[token] for token in whole if token in ENDINGS]
    return tuple(dict.fromkeys([eos, *named, *sorted(by_text)]))


def _tokenizer_config(vocabulary: _Vocabulary, template: str | None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.token("bos"),
        "eos_token": vocabulary.token("eos"),
        "unk_token": vocabulary.token("unknown"),
        "pad_token": vocabulary.token("padding"),
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    return {key: value for key, value in config.items() if value is not None}


def _chat_templates(metadata: Mapping[str, Any]) -> tuple[str | None, dict[str, str]]:
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): text for key, text in metadata.items() if key.startswith(prefix)}
    for name in named:
        if not re.fullmatch(r"[\w-]+", name):  # it becomes a file's name
            raise ModelError(f"the file has a chat template of the odd name {name!r}")
    default = metadata.get("tokenizer.chat_template")
    for text in (default, *named.values()):
        if not isinstance(text, str | None):
            raise ModelError("tokenizer.chat_template is no text")
    return default, named


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
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

# Letters of the scripts that have cases, as DeepSeek's first vocabularies list them.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-"
    "\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-"
    "\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf"
    "\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-"
    "\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e"
    "\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-"
    "\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-"
    "\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_IDEOGRAPHS = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)


@dataclass(frozen=True, slots=True)
class PretokenizerSplit:
    """`patterns` are applied in turn, each to the pieces that the ones before left."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a piece that is a token is not merged
    begins: bool = False  # texts begin with the BOS token unless the file says otherwise
    nfc: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRETOKENIZERS: dict[str, PretokenizerSplit] = {
    "default": PretokenizerSplit((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "trillion"), PretokenizerSplit((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "minerva-7b"), PretokenizerSplit((r"\p{N}", _GPT2))),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        PretokenizerSplit((_LLAMA3,), whole_words=True, begins=True),
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx"), PretokenizerSplit((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), PretokenizerSplit((_QWEN2,), nfc=True)),
    "qwen35": PretokenizerSplit((_QWEN35,), nfc=True),
    **dict.fromkeys(("megrez", "stablelm2", "hunyuan", "solar-open"), PretokenizerSplit((_QWEN2,))),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), PretokenizerSplit((_BAILING,))),
    "tekken": PretokenizerSplit((_TEKKEN,), whole_words=True, begins=True),
    **dict.fromkeys(("gpt-4o", "minimax-m2"), PretokenizerSplit((_GPT4O,))),
    "seed-coder": PretokenizerSplit((_SEED,)),
    **dict.fromkeys(("glm4", "glm5", "chatglm-bpe"), PretokenizerSplit((_LLAMA3,), whole_words=True)),
    "olmo": PretokenizerSplit((_GPT2,), nfc=True),
    "deepseek-coder": PretokenizerSplit((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}")),
    "deepseek-llm": PretokenizerSplit(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _IDEOGRAPHS,
            r"\p{N}",
        )
    ),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense"),
        PretokenizerSplit((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3)),
    ),
}


def pretokenizer_named(name: object) -> PretokenizerSplit:
    if name is None:
        raise ModelError("the file lacks tokenizer.ggml.pre: it is too old to say how its text is split into tokens")
    if not isinstance(name, str) or name not in PRETOKENIZERS:
        near = nearest_name(str(name), PRETOKENIZERS)
        hint = f" (nearest: {near})" if near else ""
        raise ModelError(
            f"tokenizer.ggml.pre is {name!r}, which is not supported{hint}; supported are: {', '.join(PRETOKENIZERS)}"
        )
    return PRETOKENIZERS[name]
