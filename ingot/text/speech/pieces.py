"""Texts in pieces that are spoken at once: sentences, or clauses of long ones."""

from __future__ import annotations

from collections.abc import Iterable

ENDS = frozenset(".!?…")
PAUSES = frozenset(",;:—")
MARKS = ENDS | PAUSES | frozenset('"“”() ')

AT_ONCE = 120
"""Phonemes that are spoken at once at most: some ten seconds. More sound no better, and take memory."""
LEAST = 30
"""Fewer are spoken together with what follows: a word by itself sounds clipped."""


def gathered(said: Iterable[str], most: int, speed: float) -> tuple[str, ...]:
    """Pieces of the phonemes of words, and of marks. Slow speech has shorter ones: sound is what takes memory."""
    most = max(1, min(most, int(AT_ONCE * min(1.0, speed))))
    pieces: list[str] = []
    piece = ""
    pause = 0  # where the piece could be cut last
    for each in said:
        for part in (each[at : at + most] for at in range(0, len(each), most)):
            while len(joined(piece, part)) > most:
                cut = pause or len(piece)
                pieces.append(piece[:cut])
                piece, pause = piece[cut:].lstrip(), 0
            piece = joined(piece, part)
            if part in PAUSES:
                pause = len(piece)
                if not pieces and len(piece) >= LEAST:  # so that there is sound before the sentence ends
                    pieces.append(piece)
                    piece, pause = "", 0
            elif part in ENDS and len(piece) >= LEAST:
                pieces.append(piece)
                piece, pause = "", 0
    return tuple(each for each in (*pieces, piece) if each.strip())


def joined(piece: str, part: str) -> str:
    """Words stand apart; marks stand where the word before them ends."""
    apart = piece and part not in MARKS and piece[-1] not in "“("
    return f"{piece} {part}" if apart else piece + part
