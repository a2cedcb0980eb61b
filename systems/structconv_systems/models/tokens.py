"""The numbers of special tokens, the same in every vocabulary."""

__all__ = ["BEGIN", "END", "PAD", "SPECIAL", "UNKNOWN"]

PAD, BEGIN, END, UNKNOWN = range(4)
#: By their numbers; the first token of a vocabulary's own comes after them.
SPECIAL = ("<pad>", "<begin>", "<end>", "<unknown>")
