"""Reports, which show run folders as tables, figures and an HTML page."""
