"""The numbers of special tokens, the same in every vocabulary."""

__all__ = ["BEGIN", "END", "PAD", "SPECIAL", "UNKNOWN"]

PAD, BEGIN, END, UNKNOWN = range(4)
#: In the order of their numbers; the tokens of a vocabulary follow.
SPECIAL = ("<pad>", "<begin>", "<end>", "<unknown>")
