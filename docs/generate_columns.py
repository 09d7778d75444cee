"""Print docs/columns.md, made from the one table of columns: `python docs/generate_columns.py > docs/columns.md`."""

from __future__ import annotations

from ncclep_bench.model.measurement import COLUMNS


def columns_page() -> str:
    """The page as Markdown."""
    rows = [f"| `{name}` | {column.unit} | {column.meaning} |" for name, column in COLUMNS.items()]
    return "\n".join(
        [
            "# Columns",
            "",
            "One row per case in `summary.csv` and in `load_run(...).cases`, in this order. An empty cell means that",
            "the column does not apply or that the case has no such figure: only a passed case has times. Bytes are",
            "summed over ranks; GB/s is 10⁹ bytes per second. This page is made by `docs/generate_columns.py`.",
            "",
            "| column | unit | meaning |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    print(columns_page(), end="")
