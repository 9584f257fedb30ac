"""gpt-oss: messages on channels. Thinking, the answer and calls are told apart by the header of each message."""

from __future__ import annotations

from ingot.text.formats.table import Channels, Format

HARMONY = Format(
    name="harmony",
    channels=Channels(
        start="<|start|>",
        role="assistant",
        channel="<|channel|>",
        message="<|message|>",
        ends=("<|end|>", "<|return|>", "<|call|>"),
        call_end="<|call|>",
        thinking=("analysis",),
        recipient="to=functions.",
        call_header=("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"),
    ),
    signs=(("<|channel|>", "<|message|>"),),
    model_types=("gpt_oss",),
)
