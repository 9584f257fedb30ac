"""The tokenizer that all models share: byte-level BPE of 4096 tokens, digits and punctuation always on their own.

Punctuation and white space never join a word, so that a string has the same tokens wherever it is quoted, which is
what makes exact copying learnable for models this small. `python -m foundry.vocabulary` trains it and writes
foundry/tokenizer/tokenizer.json.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from foundry import corpus, dialect
from foundry.chat_lessons import chat_lesson
from foundry.lesson import seeded
from foundry.tool_lessons import tool_lesson

PATH = Path(__file__).parent / "tokenizer" / "tokenizer.json"
SIZE = 4096
PIECES = r" ?\p{L}+|\p{N}|[^\s\p{L}\p{N}]|\s"
DOCUMENT_END = "<|endoftext|>"
SPECIAL = (
    DOCUMENT_END, "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
    "[CLS]", "[SEP]", "[PAD]", "[MASK]", "[UNK]",
)  # fmt: skip
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Single tokens that are part of the text, so that decoding keeps them."""
SAMPLE = 20_000


def main() -> None:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - len(SPECIAL) - len(MARKS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_texts(), trainer)
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    assert made.get_vocab_size() == SIZE
    PATH.parent.mkdir(exist_ok=True)
    made.save(str(PATH))
    print(f"{made.get_vocab_size()} tokens")


def _texts() -> Iterator[str]:
    yield from corpus.documents(held_out=False)
    for seed in range(SAMPLE):
        make = (chat_lesson, tool_lesson)[seed % 2]
        lesson, written = make(seeded(seed)), dialect.DIALECTS[seed // 2 % 2]
        yield re.sub(r"<\|\w+\|>|</?think>|</?tool_\w+>", "", dialect.prompt(lesson, written))


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(PATH))


@cache
def recall_words() -> dict[str, int]:
    """Tokens that are a whole lower-case word with its space: the keys and values of the recall probe."""
    vocabulary = sorted(tokenizer().get_vocab().items())
    return {token[1:]: number for token, number in vocabulary if re.fullmatch("Ġ[a-z]{3,12}", token)}


def encoded(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def batches(texts: list[str], size: int = 256) -> Iterator[list[int]]:
    for start in itertools.count(0, size):
        if not (some := texts[start : start + size]):
            return
        for one in tokenizer().encode_batch(some, add_special_tokens=False):
            yield one.ids


if __name__ == "__main__":
    main()
