"""What a user may set of each recipe, by chapter; nothing here imports torch."""

__all__ = ()
