"""How a parameter becomes blocks, and blocks become stacks."""
