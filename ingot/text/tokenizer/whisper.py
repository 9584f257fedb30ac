"""Whisper's vocabulary: which tokens are text, which are times, and which say what is to be done."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

from ingot.errors import ModelError
from ingot.media.languages import LANGUAGES
from ingot.text.tokenizer.detokenizer import spell_token_bytes
from ingot.text.tokenizer.encoder_inputs import load_encoder_vocabulary
from ingot.text.tokenizer.vocabulary import Vocabulary

SECONDS_PER_TIMESTAMP = 0.02  # between two tokens of time
ENGLISH_ONLY_VOCAB = 51864
"""Vocabulary of a model for English alone: it has tokens for languages, but was not trained with them."""
UNSPACED_LANGUAGES = ("zh", "ja", "th", "lo", "my", "yue")
"""Languages that are written without spaces: each character is a word."""
MUSIC_NOTES = "♩♪♫♬♭♮♯"
SUPPRESSED_SIGNS = [
    *'"#()*+/:;<=>@[\\]^_`{|}~「」『』',
    *("<<", ">>", "<<<", ">>>", "--", "---", "-(", "-[", "('", '("', "((", "))", "(((", ")))", "[[", "]]", "{{", "}}"),
    *("♪♪", "♪♪♪"),
]


class WhisperVocabulary:
    """Raises ModelError where a folder's tokenizer is not Whisper's."""

    def __init__(self, vocabulary: Vocabulary, size: int) -> None:
        self._vocabulary = vocabulary
        self.end = self._id("endoftext")
        self.start = self._id("startoftranscript")
        self.before = self._id("startofprev")
        self.transcribe, self.translate = self._id("transcribe"), self._id("translate")
        self.silent = self._id("nospeech", "nocaptions")
        self.untimed = self._id("notimestamps")
        self.first_time = self.untimed + 1
        self.size = size
        self.multilingual = size != ENGLISH_ONLY_VOCAB
        found = {code: vocabulary.id_of(f"<|{code}|>") for code in LANGUAGES}
        self.languages = {code: token for code, token in found.items() if token is not None and self.multilingual}

    @classmethod
    def load(cls, folder: Path, size: int) -> WhisperVocabulary:
        return cls(load_encoder_vocabulary(folder), size)

    def _id(self, *names: str) -> int:
        for name in names:
            found = self._vocabulary.id_of(f"<|{name}|>")
            if found is not None:
                return found
        raise ModelError(f"The tokenizer has no <|{names[0]}|>, which every Whisper model's has")

    def opening(self, language: str, task: str) -> tuple[int, ...]:
        """What a transcript begins with."""
        if not self.multilingual:
            return (self.start,)
        return self.start, self.languages[language], self.translate if task == "translate" else self.transcribe

    def encode(self, text: str) -> list[int]:
        return self._vocabulary.encode(text, add_special=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without what is none."""
        return self._vocabulary.decode([token for token in tokens if token < self.end], skip_special=True)

    def bytes_of(self, token: int) -> bytes:
        """What a token of text stands for; several may be needed for a character."""
        return spell_token_bytes(self._vocabulary, token)

    def suppressed_tokens(self) -> list[int]:
        """Tokens that are suppressed: signs that are not transcribed, and control tokens."""
        found = {self.encode(" -")[0], self.encode(" '")[0]}
        for sign in (*SUPPRESSED_SIGNS, *MUSIC_NOTES):
            for tokens in (self.encode(sign), self.encode(f" {sign}")):
                if len(tokens) == 1 or sign in MUSIC_NOTES:
                    found.add(tokens[0])
        control = (self.transcribe, self.translate, self.start, self.before, self.silent, self.untimed)
        return sorted(found | set(control) | set(self.languages.values()) | {self._id("startoflm")})

    def words(self, tokens: Sequence[int], language: str) -> list[tuple[str, list[int]]]:
        """Tokens of text by words, each with the space before it."""
        pieces = self._characters(tokens)
        if language in UNSPACED_LANGUAGES:
            return pieces
        words: list[tuple[str, list[int]]] = []
        for text, parts in pieces:
            alone = text.startswith(" ") or text.strip() in string.punctuation
            if alone or not words:
                words.append((text, parts))
            else:
                before, earlier = words[-1]
                words[-1] = before + text, earlier + parts
        return words

    def _characters(self, tokens: Sequence[int]) -> list[tuple[str, list[int]]]:
        """Tokens in groups that end where a character does."""
        found: list[tuple[str, list[int]]] = []
        pending: list[int] = []
        for token in tokens:
            pending.append(token)
            try:
                text = b"".join(map(self.bytes_of, pending)).decode()
            except UnicodeDecodeError:
                continue
            found.append((text, pending))
            pending = []
        if pending:
            found.append((self.decode(pending), pending))
        return found
