"""Compiles grammars for the server to see whether they can be, in a process that may crash or be killed for it.

Run as `python -m`, so it imports little. Reads a line of JSON that describes the vocabulary, then a grammar a line;
answers each with a line of JSON: null, or what is wrong with it.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
import threading
from typing import Any, TextIO

from llguidance import LLMatcher, LLTokenizer

from ingot.text.grammar.limits import COMPILE_S, parser_limits

STACK_BYTES = 4 << 20  # less than any thread of the server has: what fits here will not crash it
MEMORY_BYTES = 4 << 30
STEPS = 24  # tokens of a random answer, to find out early about a grammar that compiles but cannot be followed


class ByteVocabulary:
    """A vocabulary of single bytes behind the model's own special tokens, under their own numbers."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocab: int, special: dict[str, int], stop: int) -> None:
        self._first = max(vocab, stop + 1)
        self.tokens = [b""] * self._first + [bytes([byte]) for byte in range(256)]
        for text, id in special.items():
            self.tokens[id] = text.encode()
        self.special_token_ids = sorted({*special.values(), stop})
        self.eos_token_id = stop
        self.token_ids = (*self.special_token_ids, *range(self._first, self._first + 256))

    def __call__(self, text: str) -> list[int]:
        return [self._first + byte for byte in text.encode()]


def grammar_problem(vocabulary: ByteVocabulary, library: LLTokenizer, grammar: str) -> str | None:
    matcher = LLMatcher(library, grammar, log_level=0, limits=parser_limits())
    chance = random.Random(0)
    for _ in range(STEPS):
        mask = matcher.compute_bitmask()
        allowed = [id for id in vocabulary.token_ids if mask[id >> 3] >> (id & 7) & 1]
        if matcher.is_stopped() or not allowed:
            break
        matcher.consume_token(chance.choice(allowed))
    return matcher.get_error() or None


def serve_compiler(lines: TextIO, answers: TextIO) -> None:
    described: dict[str, Any] = json.loads(lines.readline())
    vocabulary = ByteVocabulary(**described)
    library = LLTokenizer(vocabulary, slices=[])  # type: ignore[arg-type]
    for line in lines:
        # It ends the process: the library cannot be interrupted.
        signal.setitimer(signal.ITIMER_PROF, COMPILE_S)
        found = grammar_problem(vocabulary, library, json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=serve_compiler, args=(sys.stdin, sys.stdout))
    worker.start()
    worker.join()


if __name__ == "__main__":
    main()
