"""llama.cpp computes of our GGUF files what the models compute that they were made of: so they are as its converter
writes them. Needs the build that `python -m bench.cpu` makes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind

from ingot.cli.peers import llama_cpp
from tests.models.gguf.published import FAMILIES, as_gguf, random_model
from tests.models.gguf.test_moe_architectures import TOKENS, logits_of

pytestmark = pytest.mark.oracle
UNLIKE = {
    "hunyuan": "mlx-lm's model does not make the weights of the chosen experts sum to one",
    "gemma3n": "llama.cpp takes another deviation of few numbers",
}
HOME = llama_cpp.KEPT.expanduser() / llama_cpp.PACKAGE.replace("==", "-")
PROGRAM = """
import json, os, sys, types
import numpy as np
package = types.ModuleType("llama_cpp")
package.__path__ = [sys.argv[1]]
sys.modules["llama_cpp"] = package
import llama_cpp.llama_cpp as api
path, tokens, target = sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
api.llama_backend_init()
model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
settings = api.llama_context_default_params()
settings.n_ctx, settings.type_k, settings.type_v, settings.flash_attn_type = 256, 0, 0, 0
context = api.llama_init_from_model(model, settings)
batch = api.llama_batch_init(len(tokens), 0, 1)
batch.n_tokens = len(tokens)
for place, token in enumerate(tokens):
    batch.token[place], batch.pos[place], batch.n_seq_id[place], batch.logits[place] = token, place, 1, 1
    batch.seq_id[place][0] = 0
assert api.llama_decode(context, batch) == 0
words = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
rows = [np.ctypeslib.as_array(api.llama_get_logits_ith(context, row), shape=(words,)) for row in range(len(tokens))]
np.save(target, np.stack(rows))
"""


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in UNLIKE])
def test_llama_cpp_computes_what_the_original_computes(family: str, tmp_path: Path) -> None:
    libraries, binding = HOME / "build" / "bin", next(HOME.glob("*/llama_cpp"), None)
    if binding is None or not (libraries / "libllama.so").exists():
        pytest.skip("needs llama.cpp, which `python -m bench.cpu` builds")
    config, weights = random_model(family, tmp_path / "original")
    file = as_gguf(family, config, weights, lambda name: Kind.F32).write(tmp_path / "tiny.gguf")
    command = [sys.executable, "-c", PROGRAM, binding, file, json.dumps(TOKENS), tmp_path / "logits.npy"]
    settings = {"LLAMA_CPP_LIB_PATH": str(libraries), "PATH": ""}
    done = subprocess.run([str(word) for word in command], env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = logits_of(tmp_path / "original")
    # Of some functions, llama.cpp has tables in 16 bits.
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), expected, atol=3e-3 * np.abs(expected).max())
