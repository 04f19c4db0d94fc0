"""Lay out a table as text; all commands use this."""


def text_table(rows: list[list[str]], widths: list[int] = ()) -> str:
    """Return rows of cells as lines: column 0 aligned left, the others right. The first row is the header.

    widths: least width of each column, so that a table can be printed row by row.
    """
    columns = list(zip(*rows))
    least = [*widths, *[0] * (len(columns) - len(widths))]
    wide = [max(least[i], *map(len, column)) for i, column in enumerate(columns)]
    lines = [
        [
            cell.ljust(n) if i == 0 else cell.rjust(n)
            for i, (cell, n) in enumerate(zip(row, wide))
        ]
        for row in rows
    ]
    return "\n".join("  ".join(line).rstrip() for line in lines)
