"""Memory estimates of a training run, made before it starts."""
