"""Other packages' ways to make an optimizer; nothing here is imported unless asked for."""
