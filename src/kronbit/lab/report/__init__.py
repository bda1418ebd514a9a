"""Reports: run folders are read back and shown as tables, figures and an HTML page."""
