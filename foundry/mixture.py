"""Make `mixture` of `dense`: `python -m foundry.mixture --minutes M --out DIR`. Needs mlx, and neither torch nor a GPU.

Sparse upcycling. Each MLP becomes 64 experts of an eighth of its width, of which a token has eight. A router begins as
the centres of 64 clusters of the states that it sees, an expert as those neurons of the MLP that do most for the tokens
of its clusters, with an output fitted to what the MLP says. Then all of it is trained towards the logits of `dense`,
with the usual loss for experts that are used too unevenly. What is written is quantised: experts to 4 bits, the rest to 8.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from foundry import corpus, vocabulary
from foundry.package import MODELS, config
from foundry.recall import recall_rows
from foundry.rows import lesson, packed, prose_tokens
from foundry.shapes import SHAPES
from ingot.upstream import import_upstream, load_model

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map

MODEL = "mixture"
RATE = SHAPES[MODEL].rate
ROW, ROWS = 512, 2
SAMPLE_ROWS = 48
"""Of which routers and experts are made, a third of each task."""
CLUSTERING_ROUNDS, FITTING_ROUNDS = 10, 2
RIDGE = 1e-2
SPREAD = 2.0
"""How far a token's first expert begins before its eighth, in logits."""
BALANCE = 0.01
WARM_STEPS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the foundry's mixture of experts.")
    parser.add_argument("--minutes", type=float, default=20.0, help="of training, after routers and experts were made")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    mx.set_default_device(mx.cpu)
    mx.random.seed(asked.seed)
    rows = training_rows(asked.seed)
    dense = widened(load_model(MODELS / SHAPES[MODEL].made_of)[0])
    mixture = upcycled(dense, mx.array(np.stack([next(rows) for _ in range(SAMPLE_ROWS)])), asked.seed)
    trainer = Trainer(mixture, dense, rows)
    trainer.run(asked.minutes * 60)
    figures, parameters = held_out_figures(mixture), sum(each.size for _, each in tree_flatten(mixture.parameters()))
    quantise(mixture)
    asked.out.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(mixture.parameters()))
    mx.save_safetensors(str(asked.out / "model.safetensors"), weights, {"format": "mlx"})
    record = {
        "model": MODEL,
        "parameters": parameters,
        "seed": asked.seed,
        "minutes": asked.minutes,
        "versions": {
            "python": platform.python_version(),
            "mlx": version("mlx"),
            "mlx-lm": version("mlx-lm"),
            "device": platform.machine(),
        },
        "steps": trainer.steps,
        "tokens": trainer.steps * ROWS * ROW,
        "figures": figures,
        "log": trainer.log,
    }
    (asked.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(figures), flush=True)


def training_rows(seed: int) -> Iterator[np.ndarray]:
    """Prose, lessons and recall, in turns."""
    chance, prose = np.random.default_rng(seed), corpus.documents(held_out=False)
    lessons = (lesson(int(chance.integers(1 << 39))) for _ in count())
    while True:
        tokens = list[int]()
        while len(tokens) < ROW:
            tokens += vocabulary.encoded(prose[int(chance.integers(len(prose)))] + vocabulary.DOCUMENT_END)
        yield np.array(tokens[:ROW])
        yield packed(lessons, SHAPES[MODEL].style, 2 * ROW, count=1).tokens[0][:ROW]
        yield recall_rows(chance, 1, ROW, int(chance.integers(16, 150))).tokens[0]


def widened(model: Any) -> Any:
    model.update(tree_map(lambda each: each.astype(mx.float32), model.parameters()))
    mx.eval(model.parameters())
    return model


def upcycled(dense: Any, rows: mx.array, seed: int) -> Any:
    """A mixture with the attention of `dense` and experts made of its MLPs, by what both see of these rows."""
    family = import_upstream("mlx_lm.models.qwen3_moe")
    mixture = family.Model(family.ModelArgs.from_dict(config(SHAPES[MODEL])))
    kept = [(name, array) for name, array in tree_flatten(dense.parameters()) if ".mlp." not in name]
    mixture.load_weights(kept, strict=False)
    chance, hidden = np.random.default_rng(seed), dense.model.embed_tokens(rows)
    for number, (layer, old) in enumerate(zip(mixture.model.layers, dense.model.layers, strict=True)):
        hidden = mx.concatenate([_attended(layer, some) for some in mx.split(hidden, SAMPLE_ROWS // 4)])
        x = layer.post_attention_layernorm(hidden)
        flat = np.array(x.reshape(-1, x.shape[-1]))
        layer.mlp.gate.weight = mx.array(router_of(flat, layer.mlp.num_experts, layer.mlp.top_k, chance))
        _make_experts(layer.mlp, old.mlp, flat)
        made, wanted = layer.mlp(x), old.mlp(x)
        hidden = hidden + made
        mx.eval(hidden)
        print(
            f"layer {number}: {float(mx.linalg.norm(made - wanted) / mx.linalg.norm(wanted)):.3f} of the MLP is lost",
            flush=True,
        )
    return mixture


def _attended(layer: Any, hidden: mx.array) -> mx.array:
    found: mx.array = hidden + layer.self_attn(layer.input_layernorm(hidden), "causal", None)
    mx.eval(found)  # scores of all rows at once would take memory
    return found


def router_of(x: np.ndarray, experts: int, top: int, chance: np.random.Generator) -> np.ndarray:
    """Centres of clusters of directions, of a length that spreads the logits of a token's experts by SPREAD."""
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    centres = x[chance.choice(len(x), experts, replace=False)]
    for _ in range(CLUSTERING_ROUNDS):
        nearest = np.argmax(x @ centres.T, axis=1)
        sums = np.zeros_like(centres)
        np.add.at(sums, nearest, x)
        empty = np.bincount(nearest, minlength=experts) == 0
        sums[empty] = x[chance.choice(len(x), int(empty.sum()), replace=False)]
        centres = sums / np.linalg.norm(sums, axis=1, keepdims=True)
    best = np.sort(x @ centres.T, axis=1)
    # The norm before the router makes all states about as long as the root of their width.
    return (centres * SPREAD / np.mean(best[:, -1] - best[:, -top]) / np.sqrt(x.shape[1])).astype(np.float32)


def _make_experts(block: Any, mlp: Any, x: np.ndarray) -> None:
    """Each expert has the neurons that do most for its tokens. Their outputs are fitted one expert after another to what
    the others leave of the MLP's answer."""
    gate, up, down = (np.array(each.weight) for each in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    inner = x @ gate.T
    active = inner / (1 + np.exp(-inner)) * (x @ up.T)
    wanted = active @ down.T
    share = routing_shares(block, mx.array(x))
    width = block.switch_mlp.gate_proj.weight.shape[1]
    worth = (np.abs(active) * np.linalg.norm(down, axis=0)).T @ share
    neurons = np.argsort(-worth, axis=0)[:width].T
    outputs, left = np.zeros((len(neurons), width, x.shape[1]), np.float32), wanted.copy()
    for _ in range(FITTING_ROUNDS):
        for expert, chosen in enumerate(neurons):
            own = np.flatnonzero(share[:, expert])
            if not own.size:
                continue
            said = active[np.ix_(own, chosen)] * share[own, expert, None]
            target = left[own] + said @ outputs[expert]
            gram = said.T @ said
            gram += RIDGE * np.trace(gram) / width * np.eye(width, dtype=np.float32)
            outputs[expert] = np.linalg.solve(gram, said.T @ target)
            left[own] = target - said @ outputs[expert]
    experts = block.switch_mlp
    experts.gate_proj.weight, experts.up_proj.weight = mx.array(gate[neurons]), mx.array(up[neurons])
    experts.down_proj.weight = mx.array(outputs.transpose(0, 2, 1))


def routing_shares(block: Any, x: mx.array) -> np.ndarray:
    """[tokens, experts]: how much an expert counts for a token, zero where it is not chosen."""
    scores = mx.softmax(block.gate(x), axis=-1)
    least = mx.sort(scores, axis=-1)[:, -block.top_k, None]
    chosen = mx.where(scores >= least, scores, 0)
    return np.array(chosen / chosen.sum(axis=-1, keepdims=True))


def forward(model: Any, tokens: mx.array) -> tuple[mx.array, list[mx.array]]:
    """Logits, and what each layer's MLP or router saw."""
    hidden, seen = model.model.embed_tokens(tokens), []
    for layer in model.model.layers:
        hidden = hidden + layer.self_attn(layer.input_layernorm(hidden), "causal", None)
        seen.append(layer.post_attention_layernorm(hidden))
        hidden = hidden + layer.mlp(seen[-1])
    return model.model.embed_tokens.as_linear(model.model.norm(hidden)), seen


class Trainer:
    """Trains a mixture towards the logits of `teacher`."""

    def __init__(self, mixture: Any, teacher: Any, rows: Iterator[np.ndarray]) -> None:
        self._mixture, self._teacher, self._rows = mixture, teacher, rows
        self._optimizer = optim.AdamW(RATE, betas=[0.9, 0.95], weight_decay=0.0)
        self._gradient = nn.value_and_grad(mixture, self._loss)
        self.steps = 0
        self.log: list[dict[str, float]] = []

    def run(self, seconds: float) -> None:
        start = said = time.monotonic()
        while (elapsed := time.monotonic() - start) < seconds:
            warm = min(1.0, (self.steps + 1) / WARM_STEPS)
            self._optimizer.learning_rate = RATE * warm * (0.02 + 0.98 * 0.5 * (1 + np.cos(np.pi * elapsed / seconds)))
            figures = self.step()
            if time.monotonic() - said > 20 or self.steps == 1:
                said = time.monotonic()
                self.log.append({"seconds": round(said - start), "step": self.steps, **figures})
                print(self.log[-1], flush=True)

    def step(self) -> dict[str, float]:
        tokens = mx.array(np.stack([next(self._rows) for _ in range(ROWS)]))
        wanted = mx.softmax(forward(self._teacher, tokens)[0], axis=-1)
        mx.eval(wanted)
        (_, apart, uneven), gradient = self._gradient(tokens, wanted)
        gradient, _ = optim.clip_grad_norm(gradient, 1.0)
        self._optimizer.update(self._mixture, gradient)
        mx.eval(self._mixture.parameters(), self._optimizer.state, apart, uneven)
        self.steps += 1
        return {"divergence": round(float(apart), 4), "imbalance": round(float(uneven), 3)}

    def _loss(self, tokens: mx.array, wanted: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """With it, the divergence from the teacher and how uneven experts are used, which is 1 for evenly used ones."""
        logits, seen = forward(self._mixture, tokens)
        said = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        apart = (wanted * (mx.log(wanted + 1e-9) - said)).sum(axis=-1).mean()
        blocks = [layer.mlp for layer in self._mixture.model.layers]
        uneven = mx.stack([_unevenness(block, x) for block, x in zip(blocks, seen, strict=True)]).mean()
        return apart + BALANCE * uneven, apart, uneven


def _unevenness(block: Any, x: mx.array) -> mx.array:
    """The experts' shares of all choices times their mean scores."""
    scores = mx.softmax(block.gate(x), axis=-1).reshape(-1, block.num_experts)
    least = mx.sort(mx.stop_gradient(scores), axis=-1)[:, -block.top_k, None]
    chosen = mx.stop_gradient((scores >= least).astype(mx.float32)).mean(axis=0) / block.top_k
    return block.num_experts * (chosen * scores.mean(axis=0)).sum()


def quantise(mixture: Any) -> None:
    """In place, as the shape's configuration says. Weights that stay as they are become bfloat16, and scales with them."""
    packing = config(SHAPES[MODEL])["quantization"]

    def form(path: str, module: Any) -> bool | dict[str, int]:
        found = packing.get(path, {name: packing[name] for name in ("group_size", "bits")})
        return found if hasattr(module, "to_quantized") else False

    mixture.update(tree_map(lambda each: each.astype(mx.bfloat16), mixture.parameters()))
    nn.quantize(mixture, class_predicate=form)
    mx.eval(mixture.parameters())


def held_out_figures(mixture: Any, rows: int = 8) -> dict[str, Any]:
    """Perplexity of held-out prose, and how routers choose there."""
    tokens = mx.array(prose_tokens(held_out=True)[: rows * ROW].reshape(rows, ROW))
    lost, seen = [], list[list[mx.array]]()
    for row in tokens:
        logits, found = forward(mixture, row[None])
        lost.append(nn.losses.cross_entropy(logits[0, :-1].astype(mx.float32), row[1:]).mean())
        seen.append(found)
        mx.eval(lost, found)
    states = [mx.concatenate([each[number] for each in seen], axis=1) for number in range(len(seen[0]))]
    return {"perplexity": float(mx.exp(mx.stack(lost).mean())), **routing_figures(mixture, states)}


def routing_figures(mixture: Any, states: list[mx.array]) -> dict[str, float]:
    """Over layers: the entropy of choices relative to evenly used experts, of all tokens and of 64 in a row; the share of
    choices that the most used quarter of experts has; and how many experts of the next layer its router tells from this
    layer's state."""
    blocks = [layer.mlp for layer in mixture.model.layers]
    chosen = [_choices(block, x) for block, x in zip(blocks, states, strict=True)]
    guessed = [_choices(block, x) for block, x in zip(blocks[1:], states[:-1], strict=True)]
    counts = [each.reshape(-1, each.shape[-1]).sum(axis=0) for each in chosen]
    nearby = [each[:, : each.shape[1] // 64 * 64].reshape(-1, 64, each.shape[-1]).sum(axis=1) for each in chosen]
    right = [float((a & b).sum() / b.sum()) for a, b in zip(guessed, chosen[1:], strict=True)]
    return {
        "entropy of choices": _mean([_entropy(each) for each in counts]),
        "entropy of choices within 64 tokens": _mean([_mean([_entropy(some) for some in each]) for each in nearby]),
        "choices of the most used quarter": _mean([_largest_quarter(each) for each in counts]),
        "guessed from the layer before": _mean(right),
    }


def _choices(block: Any, x: mx.array) -> np.ndarray:
    """[rows, tokens, experts]: whether it is chosen."""
    scores = np.array(block.gate(x).astype(mx.float32))
    found: np.ndarray = scores >= np.sort(scores, axis=-1)[..., -block.top_k, None]
    return found


def _entropy(counts: np.ndarray) -> float:
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum() / np.log(counts.size))


def _largest_quarter(counts: np.ndarray) -> float:
    return float(np.sort(counts)[-counts.size // 4 :].sum() / counts.sum())


def _mean(values: list[float]) -> float:
    return round(float(np.mean(values)), 4)


if __name__ == "__main__":
    main()
