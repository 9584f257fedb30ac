"""GGUF files, read with the package `gguf`. Its tables are imported without its writer and its vocabularies, which take
longer and are not used here.
"""

from ingot.upstream import defer_package

defer_package("gguf")
