"""What ingot knows of mlx-lm's model families, as data: tables that the registry looks up."""
