"""``kronbit doctor``: what works on this installation, of kronbit and of other optimizers."""
