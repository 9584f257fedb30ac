"""Missing packages of an extra are named with the command that installs them."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest

from ingot import extras
from ingot.cli import doctor
from ingot.errors import ConfigError, ModelError
from ingot.extras import (
    EXTRA_USES,
    EXTRAS,
    extras_command,
    install_command,
    missing_packages,
    own_requirements,
    require_extra,
    unmet_requirements,
)

PYPROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_requirements_are_those_of_the_project(extra: str) -> None:
    assert list(EXTRAS[extra].values()) == PYPROJECT["project"]["optional-dependencies"][extra]


def test_every_extra_says_what_it_is_for() -> None:
    assert EXTRA_USES.keys() == EXTRAS.keys()


def test_what_ingot_itself_requires_is_known_by_the_name_that_it_is_installed_under() -> None:
    assert {re.split("[<>=]", each)[0] for each in own_requirements()} >= {"mlx", "mlx-lm", "transformers"}


@pytest.mark.parametrize(
    ("found", "is_met"), [("15.0", True), ("18.9.2", True), ("19", False), ("14.2", False), (None, False)]
)
def test_a_version_outside_of_its_range_is_as_good_as_none(
    monkeypatch: pytest.MonkeyPatch, found: str | None, is_met: bool
) -> None:
    monkeypatch.setattr(extras, "installed_version", lambda requirement: found)
    assert (unmet_requirements("audio") == []) is is_met


def test_the_command_is_short_where_the_shell_finds_this_environments_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "bin" / "ingot"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(program.parent))
    assert extras_command("vision") == "ingot extras add vision"
    monkeypatch.setenv("PATH", "/usr/bin")
    assert extras_command("vision") == f"{program} extras add vision"


def test_nothing_is_required_of_who_has_it_and_the_rest_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "EXTRAS", {"some": {"json": "json>=1", "no.such": "such>=2,<3", "nor_this": "this>1"}})
    assert missing_packages("some") == ["such>=2,<3", "this>1"]
    with pytest.raises(ConfigError) as refused:
        require_extra("some", "--this", instead="or do without")
    assert refused.value.message == (
        f"--this needs such and this, which this Python does not have. Run `{extras_command('some')}`, or do without"
    )


def test_the_command_is_for_this_interpreter_wherever_it_lies_and_whatever_installs_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/my apps/bin/python")
    assert install_command(["av>=15,<19"]) == "'/my apps/bin/python' -m pip install 'av>=15,<19'"
    without(monkeypatch, "pip")
    assert install_command(["av>=15,<19"]) == "uv pip install --python '/my apps/bin/python' 'av>=15,<19'"


@pytest.mark.parametrize("module", ["mlx_vlm", "PIL", "av", "pypdfium2"])
def test_a_model_that_sees_is_not_loaded_without_what_it_needs(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    without(monkeypatch, module)
    upstream = importlib.import_module("ingot.models.vision.loading")
    with pytest.raises(ModelError, match=r"extras add vision`, or serve it for text alone with --text-only"):
        upstream.require_vision()


def test_the_doctor_names_what_is_missing_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "av")
    found = {finding.name: finding for finding in doctor.examine_extras()}
    assert (
        found["audio"].state == "note" and found["audio"].detail == "without av; for speech-to-text and text-to-speech"
    )
    assert found["audio"].advice == extras_command("audio")
    assert found["events"].state == "ok" and found["events"].detail.startswith("pyzmq ")


def test_the_script_that_asks_for_torchs_size_finds_which_torch_is_meant() -> None:
    script = (Path(__file__).parents[1] / "tools/torch-is-small").read_text()
    [distribution] = re.findall(r'requires\("([^"]+)"\)', script)
    assert any(each.startswith("torch") for each in importlib.metadata.requires(distribution) or ())
