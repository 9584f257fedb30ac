"""The reader's end of a transcript: segments as they are heard, and one end."""

from __future__ import annotations

from ingot.engine.hearing.request import Segment, Transcribed
from ingot.engine.piece_stream import PieceStream


class TranscriptStream(PieceStream[Segment, Transcribed]):
    piece = Segment
