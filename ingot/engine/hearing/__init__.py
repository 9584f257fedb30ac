"""Speech to text, as a workload of the engine's loop."""
