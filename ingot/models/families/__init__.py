"""What ingot knows of mlx-lm's model families, as data: a file a family, found by the registry."""
