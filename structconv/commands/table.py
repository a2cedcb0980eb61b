"""Tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["number", "print_table"]


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", texts: int = 1) -> None:
    """Print a table, as wide as it needs if the output is a file; its first `texts` columns are text."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    table = Table(title=title or None, title_justify="left")
    for index, header in enumerate(headers):
        table.add_column(header, justify="left" if index < texts else "right")
    for row in rows:
        table.add_row(*row)
    with console.capture() as text:  # the console itself would end the command if the reader closes the pipe
        console.print(table, markup=False)
    print(text.get(), end="")


def number(value: float | None) -> str:
    """Return a number with three decimals, "-" for `None`."""
    return "-" if value is None else f"{value:.3f}"
