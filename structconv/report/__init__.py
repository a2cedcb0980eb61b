"""Self-contained reports on runs."""
