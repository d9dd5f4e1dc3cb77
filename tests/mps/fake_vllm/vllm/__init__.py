"""Stands in for vLLM: the four names that the plugin touches, called in the order in which vLLM calls them."""

__version__ = "0.23.0-fake"
