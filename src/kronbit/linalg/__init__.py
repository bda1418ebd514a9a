"""Pure batched math on stacks of matrices: products, orthogonal factors, inverse roots."""
