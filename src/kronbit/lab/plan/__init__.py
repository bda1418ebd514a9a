"""Memory estimates of a training, made before it starts."""
