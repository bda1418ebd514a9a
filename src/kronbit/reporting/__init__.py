"""Reports on an optimizer: summary, diagnostics, memory, warnings."""
