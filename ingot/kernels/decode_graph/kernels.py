"""The kernels of a decode graph besides products and attention, and those that copy its inputs and its result."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import mlx.core as mx

from ingot.kernels.gpu.kernel_source import Kernel, LaunchConfig, OutputSpec, read_source
from ingot.kernels.gpu.launcher import Launcher

SOURCE = Path(__file__).parent / "source"
_WARPS = 32
_THREADS = 256
_JOINT_WARPS = 16
_LOGIT_SLICES = 32
"""Of a row's logits, each for a group of threads."""
_ARRAYS = {
    "norm": (("states", "added", "weight", "shift", "after", "numbers"), ("sums", "normed")),
    "gate": (("both",), ("gated",)),
    "gate_heads": (("attended", "gates"), ("gated",)),
    "gate_input": (("gate", "inputs"), ("gated",)),
    "take_heads": (("projected",), ("picked",)),
    "norm_joint": (("projected", "weights", "eps"), ("normed",)),
    "shift": (("product", "bias"), ("shifted",)),
    "scale": (("states", "factors"), ("scaled",)),
    "lay": (("addresses", "after", "place"), ("laid",)),
    "take": (("done", "memory", "spot"), ("taken",)),
    "embed": (("tokens", "weight", "scales", "biases"), ("embedded",)),
    "pair": (("first", "second"), ("both",)),
    "take_rows": (("states", "rows"), ("taken",)),
    "likeliest": (("logits",), ("found",)),
    "pick_likeliest": (("found", "drafts"), ("tokens",)),
}
_HEADERS = {"gate": "gelu"}
"""Header files of bodies."""
Gate = Literal["silu", "gelu_tanh", "gelu", "relu2"]
_GATES: tuple[Gate, ...] = ("silu", "gelu_tanh", "gelu", "relu2")
UNGATED: tuple[Gate, ...] = ("relu2",)
"""Activations of MLPs that gate nothing."""


@cache
def decode_kernel(name: str) -> Kernel:
    header = read_source(SOURCE / f"{_HEADERS[name]}.h") if name in _HEADERS else ""
    return Kernel("stack", name, *_ARRAYS[name], header, read_source(SOURCE / f"{name}.h"))


@cache
def post_kernel(states: int, floats: int, words: int) -> Kernel:
    """For so many inputs in the format of hidden states, of 32-bit floats, and of integers."""
    typed = [("T", f"states_{number}") for number in range(states)]
    typed += [("float", f"angles_{number}") for number in range(floats)]
    typed += [("int", f"words_{number}") for number in range(words)]
    copies = [f"COPY({kind}, {name}, {name}_shape[0], {number})" for number, (kind, name) in enumerate(typed)]
    body = read_source(SOURCE / "post.h").replace("COPY_ALL\n", "".join(f"{line}\n" for line in copies))
    return Kernel("stack", "post", (*(name for _, name in typed), "after", "memory", "spots"), ("posted",), "", body)


class NormWeights(NamedTuple):
    """An RMS norm, or a layer norm where it is `centred`: what it multiplies by, what it adds to the mean of squares,
    and what it adds in the end."""

    weight: mx.array
    eps: float
    centred: bool = False
    bias: mx.array | None = None


class ResidualNorm:
    """Between two parts of a layer: adds the first one's output to the hidden states, and norms these for the next."""

    def __init__(
        self,
        before: NormWeights | None,
        after: NormWeights | None = None,
        *,
        multiplier: float | None = None,
        clipped: bool = False,
        scale: float | None = None,
    ) -> None:
        """`before` is the next part's norm; what is added goes through the norm `after` its part, and is multiplied.
        `clipped`: sums in float16 are kept finite. `scale`: what the sums are multiplied by."""
        self._before, self._after, self._multiplied, self._clipped = before, after, multiplier is not None, clipped
        self._scaled = scale is not None
        self._centred, self._bias = before is not None and before.centred, None if before is None else before.bias
        if after is not None and after.centred:
            raise ValueError("what is added goes through RMS norms alone")
        eps = [0.0 if norm is None else norm.eps for norm in (before, after)]
        factors = [1.0 if multiplier is None else multiplier, 1.0 if scale is None else scale]
        self._numbers = mx.array([*eps, *factors, *[0.0] * 4], mx.float32)
        mx.eval(self._numbers, self._bias, [norm.weight for norm in (before, after) if norm is not None])

    def __call__(self, run: Launcher, states: mx.array, added: mx.array | None) -> tuple[mx.array, mx.array]:
        """Hidden states [tokens, size] plus a part's output, rounded like plain operations; and the sums normed."""
        if added is None and self._before is None:
            return states, states
        tokens, size = states.shape
        whole, none = OutputSpec((tokens, size), states.dtype), OutputSpec((1,), states.dtype)
        with_after = added is not None and self._after is not None
        warps = min(_WARPS, -(-size // 32))
        template = (
            *(("T", states.dtype), ("SIZE", size), ("WARPS", warps), ("ADDED", added is not None)),
            *(("NORMED", self._before is not None), ("AFTER", with_after)),
            ("SCALED", added is not None and self._multiplied),
            ("CLIPPED", self._clipped and states.dtype == mx.float16),
            ("RESCALED", added is not None and self._scaled),
            *(("CENTRED", self._centred), ("SHIFTED", self._bias is not None)),
        )
        outputs = (none if added is None else whole, none if self._before is None else whole)
        inputs = [
            *(states, states if added is None else added),
            states if self._before is None else self._before.weight,
            states if self._bias is None else self._bias,
            states if self._after is None or added is None else self._after.weight,
            self._numbers,
        ]
        sums, normed = run(decode_kernel("norm"), inputs, LaunchConfig(template, (tokens, 1, 1), warps * 32, outputs))
        sums = states if added is None else sums
        return sums, sums if self._before is None else normed


def gate_states(run: Launcher, both: mx.array, gate: Gate = "silu") -> mx.array:
    """gate(x) * y of [tokens, x and y], or the activation of [tokens, x]."""
    tokens, size = both.shape[0], both.shape[1] // (1 if gate in UNGATED else 2)
    template = (("T", both.dtype), ("SIZE", size), ("THREADS", _THREADS), ("GATE", _GATES.index(gate)))
    work = LaunchConfig(
        template, (-(-size // _THREADS), tokens, 1), _THREADS, (OutputSpec((tokens, size), both.dtype),)
    )
    return run(decode_kernel("gate"), [both], work)[0]


def gate_heads(
    run: Launcher,
    attended: mx.array,
    gates: mx.array,
    act: Literal["sigmoid", "softplus"] = "sigmoid",
    *,
    behind_queries: bool = False,
) -> mx.array:
    """Attention's output [tokens, heads, size] times act(gates), of which there is one for each head, or one for each
    number. `behind_queries`: those of a head are behind its queries."""
    tokens, heads, size = attended.shape
    one_a_head = gates.shape[1] == heads
    begin, step = (size, 2 * size) if behind_queries else (0, 1 if one_a_head else size)
    template = (
        *(("T", attended.dtype), ("HEADS", heads), ("SIZE", size), ("ROW", gates.shape[1]), ("BEGIN", begin)),
        *(("STEP", step), ("ONE_A_HEAD", one_a_head), ("SOFTPLUS", act == "softplus")),
    )
    work = LaunchConfig(
        (*template, ("THREADS", _THREADS)),
        (-(-heads * size // _THREADS), tokens, 1),
        _THREADS,
        (OutputSpec(attended.shape, attended.dtype),),
    )
    return run(decode_kernel("gate_heads"), [attended, gates], work)[0]


def gate_input(run: Launcher, gate: mx.array, inputs: mx.array, begin: int) -> mx.array:
    """GELU of gates [tokens, size], times as many numbers of each token's inputs, from `begin` on."""
    tokens, size = gate.shape
    template = (("T", gate.dtype), ("SIZE", size), ("ROW", inputs.shape[1]), ("BEGIN", begin), ("THREADS", _THREADS))
    work = LaunchConfig(template, (-(-size // _THREADS), tokens, 1), _THREADS, (OutputSpec(gate.shape, gate.dtype),))
    return run(decode_kernel("gate_input"), [gate, inputs], work)[0]


def take_heads(run: Launcher, projected: mx.array, heads: int, step: int, size: int) -> mx.array:
    """The first numbers of each head [heads, tokens, size], of projections [tokens, ...] in which heads begin every
    `step` numbers."""
    tokens, row = projected.shape
    template = (*(("T", projected.dtype), ("HEADS", heads), ("SIZE", size), ("STEP", step)), ("ROW", row))
    work = LaunchConfig(
        (*template, ("THREADS", _THREADS)),
        (-(-heads * size // _THREADS), tokens, 1),
        _THREADS,
        (OutputSpec((heads, tokens, size), projected.dtype),),
    )
    return run(decode_kernel("take_heads"), [projected], work)[0]


class JointNorm:
    """Norms of all queries of a token, and of all its keys, in a joint projection."""

    def __init__(self, queries: NormWeights, keys: NormWeights) -> None:
        self._sizes = queries.weight.size, keys.weight.size
        self._weights = mx.concatenate([queries.weight, keys.weight])
        self._eps = mx.array([queries.eps, keys.eps, *[0.0] * 6], mx.float32)
        mx.eval(self._weights, self._eps)

    def __call__(self, run: Launcher, projected: mx.array) -> mx.array:
        """Queries, keys and values [tokens, ...], one behind another, with the former normed."""
        tokens, size = projected.shape
        queries, keys = self._sizes
        template = (
            *(("T", projected.dtype), ("QUERIES", queries), ("KEYS", keys), ("VALUES", size - queries - keys)),
            ("WARPS", _JOINT_WARPS),
        )
        output = OutputSpec(projected.shape, projected.dtype)
        work = LaunchConfig(template, (3, tokens, 1), _JOINT_WARPS * 32, (output,))
        return run(decode_kernel("norm_joint"), [projected, self._weights, self._eps], work)[0]


def add_bias(run: Launcher, product: mx.array, bias: mx.array) -> mx.array:
    tokens, size = product.shape
    template = (("T", product.dtype), ("SIZE", size), ("THREADS", _THREADS))
    work = LaunchConfig(
        template, (-(-size // _THREADS), tokens, 1), _THREADS, (OutputSpec((tokens, size), product.dtype),)
    )
    return run(decode_kernel("shift"), [product, bias], work)[0]


def scale_tokens(run: Launcher, states: mx.array, factors: mx.array) -> mx.array:
    """States [tokens, ...], each token's times its own of float32 factors [tokens]."""
    tokens, size = states.shape[0], states.size // states.shape[0]
    template = (("T", states.dtype), ("SIZE", size), ("THREADS", _THREADS))
    output = OutputSpec(states.shape, states.dtype)
    work = LaunchConfig(template, (-(-size // _THREADS), tokens, 1), _THREADS, (output,))
    return run(decode_kernel("scale"), [states, factors], work)[0]


# What draft heads compute besides their layers


class EmbeddingTable(NamedTuple):
    """A token embedding [vocab, size]: plain, or packed into so many affine bits."""

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = 0
    group: int = 1

    @property
    def dtype(self) -> mx.Dtype:
        return self.weight.dtype if self.scales is None else self.scales.dtype

    @property
    def size(self) -> int:
        return self.weight.shape[1] if self.scales is None else self.scales.shape[1] * self.group


def embed_tokens(run: Launcher, tokens: mx.array, table: EmbeddingTable) -> mx.array:
    """The embeddings [tokens, size] of token ids (int32); those of ids that there are not are some others."""
    count, size, (vocab, row) = tokens.shape[0], table.size, table.weight.shape
    template = (("T", table.dtype), ("SIZE", size), ("VOCAB", vocab), ("ROW", row), ("BITS", table.bits))
    none = table.weight if table.scales is None else table.scales
    work = LaunchConfig(
        (*template, ("GROUP", table.group), ("THREADS", _THREADS)),
        (-(-size // _THREADS), count, 1),
        _THREADS,
        (OutputSpec((count, size), table.dtype),),
    )
    inputs = [tokens, table.weight, *(none if each is None else each for each in (table.scales, table.biases))]
    return run(decode_kernel("embed"), inputs, work)[0]


def pair_states(run: Launcher, first: mx.array, second: mx.array) -> mx.array:
    """Two states of each token [tokens, size], one behind the other."""
    tokens, size = first.shape
    template = (("T", first.dtype), ("SIZE", size), ("THREADS", _THREADS))
    output = OutputSpec((tokens, 2 * size), first.dtype)
    work = LaunchConfig(template, (-(-size // _THREADS), tokens, 1), _THREADS, (output,))
    return run(decode_kernel("pair"), [first, second], work)[0]


def take_rows(run: Launcher, states: mx.array, rows: mx.array) -> mx.array:
    """Some tokens' states, by their numbers (int32); numbers that there are not stand for the first."""
    tokens, size = states.shape
    template = (("T", states.dtype), ("SIZE", size), ("TOKENS", tokens), ("THREADS", _THREADS))
    output = OutputSpec((rows.shape[0], size), states.dtype)
    work = LaunchConfig(template, (-(-size // _THREADS), rows.shape[0], 1), _THREADS, (output,))
    return run(decode_kernel("take_rows"), [states, rows], work)[0]


def take_likeliest(run: Launcher, logits: mx.array, drafts: mx.array, depth: int) -> mx.array:
    """The likeliest token (int32) of each row of logits [rows, vocab]. It is also written to `drafts` (int32, [rows,
    depths]), in place."""
    rows, vocab = logits.shape
    slices = ("SLICES", _LOGIT_SLICES)
    best = OutputSpec((rows, _LOGIT_SLICES, 2), mx.float32)
    scan = (("T", logits.dtype), ("VOCAB", vocab), slices, ("WARPS", _WARPS))
    [found] = run(
        decode_kernel("likeliest"), [logits], LaunchConfig(scan, (_LOGIT_SLICES, rows, 1), _WARPS * 32, (best,))
    )
    pick = (slices, ("ROW", drafts.shape[1]), ("AT", depth))
    work = LaunchConfig(pick, (rows, 1, 1), 32, (OutputSpec((rows,), mx.int32),))
    return run(decode_kernel("pick_likeliest"), [found, drafts], work)[0]


# Inputs and results of graphs


def post_inputs(run: Launcher, given: list[mx.array], after: mx.array, memory: mx.array, spots: mx.array) -> mx.array:
    """Copy hidden states and what has their format, then floats, then integers, to a graph's memory."""
    count = max(array.size for array in given)
    groups = min(64, -(-count // (8 * _THREADS)))
    template = (("T", given[0].dtype), ("THREADS", _THREADS))
    inputs = [*(array.reshape(-1) for array in given), after, memory, spots]
    states = next((number for number, array in enumerate(given) if array.dtype != given[0].dtype), len(given))
    floats = sum(array.dtype == mx.float32 for array in given[states:])
    kernel = post_kernel(states, floats, len(given) - states - floats)
    return run(kernel, inputs, LaunchConfig(template, (groups, 1, 1), _THREADS, (_token_output(),)))[0]


def store_addresses(run: Launcher, addresses: mx.array, place: mx.array, after: mx.array) -> mx.array:
    """Copy addresses to a graph's memory, behind `after`; returns a token."""
    return run(decode_kernel("lay"), [addresses, after, place], LaunchConfig((), (1, 1, 1), 32, (_token_output(),)))[0]


def take_result(run: Launcher, done: mx.array, memory: mx.array, spot: mx.array, made: OutputSpec) -> mx.array:
    """Copy a graph's result out."""
    count = made.shape[0] * made.shape[1]
    groups = min(64, -(-count // (8 * _THREADS)))
    template = (("T", made.dtype), ("THREADS", _THREADS))
    return run(decode_kernel("take"), [done, memory, spot], LaunchConfig(template, (groups, 1, 1), _THREADS, (made,)))[
        0
    ]


def _token_output() -> OutputSpec:
    return OutputSpec((1,), mx.int32)
