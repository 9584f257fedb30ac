"""`ingot doctor --measure`: what is ours beside what is MLX's, on this device. It runs in a process of its own."""
