"""Binding, checking and loading of the optimizer's state."""
