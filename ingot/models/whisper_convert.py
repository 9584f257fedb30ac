"""OpenAI's own Whisper checkpoints as model folders: config.json, model.safetensors and tokenizer.json, under the names
that Hugging Face gives them. Needs no mlx."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ingot.errors import ModelError
from ingot.media.languages import LANGUAGES
from ingot.models.files import tensor_files
from ingot.models.files.progress import Progress
from ingot.models.files.tensor_files import NamedTensor, write_safetensors

ALIGNMENT_HEADS = {
    # [layer, head] of the cross-attention that follows the audio in time, as OpenAI published them.
    "tiny.en": [[1, 0], [2, 0], [2, 5], [3, 0], [3, 1], [3, 2], [3, 3], [3, 4]],
}
TASK_TOKENS = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
TIMESTAMP_STEP = 2
"""Hundredths of a second between two timestamps."""
TIMESTAMP_COUNT = 1501


def convert_whisper_checkpoint(weights: Path, ranks: Path, target: Path, progress: Progress) -> None:
    """Fill the folder `target` with the model in `weights`, whose tokens are those of the tiktoken file `ranks`."""
    progress(f"converting {weights.stem}")
    archive = tensor_files.read_torch_archive(weights)
    try:
        dims, tensors = archive["dims"], archive["model_state_dict"]
        config = hugging_face_config(dims)
    except (KeyError, TypeError) as error:
        raise ModelError(f"{weights.name} is no Whisper checkpoint of OpenAI's") from error
    named = {f"model.{hugging_face_name(name)}": tensor for name, tensor in tensors.items()}
    write_safetensors(target, ([NamedTensor(name, tensor)] for name, tensor in named.items()), list(named))
    (target / "config.json").write_text(json.dumps(config, indent=2))
    heads = {"alignment_heads": ALIGNMENT_HEADS[weights.stem]} if weights.stem in ALIGNMENT_HEADS else {}
    (target / "generation_config.json").write_text(json.dumps(heads))
    whisper_tokenizer(read_tiktoken_ranks(ranks), int(dims["n_vocab"])).save(str(target / "tokenizer.json"))


def read_tiktoken_ranks(file: Path) -> dict[bytes, int]:
    """A tiktoken file: a token in base 64 and its rank, line by line."""
    try:
        lines = [line.split() for line in file.read_bytes().splitlines() if line]
        return {base64.b64decode(token): int(rank) for token, rank in lines}
    except ValueError as error:
        raise ModelError(f"{file.name} is no tiktoken file") from error


def whisper_tokenizer(ranks: Mapping[bytes, int], vocab: int) -> Tokenizer:
    """The tokenizer of a model with `vocab` tokens: GPT-2's, and the special tokens of Whisper."""
    letters = _byte_letters()
    spelled = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    merges = [
        ("".join(letters[byte] for byte in left), "".join(letters[byte] for byte in right))
        for left, right in bpe_merges_of(ranks)
    ]
    tokenizer = Tokenizer(models.BPE(vocab=spelled, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    languages = vocab - len(ranks) - 2 - len(TASK_TOKENS) - TIMESTAMP_COUNT
    names = ["endoftext", "startoftranscript", *islice(LANGUAGES, languages), *TASK_TOKENS]
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True, normalized=False) for name in names])
    times = [f"<|{at * TIMESTAMP_STEP / 100:.2f}|>" for at in range(TIMESTAMP_COUNT)]
    tokenizer.add_tokens([AddedToken(time, normalized=False) for time in times])
    if tokenizer.get_vocab_size() != vocab:
        raise ModelError(f"The tokens do not fit a model of {vocab}: there are {tokenizer.get_vocab_size()}")
    return tokenizer


def bpe_merges_of(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The pairs that byte pair encoding joins, in order: each longer token, as those of lower rank split it."""
    for token, rank in sorted(ranks.items(), key=lambda found: found[1]):
        if len(token) == 1:
            continue
        parts = [token[at : at + 1] for at in range(len(token))]
        while len(parts) > 2:
            joined = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
            at = joined.index(min(joined))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        yield parts[0], parts[1]


def _byte_letters() -> dict[int, str]:
    """GPT-2's letter for each byte: itself where it can be printed, the others in order."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    own = {ord(letter): letter for letter in alphabet if ord(letter) < 256}
    others = sorted(letter for letter in alphabet if ord(letter) >= 256)
    return own | dict(zip((byte for byte in range(256) if byte not in own), others, strict=True))


WHISPER_RENAMED = (
    (r"\.blocks\.", ".layers."),
    (r"\.cross_attn_ln\.", ".encoder_attn_layer_norm."),
    (r"\.attn_ln\.", ".self_attn_layer_norm."),
    (r"\.mlp_ln\.", ".final_layer_norm."),
    (r"\.cross_attn\.", ".encoder_attn."),
    (r"\.attn\.", ".self_attn."),
    (r"\.query\.", ".q_proj."),
    (r"\.key\.", ".k_proj."),
    (r"\.value\.", ".v_proj."),
    (r"\.out\.", ".out_proj."),
    (r"\.mlp(\.0|1)\.", ".fc1."),
    (r"\.mlp(\.2|2)\.", ".fc2."),
    (r"\.(ln_post|ln)\.", ".layer_norm."),
    (r"\.token_embedding\.", ".embed_tokens."),
    (r"\.positional_embedding$", ".embed_positions.weight"),
)


def hugging_face_name(name: str) -> str:
    for pattern, now in WHISPER_RENAMED:
        name = re.sub(pattern, now, name)
    return name


def hugging_face_config(dims: Mapping[str, Any]) -> dict[str, Any]:
    """Raises KeyError for dimensions that are none of Whisper's."""
    return {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "activation_function": "gelu",
        "num_mel_bins": dims["n_mels"],
        "max_source_positions": dims["n_audio_ctx"],
        "d_model": dims["n_audio_state"],
        "encoder_attention_heads": dims["n_audio_head"],
        "encoder_layers": dims["n_audio_layer"],
        "encoder_ffn_dim": 4 * dims["n_audio_state"],
        "vocab_size": dims["n_vocab"],
        "max_target_positions": dims["n_text_ctx"],
        "decoder_attention_heads": dims["n_text_head"],
        "decoder_layers": dims["n_text_layer"],
        "decoder_ffn_dim": 4 * dims["n_text_state"],
    }
