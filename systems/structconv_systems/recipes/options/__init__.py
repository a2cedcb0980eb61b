"""The options of each recipe, by topic; nothing here imports torch."""

__all__ = ()
