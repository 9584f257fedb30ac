"""Whether two models mean the same by a token's number."""

from __future__ import annotations

from pathlib import Path

from ingot.errors import ConfigError
from ingot.text.tokenizer.tokenizer import Tokenizer


def check_tokenizers(target: Path, draft: Path) -> None:
    """Raises ConfigError, which says where they differ, unless the tokenizers of two models' folders have the same
    tokens under the same numbers."""
    found = difference(Tokenizer.load(target), Tokenizer.load(draft))
    if found is not None:
        raise ConfigError(
            f"{draft.name} cannot guess for {target.name}, as their tokenizers differ: {found}. Choose a draft of the "
            "same family."
        )


def difference(ours: Tokenizer, theirs: Tokenizer) -> str | None:
    """Where they differ first, in words."""
    if ours.vocab_size != theirs.vocab_size:
        return f"one has {ours.vocab_size} tokens, the draft's has {theirs.vocab_size}"
    for id in range(ours.vocab_size):
        if ours.token_bytes(id) != theirs.token_bytes(id):
            return f"token {id} is {ours.token_text(id)!r}, the draft's is {theirs.token_text(id)!r}"
    return None
