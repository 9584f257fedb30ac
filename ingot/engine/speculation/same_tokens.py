"""Whether two models mean the same by a token's number."""

from __future__ import annotations

from pathlib import Path

from ingot.errors import ConfigError
from ingot.text.tokens.tokenizer import Tokenizer


def check_tokenizers(target: Path, draft: Path) -> None:
    """Raises ConfigError, which says where they differ, unless the tokenizers of two models' folders have the same
    tokens under the same numbers."""
    ours, theirs = Tokenizer.load(target), Tokenizer.load(draft)
    asked = f"{draft.name} cannot guess for {target.name}, as their tokenizers differ"
    advice = "Choose a draft of the same family."
    if ours.vocab_size != theirs.vocab_size:
        raise ConfigError(f"{asked}: one has {ours.vocab_size} tokens, the draft's has {theirs.vocab_size}. {advice}")
    for id in range(ours.vocab_size):
        if ours.token_bytes(id) != theirs.token_bytes(id):
            one, other = ours.token_text(id), theirs.token_text(id)
            raise ConfigError(f"{asked}: token {id} is {one!r}, the draft's is {other!r}. {advice}")
