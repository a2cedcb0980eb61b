"""The verbs of the command line, one file each; none imports torch before it runs."""

__all__ = ()
