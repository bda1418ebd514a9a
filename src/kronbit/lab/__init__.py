"""The lab: training runs, comparisons, plans and reports (``pip install "kronbit[lab]"``)."""
