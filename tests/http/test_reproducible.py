"""What an answer says of its own arithmetic: whether it is reproducible, and the fingerprint of what computed it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx
import pytest

from ingot.engine.loading.language_model import start_engine
from ingot.kernels.cpu import native
from tests import engines
from tests.http.running import running
from tests.http.scripted import settings
from tests.one_path import one_path

__all__ = ["one_path"]

DENSE = Path(__file__).parents[2] / "foundry" / "models" / "dense"
DETERMINISTIC = {"deterministic": True}

pytestmark = pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")


def answer(folder: Path, *bodies: dict[str, Any], **changes: Any) -> list[tuple[dict[str, Any], str]]:
    """The receipt's word and the fingerprint of an answer to each of these bodies."""
    asked, made = settings(context=512, memory="1GB", **changes), []
    engine = start_engine(asked, folder, name="dense", source="test")
    try:
        with running(engine, asked) as url, httpx.Client(base_url=url, timeout=60) as client:
            for body in bodies or ({},):
                sent = client.post("/v1/completions", json={"prompt": "The sea", "max_tokens": 2, **body}).json()
                said = {name: sent["ingot"][name] for name in ("reproducible", "varies") if name in sent["ingot"]}
                made.append((said, sent["system_fingerprint"]))
    finally:
        engine.close()
    return made


@pytest.fixture(scope="module")
def fingerprint() -> Iterator[str]:
    [(said, found)] = answer(DENSE, **DETERMINISTIC)
    assert said == {"reproducible": True}
    yield found


def test_by_default_answers_are_reproducible_where_many_tokens_are_computed_as_few_are(fingerprint: str) -> None:
    [(said, found)] = answer(DENSE)
    if native.has_wide():
        assert said == {"reproducible": False, "varies": "amx"} and found != fingerprint
    else:
        assert said == {"reproducible": True} and found == fingerprint


def test_the_same_server_has_the_same_fingerprint_again(fingerprint: str) -> None:
    assert answer(DENSE, **DETERMINISTIC) == [({"reproducible": True}, fingerprint)]


def test_a_codec_makes_answers_depend_on_what_was_cached_unless_they_are_exact(fingerprint: str) -> None:
    [(said, found), (exact, _)] = answer(DENSE, {}, {"cache": "exact"}, cache_codec="affine8", **DETERMINISTIC)
    assert said == {"reproducible": False, "varies": "codec"} and found != fingerprint
    assert exact == {"reproducible": True}


def test_parts_that_mlx_computes_make_answers_depend_on_what_else_is_computed() -> None:
    [(said, _)] = answer(engines.tiny_folder("mixed"), {"prompt": [1, 2, 3]}, **DETERMINISTIC)
    assert said == {"reproducible": False, "varies": "kernels"}


def test_another_build_of_the_kernels_has_another_fingerprint(
    fingerprint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_build", lambda: "another")
    assert answer(DENSE, **DETERMINISTIC)[0][1] != fingerprint


def test_the_same_weights_elsewhere_have_the_same_fingerprint_and_other_weights_another(
    fingerprint: str, tmp_path: Path
) -> None:
    copy = copytree(DENSE, tmp_path / "model")
    assert answer(copy, **DETERMINISTIC)[0][1] == fingerprint
    [weights] = copy.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-100] ^= 1
    weights.write_bytes(content)
    assert answer(copy, **DETERMINISTIC)[0][1] != fingerprint
