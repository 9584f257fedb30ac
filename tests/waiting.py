"""How long a test waits for what must come."""

from __future__ import annotations

from typing import Final

WAIT_S: Final = 120.0  # no machine is so busy; less than pytest's own limit, so that the test says what it waited for
