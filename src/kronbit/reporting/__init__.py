"""Reports of an optimizer on itself."""
