from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.cli.main import COMMANDS, main
from ingot.cli.serve import FIRST_FLAGS
from ingot.config import SETTINGS
from ingot.version import __version__
from tests.cli.conftest import Done
from tests.cli.scripted import environment
from tests.processes import INGOT, run


def ingot(home: Path, *words: str, by: Callable[..., Any] = run, **extra: str) -> subprocess.CompletedProcess[str]:
    done: subprocess.CompletedProcess[str]
    done = by([INGOT, *words], capture_output=True, text=True, timeout=60, env=environment(home, **extra), cwd=home)
    return done


def test_the_version_is_printed(tmp_path: Path) -> None:
    done = ingot(tmp_path, "--version", by=subprocess.run)
    assert (done.returncode, done.stdout) == (0, f"ingot {__version__}\n")


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "ingot", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"ingot {__version__}\n")


def test_help_lists_every_command(tmp_path: Path) -> None:
    for arguments in ((), ("--help",)):
        done = ingot(tmp_path, *arguments, by=subprocess.run)
        assert done.returncode == 0
        assert all(f"  {name} " in done.stdout for name in COMMANDS)


def test_help_and_version_load_nothing_heavy() -> None:
    code = (
        "import sys; from ingot.cli.main import main; main(['--version']); main(['--help']);"
        "heavy = {'argparse', 'mlx', 'mlx_lm', 'transformers', 'numpy', 'asyncio', 'logging'} & set(sys.modules);"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_loads_the_machinery_to_show_its_help(command: str) -> None:
    code = (
        "import sys; from ingot.cli.main import main\n"
        f"try: main(['{command}', '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'mlx', 'mlx_lm', 'transformers', 'numpy', 'matplotlib', 'starlette'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_serve_help_shows_every_setting_with_its_section_and_default(tmp_path: Path) -> None:
    text = " ".join(ingot(tmp_path, "serve", "--help").stdout.split())
    for option in SETTINGS.values():
        assert option.positional or f"{option.flag} " in text or f"{option.flag}," in text
        assert f"{option.section}:" in text
        assert option.help in text or option.positional
    assert "(default: 8000)" in text
    assert "--offline, --no-offline" in text


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    return capsys.readouterr().out


def flags_in(text: str) -> list[str]:
    return re.findall(r"^  (?:-\w, )?(--[a-z-]+)", text, re.MULTILINE)


def test_the_settings_that_most_users_set_come_first_in_the_help_of_serve(
    capsys: pytest.CaptureFixture[str],
) -> None:
    listed = flags_in(help_of(capsys, "serve"))
    assert len(FIRST_FLAGS) == 10
    assert listed[2:12] == [SETTINGS[name].flag for name in FIRST_FLAGS] and len(listed) == len(set(listed))


@pytest.mark.parametrize(
    ("command", "own"),
    [
        ("pull", ["--models-dir", "--offline"]),
        ("models", ["--json", "--recommend", "--memory", "--models-dir"]),
        ("rm", ["--yes", "--models-dir"]),
        ("cache list", ["--cache-dir", "--json"]),
    ],
)
def test_a_command_lists_no_settings_that_it_does_not_use(
    capsys: pytest.CaptureFixture[str], command: str, own: list[str]
) -> None:
    text = help_of(capsys, *command.split())
    assert flags_in(text) == ["--help", *own, "--log-level", "--log-format", "--config"]
    assert text.startswith(f"usage: ingot {command} ") and text.count("[FLAGS]") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("sevre",), "ingot: unknown command sevre; did you mean serve?"),
        (("--verzion",), "ingot: unknown flag --verzion; did you mean --version?"),
        (("serve", "--prot", "1"), "ingot serve: unknown flag --prot; did you mean --port?"),
        (("serve", "--prot=1"), "ingot serve: unknown flag --prot; did you mean --port?"),
        (("serve", "--no-offlin"), "ingot serve: unknown flag --no-offlin; did you mean --no-offline?"),
        (("serve", "--port", "x"), "ingot serve: --port: 'x' is not a whole number"),
        (("serve", "--por", "1"), "ingot serve: unknown flag --por; did you mean --port?"),
        (("serve", "a", "b"), "ingot serve: unexpected argument 'b'"),
        (("serve", "a", "--model", "m"), "ingot serve: --model and MODEL say different things: give one of them"),
        (("bench", "srve"), "ingot bench: unknown subject srve; did you mean serve?"),
        (("bench", "serve", "--concurrency", "1,x"), "ingot bench: --concurrency: 'x' is not a whole number"),
        (("bench", "serve", "--requests", "0"), "ingot bench: --requests: 0 is not between 1 and 1048576"),
        (("bench", "serve", "--json", "no/such/x.json"), "ingot bench: cannot write no/such/x.json"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    run_here: Callable[..., Done], arguments: tuple[str, ...], line: str
) -> None:
    done = run_here(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1


def test_a_failure_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    done = ingot(tmp_path, "chat", "http://127.0.0.1:1", by=subprocess.run)
    assert (done.returncode, done.stderr) == (1, "ingot chat: no server answers at http://127.0.0.1:1\n")


def test_a_library_that_cannot_be_loaded_sends_to_the_doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(name: str) -> None:
        raise ImportError("libmlx.so: cannot open shared object file")

    monkeypatch.setattr("ingot.cli.main.importlib.import_module", broken)
    assert main(["serve"]) == 1
    assert capsys.readouterr().err == (
        "ingot serve: libmlx.so: cannot open shared object file. "
        "`ingot doctor` shows what is missing and how to install it.\n"
    )


def test_a_failure_shows_its_traceback_only_when_debugging(tmp_path: Path) -> None:
    done = ingot(tmp_path, "chat", "http://127.0.0.1:1", "--log-level", "debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("ingot chat: no server answers at http://127.0.0.1:1\n")


def test_print_config_says_where_every_value_came_from_and_hides_the_key(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("max_queue = 7\n")
    done = ingot(
        tmp_path, "serve", "some/model", "--config", "x.toml", "--strict", "--print-config", INGOT_API_KEY="hunter22"
    )
    assert done.returncode == 0
    assert '# from: argument MODEL\nmodel = "some/model"' in done.stdout
    assert "# from: flag --strict\nstrict = true" in done.stdout
    assert "# from: file x.toml\nmax_queue = 7" in done.stdout
    assert "# from: env INGOT_API_KEY\n# api_key is set and not shown" in done.stdout
    assert "# from: default\nport = 8000" in done.stdout
    assert "hunter22" not in done.stdout + done.stderr


def test_a_mistake_in_the_file_stops_every_command(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("prot = 7\n")
    done = ingot(tmp_path, "models", INGOT_CONFIG="x.toml")
    assert (done.returncode, done.stderr) == (2, "ingot models: x.toml: unknown key prot; did you mean port?\n")


def test_a_reader_that_leaves_early_is_no_crash(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [INGOT, "serve", "--print-config"]
    done = run(command, stdout=writing, stderr=subprocess.PIPE, env=environment(tmp_path), timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")
