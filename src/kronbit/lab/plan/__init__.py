"""Plans: the memory of a training, before it is begun."""
