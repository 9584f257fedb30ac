"""Encoders on the wire: which one a request means, and what its answer tells of the work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import UNSET, Struct, UnsetType

from ingot.engine.encoder_request import Encoded, EncodingRequest, Role
from ingot.errors import BadRequest, ModelNotFound
from ingot.protocol.schema.fields import BodyReading
from ingot.text.tokenizer.encoder_inputs import EncoderInput, TextInputs

if TYPE_CHECKING:
    from ingot.engine.pooling_batches import OfferedEncoder
    from ingot.protocol.side_served import SideServed

OneInput = str | tuple[int, ...]
WAYS = {
    "embedding": "No embedding model is served here. Start ingot with --embedding-model MODEL, such as "
    "--embedding-model all-minilm-l6-v2, a folder or a hub id.",
    "rerank": "No reranking model is served here. Start ingot with --rerank-model MODEL: a folder or a hub id of a "
    "cross-encoder or a Qwen3-Reranker.",
}


def encoder_for(served: SideServed, role: Role) -> OfferedEncoder:
    """The encoder that is served for `role`; a 404 that says how to get one where there is none."""
    if role not in served.encoders:
        raise ModelNotFound(WAYS[role], param="model")
    return served.encoders[role]


@dataclass(frozen=True, slots=True)
class EncodingTask:
    """A body, read: what the engine is to compute, and how the answer's body is made of it."""

    request: EncodingRequest
    told: Callable[[Encoded], bytes]


def encoding_request(
    served: SideServed, role: Role, request_id: str, inputs: Sequence[EncoderInput], timeout: float | None = None
) -> EncodingRequest:
    deadline = time.monotonic() + (served.terms.timeout_s if timeout is None else timeout)
    return EncodingRequest(request_id, role, tuple(inputs), served.tenant, deadline)


def inputs_of(
    served: SideServed, given: Sequence[OneInput], param: str, prompt: str | None = None, *, truncate: bool
) -> list[EncoderInput]:
    """What the embedding model reads: texts, or its own tokens. A refusal names the one that is to blame."""
    inputs = encoder_for(served, "embedding").inputs
    assert isinstance(inputs, TextInputs), "the embedding model reads single texts"
    made = []
    for at, one in enumerate(given):
        try:
            if isinstance(one, str):
                made.append(inputs.read(one, prompt=prompt, truncate=truncate))
            else:
                made.append(inputs.take(one, truncate=truncate))
        except BadRequest as error:
            error.param = param if len(given) == 1 else f"{param}.{at}"
            raise
    return made


class EncodingTiming(Struct):
    """Seconds spent waiting and computing."""

    queue_s: float
    compute_s: float


class EncodingReceipt(Struct, kw_only=True):
    """What the server did beyond the answer. `truncated` inputs lost their end, as the request allowed; vectors were
    `cut_from` so many numbers, as it asked."""

    timing: EncodingTiming
    truncated: int | UnsetType = UNSET
    cut_from: int | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET

    @classmethod
    def of(
        cls, encoded: Encoded, request: EncodingRequest, reading: BodyReading, *, cut_from: int | None = None
    ) -> EncodingReceipt:
        return cls(
            timing=EncodingTiming(round(encoded.queue_s, 6), round(encoded.compute_s, 6)),
            truncated=sum(piece.cut for piece in request.inputs) or UNSET,
            cut_from=cut_from or UNSET,
            ignored=reading.ignored or UNSET,
        )
