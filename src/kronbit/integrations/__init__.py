"""Adapters for other packages. kronbit itself imports none of these modules."""
