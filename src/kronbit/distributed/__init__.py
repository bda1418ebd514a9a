"""Several ranks: who does what, and how results get to the others. No math."""
