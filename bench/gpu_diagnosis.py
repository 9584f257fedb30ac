"""What a GPU computes differently in a batch than alone, and why: order, arithmetic, or failed launches.

python -m bench.gpu_diagnosis                    everything, in separate processes; less than two minutes
python -m bench.gpu_diagnosis --kinds llama,moe --only equality

Equality: rows of different lengths that join and leave, with given tokens, so that logits can be compared:
- *repeated*, *awaited* and *read* are the same passes again: unchanged, with a wait after each, and with each one's
  logits read while the next one runs. They must give the same bits: a difference is an ordering error, ours or MLX's.
- *alone* and *apart* are other passes for the same tokens (one row, or one batch, per pass), and may differ by
  rounding: about 1e-6 of the logits' range in float32, 1e-3 if products are rounded to TF32. More is an error.
Each runs with CUDA graphs on and off, with one operation per graph, and with TF32 on and off.

Limits: operations of our passes over empty arrays, and over more than a launch grid can hold.
Long: a prompt of many tokens in chunks of any width, alongside short rows that decode, in one layer of an 8B model.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from bench.children import hear

KINDS = "llama,tied,window,hybrid,moe,kernel"
VARIANTS: dict[str, dict[str, str]] = {
    "as tests run": {"MLX_ENABLE_TF32": "0"},
    "no graphs": {"MLX_ENABLE_TF32": "0", "MLX_USE_CUDA_GRAPHS": "0"},
    "one operation a graph": {"MLX_ENABLE_TF32": "0", "MLX_MAX_OPS_PER_BUFFER": "1"},
    "as people run": {"MLX_ENABLE_TF32": "1"},
}
SECTIONS = ("equality", "limits", "long")
ROUNDING = 1e-5
"""Of the logits' range: what float32 may differ by."""
PATIENCE_S = 60.0

Fed = list[tuple[str, list[int]]]
"""Which tokens of which rows a step computes."""
Logits = dict[tuple[str, int], Any]
"""By row and how many tokens of it were computed."""


@dataclass(frozen=True)
class Plan:
    """Steps, and the rows that leave before each."""

    steps: tuple[Fed, ...]
    leavers: dict[int, list[str]]


def plan(vocab: int, *, steps: int = 14) -> Plan:
    """Six rows from the beginning, of which some leave and others join while the rest decodes."""
    prompts = {0: [1, 3, 20, 61, 150, 300], 5: [130, 64], 9: [257]}
    leavers = {4: ["0.2", "0.4"], 8: ["0.5"], 11: ["5.0"]}
    dice, here, made = random.Random(4), list[str](), list[Fed]()
    for step in range(steps):
        here = [name for name in here if name not in leavers.get(step, [])]
        fed = [(name, [dice.randrange(vocab)]) for name in here]
        joined = [(f"{step}.{at}", length) for at, length in enumerate(prompts.get(step, []))]
        fed += [(name, [dice.randrange(vocab) for _ in range(length)]) for name, length in joined]
        here += [name for name, _ in joined]
        made.append(fed)
    return Plan(tuple(made), leavers)


class Passes:
    """Runs steps of a plan through a model's live states."""

    def __init__(self, adapter: Any, *, together: bool = True, wait: bool = False) -> None:
        self._adapter, self._together, self._wait = adapter, together and adapter.mixed, wait
        self._states, self._rows = adapter.new_batch_state(), dict[str, Any]()

    def run(self, plan: Plan) -> Iterator[tuple[tuple[str, int], Any]]:
        """Logits as they are queued: nobody waits for them before the end, unless asked to."""
        for number, step in enumerate(plan.steps):
            for name in plan.leavers.get(number, []):
                if name in self._rows:
                    self._states.leave(self._rows.pop(name))
            for fed in self._split(step):
                yield from self._pass(fed)

    def _split(self, step: Fed) -> list[Fed]:
        """The passes of a step: one, or one for each launch of it; a family that cannot mix gets one for each row."""
        decoding, prompts = ([each for each in step if (len(each[1]) == 1) is few] for few in (True, False))
        if self._together:
            return [step]
        apart = [decoding] if self._adapter.ragged else [[each] for each in decoding]
        return [fed for fed in (*apart, *([each] for each in prompts)) if fed]

    def _pass(self, fed: Fed) -> Iterator[tuple[tuple[str, int], Any]]:
        import mlx.core as mx

        from ingot.cache.forward_batch import ForwardPart

        for name, _ in fed:
            if name not in self._rows:
                self._rows[name] = self._states.new()
        single, wide = ([each for each in fed if (len(each[1]) == 1) is few] for few in (True, False))
        ordered = [*single, *wide]
        parts = [ForwardPart(tuple(self._rows[name] for name, _ in single), 1)] if single else []
        parts += [ForwardPart((self._rows[name],), len(tokens)) for name, tokens in wide]
        tokens = mx.array([token for _, own in ordered for token in own], dtype=mx.uint32)
        ends = accumulate(len(own) for _, own in ordered)
        logits = self._adapter.run(self._states, tokens, parts, [end - 1 for end in ends])
        mx.async_eval(logits, self._states.pending())
        if self._wait:
            mx.synchronize()
        for place, (name, _) in enumerate(ordered):
            yield (name, self._rows[name].length), logits[place]


def computed(adapter: Any, plan: Plan, *, read: bool = False, **how: bool) -> Logits:
    import mlx.core as mx
    import numpy as np

    found, last = Logits(), None
    for at, logits in Passes(adapter, **how).run(plan):
        found[at] = logits
        if read and last is not None:
            np.array(last.astype(mx.float32))
        last = logits
    return {at: np.array(logits.astype(mx.float32)) for at, logits in found.items()}


def computed_alone(adapter: Any, plan: Plan) -> Logits:
    names = dict.fromkeys(name for step in plan.steps for name, _ in step)
    found = Logits()
    for name in names:
        own = tuple([each for each in step if each[0] == name] for step in plan.steps)
        found |= computed(adapter, Plan(tuple(step for step in own if step), {}))
    return found


@dataclass(frozen=True)
class Difference:
    worst: float  # of the logits' range
    first: str  # where it is more than rounding
    flips: int  # positions whose likeliest token is another

    def __str__(self) -> str:
        return f"{self.worst:.1e}, {self.flips} other tokens" + (f", first {self.first}" if self.first else "")


def difference(found: Logits, expected: Logits) -> Difference:
    import numpy as np

    worst, first, flips = 0.0, "", 0
    for at, wanted in expected.items():
        gap = float(np.abs(found[at] - wanted).max() / (wanted.max() - wanted.min()))
        gap = gap if np.isfinite(gap) else float("inf")
        flips += int(found[at].argmax() != wanted.argmax())
        if gap > ROUNDING and not first:
            first = f"row {at[0]} at {at[1]} tokens"
        worst = max(worst, gap)
    return Difference(worst, first, flips)


def equality(kinds: Sequence[str]) -> Iterator[str]:
    from ingot.kernels.device import current_device
    from ingot.models.adapter import adapt_model
    from tests import tiny

    for kind in kinds:
        adapter = adapt_model(tiny.build(kind), tiny.CONFIGS[kind], current_device())
        asked = plan(tiny.VOCAB - 1)
        batched = computed(adapter, asked)
        order = {
            "repeated": computed(adapter, asked),
            "awaited": computed(adapter, asked, wait=True),
            "read": computed(adapter, asked, read=True),
        }
        sums = {"alone": computed_alone(adapter, asked), "apart": computed(adapter, asked, together=False)}
        faults = [name for name, found in order.items() if difference(found, batched).worst > 0]
        wrong = [name for name, found in sums.items() if difference(batched, found).worst > ROUNDING]
        yield f"{kind}: order {'FAULT' if faults else 'right'}, sums {'DIFFER' if wrong else 'right'}"
        compared = [(name, difference(found, batched)) for name, found in {**order, **sums}.items()]
        yield from (f"  {name:9} {found}" for name, found in compared if found.worst > 0)


def limits(*, tiny: bool, after: int = 0) -> Iterator[str]:
    """What operations say to sizes at the edge, against what numpy says; behind so many that were tried before."""
    for name, work in list(_at_the_edge(4 if tiny else 40000).items())[after:]:
        yield f"{name}: {_tried(work)}"


def _tried(work: Callable[[], tuple[Any, Any]]) -> str:
    import mlx.core as mx
    import numpy as np

    try:
        found, wanted = work()
        mx.eval(found)
        mx.synchronize()
    except (RuntimeError, ValueError) as error:
        return f"RAISES {' '.join(str(error).split())[:120]}"
    return "right" if np.array_equal(np.array(found), wanted) else "WRONG"


def _at_the_edge(many: int) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """`many` rows of eight heads of eight tokens are more than 65,535 blocks of a grid's second and third axis."""
    import mlx.core as mx
    import numpy as np

    shape, none = (many, 8, 64, 16), np.zeros((0, 8), np.float32)

    def ones(*sizes: int) -> mx.array:
        return mx.ones(sizes)

    def masked() -> tuple[Any, Any]:
        shown = (mx.arange(many * 64).reshape(many, 1, 64, 1) % 3) > 0
        wanted = np.broadcast_to((np.arange(many * 64).reshape(many, 1, 64, 1) % 3) > 0, shape)
        return mx.where(shown, mx.ones(shape), mx.zeros(())), wanted.astype(np.float32)

    def turned() -> tuple[Any, Any]:
        x = mx.fast.rope(mx.ones(shape), 16, traditional=False, base=1e4, scale=1.0, offset=mx.zeros(many, mx.int32))
        return x[:, :, :1], np.ones((many, 8, 1, 16), np.float32)

    return {
        "where over no rows": lambda: (mx.where(ones(0, 8) > 0, ones(0, 8), mx.zeros(())), none),
        "softmax of no rows": lambda: (mx.softmax(ones(0, 8), axis=-1), none),
        "norm of no rows": lambda: (mx.fast.rms_norm(ones(0, 8), ones(8), 1e-5), none),
        "rope of no rows": lambda: (
            mx.fast.rope(ones(0, 1, 1, 8), 8, traditional=False, base=1e4, scale=1.0, offset=0),
            np.zeros((0, 1, 1, 8), np.float32),
        ),
        "product of no rows": lambda: (ones(0, 8) @ ones(8, 8), none),
        "where over many rows": masked,
        "rope of many rows": turned,
        "sum of many rows": lambda: (mx.sum(ones(*shape), axis=-1), np.full(shape[:3], 16, np.float32)),
        "softmax of many rows": lambda: (mx.softmax(ones(*shape[:2], 64), axis=-1)[..., 0], np.full(shape[:2], 1 / 64)),
        "concatenation of many rows": lambda: (
            mx.concatenate([ones(*shape)] * 2, axis=2)[..., 0].sum(),
            many * 8 * 128,
        ),
        "gathering of many rows": lambda: (
            mx.take(ones(many * 8, 64, 16), mx.arange(many * 8), axis=0)[:, 0, 0],
            np.ones(many * 8, np.float32),
        ),
    }


def long(tokens: int, *, shape: str) -> list[str]:
    import mlx.core as mx

    from bench.random_models import SHAPES, build
    from ingot.kernels.device import current_device
    from ingot.models.adapter import adapt_model

    config = {**SHAPES[shape], "num_hidden_layers": 1, "vocab_size": 1024}
    adapter = adapt_model(build(config, dtype=mx.bfloat16), config, current_device())
    dice, left, steps, widths = random.Random(2), tokens, list[Fed](), list[int]()
    steps.append([(f"short{number}", [1] * (100 + number)) for number in range(7)])
    while left:
        widths.append(min(left, dice.choice([1, 2, 3, 17, 255, 256, 257, 1023, 2048, 2048, 2048])))
        left -= widths[-1]
        steps.append([*((f"short{number}", [2]) for number in range(7)), ("long", [3] * widths[-1])])
    began, behind = time.perf_counter(), 0
    try:
        for (name, length), logits in Passes(adapter).run(Plan(tuple(steps), {})):
            if name == "long":
                mx.eval(logits)
                behind = length
    except RuntimeError as error:
        return [f"RAISES behind {behind} tokens of {tokens}: {' '.join(str(error).split())[:200]}"]
    return [f"{tokens} tokens in {len(widths)} pieces: right, {time.perf_counter() - began:.1f} s"]


def child(section: str, chosen: argparse.Namespace) -> Iterator[str]:
    if section == "equality":
        return equality(chosen.kinds.split(","))
    if section == "limits":
        return limits(tiny=chosen.tiny, after=chosen.after)
    return iter(long(300 if chosen.tiny else 60000, shape="dispatch" if chosen.tiny else "llama-8b"))


def ask_child(section: str, environment: dict[str, str], chosen: argparse.Namespace) -> None:
    """Print what it says as it says it. A process of its own: MLX reads these variables once, and what a device cannot
    do may end it. Operations behind one that did are tried by another."""
    command = [sys.executable, "-m", "bench.gpu_diagnosis", "--child", section, "--kinds", chosen.kinds]
    command += ["--tiny"] * chosen.tiny
    edges = list(_at_the_edge(0)) if section == "limits" else []
    done = 0

    def told(line: str) -> None:
        nonlocal done
        done += 1
        print(line, flush=True)

    while (wrong := hear([*command, "--after", str(done)], environment, PATIENCE_S, told).wrong) is not None:
        print(f"FAILED, it {wrong}" if done >= len(edges) else f"{edges[done]}: FAILED, it {wrong}", flush=True)
        done += 1
        if done >= len(edges):
            return


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=KINDS, help="tiny models of the tests (%(default)s)")
    parser.add_argument("--only", choices=SECTIONS)
    parser.add_argument("--tiny", action="store_true", help="to see that it works, on a CPU with INGOT_AS=cuda")
    parser.add_argument("--child", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--after", type=int, default=0, help=argparse.SUPPRESS)
    chosen = parser.parse_args(given)
    if chosen.child is not None:
        for line in child(chosen.child, chosen):
            print(line, flush=True)
        return 0
    for section in [chosen.only] if chosen.only else SECTIONS:
        for name, environment in list(VARIANTS.items()) if section == "equality" else [("", {})]:
            print(f"== {section}{', ' if name else ''}{name}", flush=True)
            ask_child(section, environment, chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
