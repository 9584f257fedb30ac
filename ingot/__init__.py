"""An inference server for language models on MLX."""

from ingot.version import __version__ as __version__
