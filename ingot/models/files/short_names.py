# ruff: noqa: E501  (the table)
"""Short names of models that people run, and what is needed to say whether they fit a machine.

A test checks the form of the table: that a name is lower case and neither a path nor a packaged model's, that an id is
one of the hub's, that mlx-lm or ingot has the family, and that size and parameters agree. That an id exists is checked
by hand when a line is added: look the repository up on the hub, or pull it. Imports nothing heavy: a lazy server needs
it before it is ready.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, cast, get_args

Task = Literal["chat", "code", "vision", "embedding", "rerank", "audio", "speech"]

_TABLE: Final = """
qwen3.5-122b-a10b        Qwen3.5-122B-A10B-4bit                                      qwen3_5_moe       chat+vision       122    10   69.6   262144  24576   150
gpt-oss-120b             gpt-oss-120b-MXFP4-Q8                                       gpt_oss/mxfp4     chat+code         117    5.1  63.4   131072  36864   5
qwen3.6-27b              Qwen3.6-27B-4bit                                            qwen3_5           chat+vision+code  27     -    16.1   262144  65536   150
qwen3.6-35b-a3b          Qwen3.6-35B-A3B-4bit                                        qwen3_5_moe       chat+vision+code  35     3    20.4   262144  20480   65
gemma-4-31b              gemma-4-31b-it-4bit                                         gemma4            chat+vision       31     -    18.4   262144  81920   840
qwen3.5-35b-a3b          Qwen3.5-35B-A3B-4bit                                        qwen3_5_moe       chat+vision       35     3    20.4   262144  20480   65
qwen3.5-27b              Qwen3.5-27B-4bit                                            qwen3_5           chat+vision       27     -    16.1   262144  65536   150
gemma-4-26b-a4b          gemma-4-26b-a4b-it-4bit                                     gemma4            chat+vision       26     4    15.4   262144  20480   210
glm-4.5-air              GLM-4.5-Air-4bit                                            glm4_moe          chat+code         106    12   60.2   131072  188416  -
glm-4.7-flash            GLM-4.7-Flash-4bit                                          glm4_moe_lite     chat+code         30     3    16.9   202752  54144   -
qwen3-next-80b-a3b       Qwen3-Next-80B-A3B-Instruct-4bit                            qwen3_next        chat              80     3    44.9   262144  24576   75
gpt-oss-20b              gpt-oss-20b-MXFP4-Q8                                        gpt_oss/mxfp4     chat+code         20.9   3.6  12.1   131072  24576   3
qwen3.5-9b               Qwen3.5-9B-4bit                                             qwen3_5           chat+vision+code  9      -    5.98   262144  32768   50
qwen3-30b-a3b            Qwen3-30B-A3B-Instruct-2507-4bit                            qwen3_moe         chat              30.5   3.3  17.2   262144  98304   -
nemotron-3-nano-30b-a3b  lmstudio-community/NVIDIA-Nemotron-3-Nano-30B-A3B-MLX-4bit  nemotron_h        chat              31.6   3.5  17.8   262144  6144    50
llama-3.3-70b            Llama-3.3-70B-Instruct-4bit                                 llama             chat              70.6   -    39.7   131072  327680  -
qwen3-32b                Qwen3-32B-4bit                                              qwen3             chat              32.8   -    18.4   40960   262144  -
mistral-small-3.1-24b    Mistral-Small-3.1-24B-Instruct-2503-4bit                    mistral3          chat+vision       24     -    14.1   131072  163840  -
gemma-3-27b              gemma-3-27b-it-qat-4bit                                     gemma3            chat+vision       27     -    16.9   131072  81920   436
gemma-3-12b              gemma-3-12b-it-qat-4bit                                     gemma3            chat+vision       12     -    8.07   131072  65536   336
qwen3-14b                Qwen3-14B-4bit                                              qwen3             chat              14.8   -    8.32   40960   163840  -
phi-4                    phi-4-4bit                                                  phi3              chat              14.7   -    8.26   16384   204800  -
gemma-4-e4b              gemma-4-e4b-it-4bit                                         gemma4            chat+vision       8      4    5.18   131072  16384   45
ministral-3-8b           Ministral-3-8B-Instruct-2512-4bit                           mistral3          chat+vision       8.9    -    5.6    262144  139264  -
qwen3.5-4b               Qwen3.5-4B-MLX-4bit                                         qwen3_5           chat+vision+code  4.7    -    3.06   262144  32768   50
qwen3-8b                 Qwen3-8B-4bit                                               qwen3             chat              8.2    -    4.62   40960   147456  -
deepseek-r1-8b           DeepSeek-R1-0528-Qwen3-8B-4bit                              qwen3             chat              8.2    -    4.62   131072  147456  -
lfm2.5-8b-a1b            LFM2.5-8B-A1B-MLX-4bit                                      lfm2_moe          chat              8.3    1.5  4.78   128000  12288   -
qwen3-4b                 Qwen3-4B-Instruct-2507-4bit                                 qwen3             chat+code         4      -    2.28   262144  147456  -
gemma-4-e2b              gemma-4-e2b-it-4bit                                         gemma4            chat+vision       5.1    2.3  3.58   131072  6144    15
gemma-3-4b               gemma-3-4b-it-qat-4bit                                      gemma3            chat+vision       4.3    -    3.03   131072  20480   122
llama-3.1-8b             Meta-Llama-3.1-8B-Instruct-4bit                             llama             chat              8      -    4.53   131072  131072  -
granite-4.0-h-tiny       granite-4.0-h-tiny-4bit                                     granitemoehybrid  chat              6.9    1    3.92   131072  8192    60
smollm3-3b               SmolLM3-3B-4bit                                             smollm3           chat              3.1    -    1.75   65536   73728   -
phi-4-mini               Phi-4-mini-instruct-4bit                                    phi3              chat              3.8    -    2.18   131072  131072  -
llama-3.2-3b             Llama-3.2-3B-Instruct-4bit                                  llama             chat              3.2    -    1.82   131072  114688  -
qwen3.5-2b               Qwen3.5-2B-4bit                                             qwen3_5           chat+vision       2.3    -    1.72   262144  12288   20
qwen3-1.7b               Qwen3-1.7B-4bit                                             qwen3             chat              1.7    -    0.98   40960   114688  -
lfm2.5-1.2b              LFM2.5-1.2B-Instruct-4bit                                   lfm2              chat              1.2    -    0.66   128000  12288   -
llama-3.2-1b             Llama-3.2-1B-Instruct-4bit                                  llama             chat              1.24   -    0.71   131072  32768   -
gemma-3-1b               gemma-3-1b-it-qat-4bit                                      gemma3_text       chat              1      -    0.77   32768   4096    12
qwen3-0.6b               Qwen3-0.6B-4bit                                             qwen3             chat              0.6    -    0.35   40960   114688  -
qwen3-coder-next         Qwen3-Coder-Next-4bit                                       qwen3_next        code              80     3    44.9   262144  24576   75
devstral-small-2-24b     Devstral-Small-2-24B-Instruct-2512-4bit                     mistral3          code              24     -    15.1   393216  163840  -
qwen3-coder-30b-a3b      Qwen3-Coder-30B-A3B-Instruct-4bit                           qwen3_moe         code              30.5   3.3  17.2   262144  98304   -
qwen3-vl-30b-a3b         Qwen3-VL-30B-A3B-Instruct-4bit                              qwen3_vl_moe      vision            31     3.3  18.3   262144  98304   -
qwen3-vl-8b              Qwen3-VL-8B-Instruct-4bit                                   qwen3_vl          vision            8.8    -    5.78   262144  147456  -
qwen3-vl-4b              Qwen3-VL-4B-Instruct-4bit                                   qwen3_vl          vision            4.4    -    3.11   262144  147456  -
qwen3-vl-2b              Qwen3-VL-2B-Instruct-4bit                                   qwen3_vl          vision            2.1    -    1.8    262144  114688  -
qwen3-embedding-4b       Qwen/Qwen3-Embedding-4B                                     qwen3             embedding         4      -    8.06   32768   -       -
qwen3-embedding-0.6b     Qwen/Qwen3-Embedding-0.6B                                   qwen3             embedding         0.6    -    1.21   32768   -       -
multilingual-e5-small    intfloat/multilingual-e5-small                              bert              embedding         0.118  -    0.49   512     -       -
bge-small-en-v1.5        BAAI/bge-small-en-v1.5                                      bert              embedding         0.033  -    0.134  512     -       -
qwen3-reranker-0.6b      Qwen/Qwen3-Reranker-0.6B                                    qwen3             rerank            0.6    -    1.21   32768   -       -
bge-reranker-v2-m3       BAAI/bge-reranker-v2-m3                                     xlm-roberta       rerank            0.568  -    2.29   8192    -       -
whisper-large-v3-turbo   openai/whisper-large-v3-turbo                               whisper           audio             0.809  -    1.62   -       -       -
whisper-small            openai/whisper-small                                        whisper           audio             0.244  -    0.97   -       -       -
kokoro-82m               Kokoro-82M-bf16                                             kokoro            speech            0.082  -    0.355  -       -       -
"""
"""A line for each model: its name; its hub id, without `mlx-community/`; its model_type, with `/mxfp4` for weights in
that format; what it is for; billions of parameters, and how many of them a token uses in a mixture; gigabytes of the
repository; the context that it was made for; bytes of KV for each token, in 16 bits, and megabytes that do not grow
(windows, recurrent layers). Within a task, what answers better comes first."""

TASKS: Final[dict[Task, tuple[str, str]]] = {
    "chat": ("conversation", "serve"),
    "code": ("code", "serve"),
    "vision": ("images", "serve"),
    "embedding": ("embeddings", "serve --embedding-model"),
    "rerank": ("reranking", "serve --rerank-model"),
    "audio": ("speech to text", "serve --audio-model"),
    "speech": ("text to speech", "serve --speech-model"),
}
"""In words, and how a model for it is served."""
CPU_ACTIVE: Final = 4.0
"""Billions of parameters that a token may use to be quick enough on a CPU, which reads all of them for each one."""
MXFP4_ON_CPU: Final = 10 / 4.25
"""CPUs keep a number of 4 bits in a byte, with scales next to it."""


@dataclass(frozen=True, slots=True)
class NamedModel:
    name: str
    hub_id: str
    family: str
    tasks: tuple[Task, ...]
    parameters: float  # billions
    active: float  # of them, those that a token uses
    size: int  # bytes of its files, and about those of its weights in memory
    context: int  # 0: it has none
    kv_per_token: int
    kv_fixed: int
    mxfp4: bool

    @property
    def kind(self) -> str:
        """As the server's settings call what it does."""
        return "chat" if self.tasks[0] in ("chat", "code", "vision") else self.tasks[0]

    def weight_bytes(self, device: str) -> int:
        return round(self.size * MXFP4_ON_CPU) if self.mxfp4 and device == "cpu" else self.size

    def context_within(self, budget: int, device: str, aside: float) -> int:
        """How many tokens of a sequence `budget` bytes hold next to the weights, if a share of `aside` of what those
        leave is for forward passes; -1 where not even the weights fit."""
        left = budget - self.weight_bytes(device)
        if left < 0:
            return -1
        if not self.kv_per_token:
            return self.context
        return max(0, min(self.context, int(left * (1 - aside) - self.kv_fixed) // self.kv_per_token))


def _read_row(row: str) -> NamedModel:
    name, hub_id, family, tasks, parameters, active, gigabytes, context, kv, fixed = row.split()
    kinds = cast("tuple[Task, ...]", tuple(tasks.split("+")))
    assert set(kinds) <= set(get_args(Task)), name
    return NamedModel(
        name,
        hub_id if "/" in hub_id else f"mlx-community/{hub_id}",
        family.removesuffix("/mxfp4"),
        kinds,
        float(parameters),
        float(parameters if active == "-" else active),
        round(float(gigabytes) * 1e9),
        _number(context),
        _number(kv),
        _number(fixed) * 10**6,
        family.endswith("/mxfp4"),
    )


def _number(text: str) -> int:
    return 0 if text == "-" else int(text)


NAMED_MODELS: Final = tuple(map(_read_row, _TABLE.strip().splitlines()))


def find_named_model(name: str) -> NamedModel | None:
    """The model of that short name, in any case."""
    wanted = name.lower()
    return next((model for model in NAMED_MODELS if model.name == wanted), None)


def full_model_name(name: str) -> str:
    """The hub id that a short name stands for; any other name as it is."""
    model = find_named_model(name)
    return name if model is None else model.hub_id


def fitting_models(
    task: Task, budget: int, device: str, *, aside: float, least_context: int
) -> list[tuple[NamedModel, int]]:
    """The models for a task that `budget` bytes hold with the tokens that they leave room for, at least `least_context`
    or all that they were made for; the best first. On CPUs, without those whose every token would take long."""
    found = []
    for model in NAMED_MODELS:
        if task in model.tasks and not (device == "cpu" and model.active > CPU_ACTIVE):
            context = model.context_within(budget, device, aside)
            if context >= min(least_context, model.context):
                found.append((model, context))
    return found
