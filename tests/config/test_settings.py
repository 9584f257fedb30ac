from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.config import SETTINGS, Config, Settings, is_loopback, load_config, memory_bytes
from ingot.errors import ConfigError

NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "port": st.integers(0, 65535),
    "keepalive_s": st.floats(0.01, 3600, allow_nan=False),
    "strict": st.booleans(),
    "memory": st.integers(1, 500).map(lambda n: f"{n}MiB"),
    "allowed_hosts": st.lists(NAMES, max_size=3).map(tuple),
    "models_dir": NAMES.map(lambda name: Path("/models") / name),
    "dtype": st.sampled_from(["float32", "bfloat16", "float16"]),
    "model": NAMES,
    "default_chat_template_kwargs": st.dictionaries(NAMES, st.booleans() | st.integers(-9, 9) | NAMES, max_size=2),
}
SOURCES = st.fixed_dictionaries({}, optional=VALUES)


@pytest.fixture(autouse=True)
def nothing_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


def as_text(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    return ",".join(value) if isinstance(value, tuple) else str(value)


def as_toml(value: Any) -> str:
    if isinstance(value, Path):
        return json.dumps(str(value))
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{name}" = {json.dumps(each)}' for name, each in value.items()) + "}"
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def refusal(**arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(**{"flags": {}, "environ": {}, **arguments})
    return caught.value.message


@given(flags=SOURCES, environ=SOURCES, file=SOURCES)
def test_a_flag_beats_a_variable_beats_the_file_beats_the_default(
    flags: dict[str, Any], environ: dict[str, Any], file: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "precedence.toml"
    path.write_text("\n".join(f"{name} = {as_toml(value)}" for name, value in file.items()))
    given_flags = {name: value if isinstance(value, bool) else as_text(value) for name, value in flags.items()}
    variables = {SETTINGS[name].variable: as_text(value) for name, value in environ.items()}

    config = load_config(given_flags, variables, path)

    for name in SETTINGS:
        value, origin = getattr(config.settings, name), config.origins[name]
        if name in flags:
            assert (value, origin) == (
                flags[name],
                "argument MODEL" if name == "model" else f"flag {SETTINGS[name].flag}",
            )
        elif name in environ:
            assert (value, origin) == (environ[name], f"env {SETTINGS[name].variable}")
        elif name in file:
            assert (value, origin) == (file[name], f"file {path}")
        else:
            assert (value, origin) == (getattr(Settings(), name), "default")


@given(name=st.sampled_from([option.name for option in SETTINGS.values() if option.high is not None]), data=st.data())
def test_no_number_outside_its_limits_is_accepted(name: str, data: st.DataObject) -> None:
    option = SETTINGS[name]
    assert option.low is not None and option.high is not None
    outside = data.draw(st.integers(max_value=math.ceil(option.low) - 1) | st.integers(min_value=int(option.high) + 1))
    assert SETTINGS[name].flag in refusal(flags={name: str(outside)})


def test_every_number_has_both_limits() -> None:
    assert not [s.name for s in SETTINGS.values() if s.kind in (int, float) and (s.low is None or s.high is None)]


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999"])
def test_numbers_must_be_finite(text: str) -> None:
    assert "finite" in refusal(flags={"keepalive_s": text})


def test_an_unknown_key_of_the_file_is_named_with_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path / "x.toml", "prot = 1")
    assert refusal(file=path) == f"{path}: unknown key prot; did you mean port?"


def test_an_unknown_variable_is_named_with_the_nearest() -> None:
    assert refusal(environ={"INGOT_PROT": "1"}) == "unknown variable INGOT_PROT; did you mean INGOT_PORT?"
    assert refusal(environ={"INGOT_CONFG": "1"}) == "unknown variable INGOT_CONFG; did you mean INGOT_CONFIG?"


def test_an_unknown_flag_is_named_with_the_nearest() -> None:
    assert refusal(flags={"max_sequence": "1"}) == "unknown flag max_sequence; did you mean max_sequences?"


def test_variables_that_are_no_settings_are_let_pass() -> None:
    assert load_config({}, {"INGOT_KERNELS": "mlx", "PATH": "/bin"}).settings == Settings()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('port = "8000"', "port"),
        ("port = 8000.5", "port"),
        ("port = true", "port"),
        ("strict = 1", "strict"),
        ('cors_origins = "https://a.example"', "cors_origins"),
        ("cors_origins = [1]", "cors_origins"),
        ("[port]\nx = 1", "port"),
        ('models_dir = "relative/path"', "models_dir"),
        ("model = ''", "model"),
    ],
)
def test_a_value_of_the_wrong_type_in_the_file_is_refused(tmp_path: Path, text: str, named: str) -> None:
    path = write(tmp_path / "x.toml", text)
    assert refusal(file=path).startswith(f"{path}: {named}: ")


def test_a_broken_or_missing_file_is_refused(tmp_path: Path) -> None:
    assert "not valid TOML" in refusal(file=write(tmp_path / "broken.toml", "port ="))
    assert "cannot read" in refusal(file=tmp_path / "missing.toml")
    assert "cannot read" in refusal(environ={"INGOT_CONFIG": str(tmp_path / "missing.toml")})


def test_the_usual_file_is_read_when_it_is_there(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert load_config({}, environ).file is None
    (tmp_path / "ingot").mkdir()
    path = write(tmp_path / "ingot" / "config.toml", "port = 9000")
    assert load_config({}, environ) == Config(Settings(port=9000), load_config({}, environ).origins, path)


def test_a_named_file_replaces_the_usual_one(tmp_path: Path) -> None:
    named, flagged = write(tmp_path / "a.toml", "port = 1"), write(tmp_path / "b.toml", "port = 2")
    assert load_config({}, {"INGOT_CONFIG": str(named)}).settings.port == 1
    assert load_config({}, {"INGOT_CONFIG": str(named)}, flagged).settings.port == 2


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org", "127.0.0.1.example.org"])
def test_listening_off_loopback_needs_a_key(host: str) -> None:
    assert "API key" in refusal(flags={"host": host})
    assert load_config({"host": host}, {"INGOT_API_KEY": "k" * 8}).settings.host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]"])
def test_loopback_is_recognised(host: str) -> None:
    assert is_loopback(host)
    assert load_config({"host": host}, {}).settings.host == host


def test_a_bad_key_is_refused_without_showing_it() -> None:
    message = refusal(environ={"INGOT_API_KEY": "hunter 2"})
    assert message.startswith("INGOT_API_KEY") and "hunter" not in message
    assert "empty" in refusal(environ={"INGOT_API_KEY": ""})


@pytest.mark.parametrize("origin", ["*", "example.org", "https://example.org/path", "null"])
def test_a_cors_origin_must_be_one_origin(origin: str) -> None:
    assert "origin" in refusal(flags={"cors_origins": origin})


def test_an_empty_text_unsets_an_optional_value(tmp_path: Path) -> None:
    path = write(tmp_path / "x.toml", "context = 100\nmemory = '1GB'")
    settings = load_config({"context": ""}, {"INGOT_MEMORY": ""}, path).settings
    assert settings.context is None and settings.memory is None


def test_paths_have_their_tilde_expanded(tmp_path: Path) -> None:
    assert Settings().models_dir == tmp_path / ".cache/ingot/models"
    assert load_config({"models_dir": "~/m"}, {}).settings.models_dir == tmp_path / "m"


def test_settings_made_in_code_obey_the_same_limits() -> None:
    with pytest.raises(ConfigError, match="port: 70000 is too large; the maximum is 65535"):
        Settings(port=70000)


@pytest.mark.parametrize(
    ("text", "amount"),
    [("12GB", 12 * 10**9), ("800MiB", 800 << 20), ("60%", 60_000_000_000), ("1.5gib", 3 << 29), ("5 kB", 5000)],
)
def test_an_amount_of_memory_is_read(text: str, amount: int) -> None:
    assert memory_bytes(text, 100_000_000_000) == amount


@pytest.mark.parametrize("text", ["", "12", "GB", "-1GB", "1e3GB", "nan%", "101%", "0%", "0GB", "200GB", "1GB 2"])
def test_no_amount_of_memory_is_guessed_or_above_what_is_there(text: str) -> None:
    with pytest.raises(ConfigError):
        memory_bytes(text, 100_000_000_000)


def test_what_is_about_the_caches_folder_needs_one(tmp_path: Path) -> None:
    for name, value in (("cache_disk_gb", "3"), ("cache_disk_free_gb", "0"), ("cache_disk_sync", "off")):
        assert "cache_dir" in refusal(flags={name: value})
        assert load_config({name: value, "cache_dir": str(tmp_path)}, {}).settings.cache_dir == tmp_path
    assert "cache_dir is about prefix_cache, which is off" in refusal(
        flags={"cache_dir": str(tmp_path), "prefix_cache": False}
    )


def test_a_codec_is_known_by_name_and_needs_prefixes_to_keep() -> None:
    assert load_config({"cache_codec": "affine8/turbo3"}, {}).settings.cache_codec == "affine8/turbo3"
    assert "did you mean turbo4" in refusal(flags={"cache_codec": "turbo44"})
    assert "prefix_cache, which is off" in refusal(flags={"cache_codec": "turbo4", "prefix_cache": False})


def test_adapters_are_named_by_pairs_and_objects() -> None:
    settings = Settings(lora_modules=("a=/x", '{"name": "b"', '"path": "/y"}'), adapter_path=Path("/z/c"))
    assert [(lora.name, str(lora.path)) for lora in settings.loras] == [("a", "/x"), ("b", "/y"), ("c", "/z/c")]
    assert settings.default_lora == "c"


@pytest.mark.parametrize(
    "wrong",
    [
        *(["a"], ["a="], ["a:b=/x"], ["=/x"], ["a=/x", "a=/y"]),
        *(['{"name": "a"}'], ['{"name": "a"'], ['{"name": "a", "path": "/x", "rank": 4}']),
    ],
)
def test_what_is_no_adapter_is_refused(wrong: list[str]) -> None:
    with pytest.raises(ConfigError, match="lora_modules"):
        Settings(lora_modules=tuple(wrong))


def test_more_adapters_than_there_may_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 adapters are named, and max_loras is 1"):
        Settings(lora_modules=("a=/x", "b=/y"), max_loras=1)
