"""Tries grammars before the server compiles them.

The library that compiles them bounds most of its work, but not all of it: there are short schemas for which it runs
for minutes, and ones that crash it. So each grammar is compiled in a process of its own first, which may take so much
processor time and no more.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import threading
import time

from ingot.errors import Unavailable
from ingot.text.grammar.limits import COMPILE_WALL_S, COMPILERS, WAIT_S
from ingot.text.grammar.vocabulary import Lexicon

log = logging.getLogger("ingot.grammar")

START_S = 20.0
"""Longest that the process may take to start, on a machine that is busy with other things."""


class Trial:
    """One process, started when first needed and again after it was killed. For any thread; one tries at a time."""

    def __init__(self, lexicon: Lexicon) -> None:
        self._lexicon = lexicon
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def problem(self, grammar: str) -> str | None:
        """What is wrong with the grammar; None if nothing is. Raises Unavailable when too many others are tried."""
        if not self._lock.acquire(timeout=WAIT_S):
            raise Unavailable("The server is busy compiling other grammars", retry_after=WAIT_S)
        try:
            return self._tried(grammar)
        finally:
            self._lock.release()

    def close(self) -> None:
        with self._lock:
            self._end()

    @property
    def idle(self) -> bool:
        return not self._lock.locked()

    def _tried(self, grammar: str) -> str | None:
        if self._process is None:
            self._start()
        answer = self._asked(json.dumps(grammar), COMPILE_WALL_S)
        if answer is None:
            log.warning("a grammar of %d characters took too long to compile, or crashed the compiler", len(grammar))
            self._end()
            return "it is too complex to compile"
        found: str | None = json.loads(answer)
        return found

    def _start(self) -> None:
        # -P: what lies in the working directory is nothing to import.
        command = [sys.executable, "-P", "-m", "ingot.text.grammar.compile_process"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        lexicon = self._lexicon
        stop = min(lexicon.stops, default=lexicon.vocab)
        described = {"vocab": lexicon.vocab, "special": lexicon.special_ids, "stop": stop}
        if self._asked(json.dumps(described) + '\n"start: /a/"', START_S) is None:
            self._end()
            raise Unavailable("The process that compiles grammars does not start; the server's log says why")

    def _asked(self, line: str, seconds: float) -> bytes | None:
        """The answer to a line, or None if the process ends or takes too long."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        deadline = time.monotonic() + seconds
        answer = b""
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready or not (read := os.read(self._process.stdout.fileno(), 1 << 16)):
                return None
            answer += read
        return answer

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.communicate()
        self._process = None


class Trials:
    """As many processes as grammars may be tried at once. For any thread."""

    def __init__(self, lexicon: Lexicon) -> None:
        self._trials = [Trial(lexicon) for _ in range(COMPILERS)]

    def problem(self, grammar: str) -> str | None:
        """As `Trial` has it, in the first process that is idle, so that no more are started than are needed."""
        trial = next((each for each in self._trials if each.idle), self._trials[0])
        return trial.problem(grammar)

    def close(self) -> None:
        for trial in self._trials:
            trial.close()
