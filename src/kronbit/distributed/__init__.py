"""Several ranks: how work is divided and results are exchanged. No math."""
