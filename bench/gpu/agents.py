"""What agents wait for: the next turn of a long conversation, computed, from memory and from disk; and what a draft
head gains whose draft tokens are right as often as is given."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.engine import requests, started
from bench.family_shapes import REAL, family_config, random_model
from bench.gpu.goals import Figure
from bench.gpu.scale import Scale
from bench.random_models import build, decided
from bench.restart import first_token_s
from bench.restore import ended, request
from bench.speculate import NOBODY, in_turns, ratio, run
from ingot.cache.disk.backend import DiskBackend
from ingot.cache.disk.store import DiskLimits, RecordStore
from ingot.engine.engine import Engine

NEXT_TURN = 200
"""Tokens of a turn behind what was computed before."""
ROUNDS = 3
ACCEPTANCE = 0.8
"""How often a draft token is right that follows right ones."""


def turn(scale: Scale) -> Iterator[Figure]:
    """The first token of a conversation's next turn, on the shape of Qwen3.5 35B-A3B."""
    family = "qwen3.5-moe"
    changes = {"max_position_embeddings": 2 * scale.turn}
    config = family_config(family, changes, {} if scale.tiny else REAL[family])
    dice = random.Random(0)
    tokens = [dice.randrange(config["vocab_size"] - 1) for _ in range(scale.turn)]
    with tempfile.TemporaryDirectory() as folder:
        engine = _caching(family, config, changes, scale, Path(folder))
        ended(engine, request("warm", tokens[: scale.prompt], output=8, cache=False))
        computed, _ = first_token_s(engine, "computed", tokens, cache=True)
        name = f"{family}, {scale.turn} tokens"
        yield Figure(f"{name}, first token", computed, "s")
        memory = statistics.median(_next_turn_s(engine, tokens, dice, config) for _ in range(ROUNDS))
        yield Figure(f"{name}, next turn from memory over computing", computed / memory, "x")
        engine.close()
        engine = _caching(family, config, changes, scale, Path(folder))
        ended(engine, request("warm", tokens[: scale.prompt], output=8, cache=False))
        disk = _next_turn_s(engine, tokens, dice, config)
        found = engine.kept.status("").totals.disk
        assert found is not None and found.promoted_bytes, "nothing was read from disk"
        yield Figure(f"{name}, next turn from disk over computing", computed / disk, "x")
        yield Figure(f"{name}, read from disk", found.promoted_bytes / 1e9, "GB")
        engine.close()


def _caching(family: str, config: dict[str, Any], changes: dict[str, Any], scale: Scale, folder: Path) -> Engine:
    def disk() -> DiskBackend:
        return DiskBackend.of(RecordStore(folder, {"model": family}, DiskLimits(1 << 40, sync=False), b"bench"))

    return started(
        family,
        config,
        lambda: random_model(family, changes=changes, real=not scale.tiny)[1],
        memory_gb=scale.memory_gb,
        context=2 * scale.turn,
        cache_gb=scale.memory_gb / 2,
        disk=disk,
    )


def _next_turn_s(engine: Engine, tokens: Sequence[int], dice: random.Random, config: dict[str, Any]) -> float:
    further = [dice.randrange(config["vocab_size"] - 1) for _ in range(NEXT_TURN)]
    spent, matched = first_token_s(engine, f"turn-{further[0]}", [*tokens, *further], cache=True)
    assert matched >= len(tokens) - 1, f"only {matched} tokens were reused"
    return spent


def mtp(scale: Scale) -> Iterator[Figure]:
    """Decoding with and without the head, on the shape of Qwen3.5 9B in 4 bits, alternating."""
    import mlx.core as mx
    import mlx.nn as nn

    family = "qwen3.5"
    config = family_config(family, {}, {} if scale.tiny else REAL[family])

    def make() -> Any:
        model = decided(config, dtype=mx.bfloat16)
        nn.quantize(model, group_size=64, bits=4)
        mx.eval(model.parameters())
        return model

    engine = started(
        family,
        config,
        make,
        memory_gb=scale.memory_gb,
        fixed_draft_tokens=2 if scale.tiny else None,  # the time of a few steps of a tiny model decides nothing
        change=partial(with_given_head, config, rate=ACCEPTANCE),
    )
    asked = requests("mtp", 1, scale.prompt, 2 * scale.output, config["vocab_size"] - 1)
    plainly = [replace(each, speculate=NOBODY) for each in asked]
    for _ in range(ROUNDS):
        run(engine, asked)
    before = engine.speculation.accepted_tokens, engine.speculation.draft_tokens
    plain, speculated = in_turns(partial(run, engine, plainly), partial(run, engine, asked), ROUNDS)
    accepted = engine.speculation.accepted_tokens - before[0]
    drafted = engine.speculation.draft_tokens - before[1]
    tokens = statistics.median(each.tokens / each.wall for each in plain)
    yield Figure(f"{family} 4-bit, 1 stream without its head", tokens, "tok/s")
    yield Figure(
        f"{family} 4-bit, 1 stream with a head that is right in {ACCEPTANCE:.0%}", ratio(speculated, plain), "x"
    )
    yield Figure(f"{family} 4-bit, draft tokens that were accepted", accepted / max(1, drafted), "")
    engine.check()
    engine.close()


def with_given_head(config: dict[str, Any], adapter: Any, *, rate: float, wiring: str = "qwen3_5") -> Any:
    """The adapter with a head, wired like this family's, that computes all that its model's head would, and is right as
    often as is given. Of a `decided` model a token's embedding is the hidden state that predicts the next one, and the
    head hands on what it looks up: for some tokens, the embedding of others."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten

    from ingot.models.draft_heads.mtp import MtpHead, prepare_head, with_draft_head
    from ingot.models.families.registry import mtp_spec_of
    from ingot.models.layers.lm_head import lm_head_of, token_embedding_of
    from ingot.models.layers.modules import adopt_module

    spec, size, vocab = mtp_spec_of(wiring), config["hidden_size"], config["vocab_size"]
    assert spec is not None
    embedding, numbers = token_embedding_of(adapter.model), mx.arange(vocab)
    assert embedding is not None
    looked_up = mx.where(mx.random.uniform(shape=(vocab,), key=mx.random.key(5)) < rate, numbers, (numbers + 7) % vocab)
    changed = adopt_module(embedding, type(embedding))
    changed.update({name: array[looked_up] for name, array in embedding.parameters().items()})
    alone = build({**config, **spec.alone}, dtype=mx.bfloat16)
    head = MtpHead(spec, alone, size=size, eps=config["rms_norm_eps"])
    head.share_modules(changed, lm_head_of(adapter.model))
    outputs = ("o_proj.weight", "down_proj.weight")
    small = [(name, array * 1e-2) for name, array in tree_flatten(head.parameters()) if name.endswith(outputs)]
    head.update(tree_unflatten(small))
    handed_on = [mx.zeros((size, size)), mx.eye(size)]
    head.joint.weight = mx.concatenate(handed_on if spec.hidden_first else handed_on[::-1], axis=1)
    prepare_head(head, adapter, None, lambda path: True)
    return with_draft_head(adapter, head)
