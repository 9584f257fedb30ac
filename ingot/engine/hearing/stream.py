"""The reader's end of a transcript: segments as they are heard, and one end."""

from __future__ import annotations

from ingot.engine.piece_stream import PieceStream
from ingot.engine.speech_request import Segment, Transcribed


class TranscriptStream(PieceStream[Segment, Transcribed]):
    piece = Segment
