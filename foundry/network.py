"""The models in PyTorch: transformers' own classes, and the MTP head that it leaves out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5GatedDeltaNet,
    Qwen3_5RMSNorm,
)

from foundry.delta import GatedDelta
from foundry.rows import SHORT
from foundry.shapes import Shape

DRILL_WINDOW = 4
"""How far sliding layers see in recall drills. With their whole window they learn to look keys up themselves, and
then nothing beyond it is ever found; so near-sighted, they leave that to the layers that see everything."""

_FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
}


class Network(nn.Module):
    """A causal language model; with `mtp`, also the head that guesses one token further."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        make_config, make_model = _FAMILIES[shape.family]
        self.config = make_config(**shape.config, attn_implementation="sdpa")
        self.lm = make_model(self.config)
        _swap_delta_layers(self.lm)
        self.mtp = Predictor(self.config) if shape.mtp else None

    def compile_layers(self) -> None:
        """Compile each decoder layer on its own: layers of a kind share the result."""
        for layer in [*self.lm.model.layers, *(self.mtp.layers if self.mtp is not None else [])]:
            layer.compile(dynamic=False)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """The normed last hidden states, which both the output head and the MTP head read."""
        masks = self._masks(tokens.shape[1], tokens.device)
        return self.lm.model(input_ids=tokens, attention_mask=masks, use_cache=False).last_hidden_state

    def _masks(self, length: int, device: torch.device) -> dict[str, torch.Tensor | None]:
        """Ready masks, none where plain causality is meant: making them in transformers waits for the device."""
        masks: dict[str, torch.Tensor | None] = {"full_attention": None, "linear_attention": None}
        if "sliding_attention" in self.config.layer_types:
            drilled = self.training and length < SHORT
            places = torch.arange(length, device=device)
            back = places[:, None] - places[None, :]
            window = DRILL_WINDOW if drilled else self.config.sliding_window
            masks["sliding_attention"] = ((back >= 0) & (back < window))[None, None]
        return masks

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm.lm_head(hidden)

    def further(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The MTP head's states: at place i, from the hidden state there and token i + 1, what gives token i + 2."""
        assert self.mtp is not None
        positions = torch.arange(tokens.shape[1] - 1, device=tokens.device)
        angles = self.lm.model.rotary_emb(hidden, positions.view(1, 1, -1).expand(3, tokens.shape[0], -1))
        return self.mtp(hidden[:, :-1], self.lm.model.embed_tokens(tokens[:, 1:]), angles)


def _swap_delta_layers(model: Any) -> None:
    for number, layer in enumerate(model.model.layers):
        if isinstance(plain := layer._modules.get("linear_attn"), Qwen3_5GatedDeltaNet):
            swift = GatedDelta(model.config, number)
            swift.load_state_dict(plain.state_dict())
            layer.linear_attn = swift


class Predictor(nn.Module):
    """One full-attention layer over the pair (embedding of the next token, hidden state)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(width, eps=config.rms_norm_eps)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(width, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))])
        self.norm = Qwen3_5RMSNorm(width, eps=config.rms_norm_eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, angles: Any) -> torch.Tensor:
        pair = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], dim=-1)
        states = self.fc(pair)
        for layer in self.layers:
            states = layer(states, position_embeddings=angles, attention_mask=None)
        return self.norm(states)
