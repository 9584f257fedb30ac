"""`python -m ingot`: the command `ingot`, by this Python."""

import sys

from ingot.cli.main import main

sys.exit(main())
