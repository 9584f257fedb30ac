"""Making a model folder of another: packed, with its head beside it as it was."""
