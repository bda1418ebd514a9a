"""The ordinary step on a GPU: tables, graphs, and what its kernels read."""
