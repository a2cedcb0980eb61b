"""The verbs of the command line, a file each; none imports torch before it runs."""

__all__ = ()
