"""Reports of finished runs."""
