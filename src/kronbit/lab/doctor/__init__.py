"""``kronbit doctor``: checks of this installation and of any optimizer."""
