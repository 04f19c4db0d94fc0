"""The one way in which every command lays out a table as text."""


def text_table(rows: list[list[str]], widths: list[int] = ()) -> str:
    """Lay out rows of cells, the first of them the header: column 0 to the left, the others to the right.

    widths: the least width of each column, for tables that are printed row by row.
    """
    columns = list(zip(*rows))
    least = [*widths, *[0] * (len(columns) - len(widths))]
    wide = [max(least[i], *map(len, column)) for i, column in enumerate(columns)]
    lines = [[cell.ljust(n) if i == 0 else cell.rjust(n) for i, (cell, n) in enumerate(zip(row, wide))]
             for row in rows]
    return "\n".join("  ".join(line).rstrip() for line in lines)
