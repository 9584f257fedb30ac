"""What cannot be had with several ranks is refused by name when settings are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest

from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec
from ingot.config import Settings
from ingot.distributed.group import GroupTotals, rank_config_from_settings
from ingot.distributed.leader import LeaderAdapter
from ingot.engine.cache_admin import PrefixCacheAdmin
from ingot.engine.loading.language_model import options_among_ranks
from ingot.engine.speculation.options import SpeculationOptions
from ingot.errors import ConfigError, Unsupported


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lora_modules", ("a=b",)),
        ("adapter_path", Path("a")),
        ("allow_runtime_lora_updating", True),
        ("lazy", True),
    ],
)
def test_what_needs_a_whole_model_in_one_place_is_refused(name: str, value: Any) -> None:
    Settings(**{name: value})
    with pytest.raises(ConfigError, match=f"{name} is not supported with several ranks"):
        Settings(tensor_parallel_size=2, **{name: value})


def test_who_guesses_from_layers_that_others_have_is_refused() -> None:
    assert Settings(tensor_parallel_size=2, speculate="lookup,eagle:model").ranks == 2
    assert Settings(pipeline_parallel_size=2, speculate="mtp,draft:model").ranks == 2
    with pytest.raises(ConfigError, match=r"speculate eagle is not supported with pipeline_parallel_size"):
        Settings(pipeline_parallel_size=2, speculate="lookup,eagle:model")


def test_a_rank_that_sees_no_recurrent_layers_lets_nobody_guess() -> None:
    leading = create_autospec(
        LeaderAdapter, instance=True, whole=create_autospec(GroupTotals, rewinds=False), live=None
    )
    assert options_among_ranks(SpeculationOptions(None), leading).names == ()
    assert options_among_ranks(SpeculationOptions(()), leading).names == ()
    with pytest.raises(ConfigError, match="speculate lookup: rank 0 has none of the model's recurrent layers"):
        options_among_ranks(SpeculationOptions(("lookup",)), leading)


def test_heads_do_not_guess_where_live_pages_are_coded() -> None:
    codec = PairCodec(CodecName.parse("affine8"))
    leading = create_autospec(
        LeaderAdapter, instance=True, whole=create_autospec(GroupTotals, rewinds=True), live=codec
    )
    assert options_among_ranks(SpeculationOptions(None), leading).names == ("forced", "lookup")
    assert options_among_ranks(SpeculationOptions(("lookup", "draft")), leading).names == ("lookup", "draft")
    with pytest.raises(ConfigError, match="speculate mtp: the KV of a draft head is not put into kv_codec"):
        options_among_ranks(SpeculationOptions(("lookup", "mtp")), leading)


def test_only_one_of_both_ways_can_be_had() -> None:
    with pytest.raises(ConfigError, match="choose one"):
        Settings(tensor_parallel_size=2, pipeline_parallel_size=2)


def test_a_process_that_was_started_alone_is_no_rank() -> None:
    assert rank_config_from_settings(Settings(), {}) is None
    with pytest.raises(ConfigError, match="ask for 2 ranks, but this process was started as one of 1"):
        rank_config_from_settings(Settings(tensor_parallel_size=2), {})


def test_what_is_kept_in_several_processes_cannot_be_moved_by_one(tmp_path: Path) -> None:
    leading = create_autospec(LeaderAdapter, instance=True, is_whole=False)
    cached = PrefixCacheAdmin(
        lambda work: pytest.fail("nothing is asked"), leading, tmp_path, None, PairCodec(CodecName.parse("raw"))
    )
    for move in (cached.export, cached.adopt):
        with pytest.raises(Unsupported, match="each has a part of it"):
            move("somebody", tmp_path / "kept", b"secret")
