"""Copies a user's table with another column, such as paths of saliency maps. The table itself is not changed."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from mcis.datasets.sources.user_table import csv_layout


def extended_table(table: Path, column: str, values: Sequence[str]) -> bytes:
    """Returns the content of a table with another column. A column of that name is replaced.

    Args:
        table: A .csv, .jsonl or .parquet file that `read_user_table` reads.
        column: Name of the column.
        values: A text for each row; an empty one is an empty cell.
    """
    return _EXTENSIONS[table.suffix.lower()](table, column, values)


def _extended_csv(table: Path, column: str, values: Sequence[str]) -> bytes:
    with table.open("rb") as file:
        layout = csv_layout(file)
        read = pa.csv.ReadOptions(use_threads=False, skip_rows=layout.num_skipped)
        parse = pa.csv.ParseOptions(delimiter=layout.delimiter, newlines_in_values=True)
        with pa.csv.open_csv(file, read, parse) as reader:
            names = reader.schema.names

    texts = pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
    content = pa.csv.read_csv(table, read, parse, texts)
    extended = _with_column(content.rename_columns([name.strip() for name in names]), column, values)
    stream = io.StringIO()
    if layout.num_skipped:
        stream.write(f"sep={layout.delimiter}\n")
    writer = csv.writer(stream, delimiter=layout.delimiter, lineterminator="\n")
    writer.writerow(extended.column_names)
    writer.writerows(zip(*(cells.fill_null("").to_pylist() for cells in extended.columns), strict=True))
    return stream.getvalue().encode()


def _extended_jsonl(table: Path, column: str, values: Sequence[str]) -> bytes:
    # Only line feeds end a row: `splitlines` would also split at characters that texts in JSON may contain.
    lines = [line for line in table.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    extended: list[str] = []
    for line, value in zip(lines, values, strict=True):
        extended.append(json.dumps(json.loads(line) | {column: value or None}, ensure_ascii=False) + "\n")
    return "".join(extended).encode()


def _extended_parquet(table: Path, column: str, values: Sequence[str]) -> bytes:
    stream = io.BytesIO()
    pa.parquet.write_table(_with_column(pa.parquet.read_table(table), column, values), stream, compression="zstd")
    return stream.getvalue()


def _with_column(content: pa.Table, column: str, values: Sequence[str]) -> pa.Table:
    """Returns a table with a column of texts at its end, null for empty ones."""
    if column in content.column_names:
        content = content.drop_columns([column])
    return content.append_column(column, pa.array([value or None for value in values], pa.string()))


_EXTENSIONS: dict[str, Callable[[Path, str, Sequence[str]], bytes]] = {
    ".csv": _extended_csv,
    ".jsonl": _extended_jsonl,
    ".parquet": _extended_parquet,
}
"""Suffix of a table -> function that extends it. The suffixes are those of `READERS`."""
