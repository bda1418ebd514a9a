"""The ordinary step on a GPU: tables, addresses, products and norms by kernels."""
