"""What was seen of a server's memory: words, figures, and a plot beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.soak.watch import Sight
from ingot.cli import plots
from ingot.errors import ConfigError
from ingot.extras import require_extra

MB: Final = 1e6
KINDS: Final = ("png", "svg")


@dataclass(frozen=True, slots=True)
class Report:
    """What is `told`, and of that and besides what is `wrong`. `x` are the places of what was `seen`, and `axis` what
    they count. `more` are further lines in bytes."""

    title: str
    told: Sequence[str]
    wrong: Sequence[str]
    seen: Sequence[Sight]
    x: Sequence[float]
    axis: str
    more: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def publish(self, folder: Path) -> int:
        """Print it, write it, and return the exit status: 1 if anything is wrong."""
        notes = [*self.told, *(f"WRONG: {line}" for line in self.wrong)]
        if not self.wrong:
            notes.append("nothing is wrong")
        print("\n".join(notes), flush=True)
        self._write(folder, notes)
        return 1 if self.wrong else 0

    def _write(self, folder: Path, notes: Sequence[str]) -> None:
        """`report.md`, `samples.json`, and, where matplotlib is installed, `memory.png` and `memory.svg`."""
        folder.mkdir(parents=True, exist_ok=True)
        samples: list[dict[str, Any]] = [asdict(sight) for sight in self.seen]
        (folder / "samples.json").write_text(json.dumps({"samples": samples, **self.more}, indent=1) + "\n")
        drawn = [folder / f"memory.{kind}" for kind in KINDS]
        for old in drawn:
            old.unlink(missing_ok=True)
        try:
            require_extra("bench", "The plot of memory")
        except ConfigError as error:
            plot = error.message
            print(plot, flush=True)
        else:
            self._plot(drawn)
            plot = f"![memory]({drawn[0].name})"
        told = "\n".join(f"- {note}" for note in notes)
        (folder / "report.md").write_text(f"# {self.title}\n\n{told}\n\n{plot}\n")
        print(f"the report is in {folder}", flush=True)

    def _plot(self, paths: Sequence[Path]) -> None:
        figure, [[memory], [counts]] = plots.panels(2, 1)
        plots.draw(memory, self.x, {name: [value / MB for value in line] for name, line in self._memory().items()})
        memory.set(title=self.title, ylabel="MB")
        lines = {
            "threads": [sight.threads for sight in self.seen],
            "open files": [sight.files for sight in self.seen],
            "temporary files": [sight.temporary for sight in self.seen],
        }
        plots.draw(counts, self.x, lines)
        counts.set(xlabel=self.axis)
        plots.save(figure, *paths)

    def _memory(self) -> dict[str, Sequence[float]]:
        """Lines that are zero throughout say nothing."""
        lines: dict[str, Sequence[float]] = {
            "resident: the server": [sight.resident for sight in self.seen],
            "resident: its child processes": [sight.children for sight in self.seen],
            "MLX's active memory": [sight.active for sight in self.seen],
            "KV memory in use or cached": [sight.held for sight in self.seen],
            "taken on the device": [sight.device for sight in self.seen],
            **self.more,
        }
        return {name: line for name, line in lines.items() if any(line)}
