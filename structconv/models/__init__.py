"""Models over the layers, one file a system."""
