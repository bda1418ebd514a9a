"""Reports: run folders read back, as tables, figures and a page."""
