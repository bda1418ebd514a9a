"""The lab: trainings, comparisons, plans and reports (``pip install "kronbit[lab]"``)."""
