"""Auxiliary tasks."""
