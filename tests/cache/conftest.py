from tests.one_path import one_path

__all__ = ["one_path"]
