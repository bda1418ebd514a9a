"""The lab: train, compare, plan and look, from one command (``pip install "kronbit[lab]"``)."""
