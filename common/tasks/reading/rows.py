"""Rows of tables, as in their files: no type is guessed, and a cell is its text."""

import csv
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from functools import partial
from itertools import chain, dropwhile, islice
from pathlib import Path
from typing import Any, TextIO

import numpy

from ...data.facts import say, shorten
from ...errors import UsageError, first_line
from ..streams import cache_folder, rows_on_disk
from .text_files import Place, ending_of, open_text, packing_of

VERSION = 3  # of the rows on disk: a new number makes new files
MAX_BYTES_IN_MEMORY = 16_000_000  # the rows of larger files stay on disk
UNPACKED = 8  # times the size of a packed file, about
ROWS_PER_READ = 1000  # of a large file
COLUMNS_NAMED = 50  # in a line
ROWS_LOOKED_AT = 100  # for the names of the columns of a large file
SEPARATORS = (",", ";", "\t", "|")
EXCEL = re.compile(r'"?sep=(.)"?\s*', re.IGNORECASE)  # its first line may name the separator
QUOTED = re.compile(r'"(?:[^"]|"")*"')  # a cell that CSV reads without its quotes
GAP: Any = re.compile(r"\s*")  # before the next character that is not white space; it always matches
HALF = r"\\u[dD][{}][\da-fA-F]{{2}}"  # of a character in UTF-16, as JSON writes it
# Two halves that belong together, one alone, or anything else after a backslash.
ESCAPE = re.compile(rf"{HALF.format('89abAB')}{HALF.format('c-fC-F')}|({HALF.format('89a-fA-F')})|\\.", re.DOTALL)
NARROW = ("float16", "float32")
NO_CLASS = -1  # of `datasets`: a class that is not known
FORM = 'expected one object per line, such as {"text": "Why?"}, or one list of them'  # of JSON

Row = dict[str, Any]


class Number(float):
    """A number with a fraction, or with an exponent, of a JSON file, that keeps its spelling there: 1.10."""

    text: str

    def __new__(cls, text: str) -> "Number":
        number = super().__new__(cls, text)
        number.text = text
        return number


@dataclass(frozen=True)
class Table:
    """The rows of a split."""

    name: str  # of the source, for messages
    column_names: list[str]  # of all rows
    rows: Any  # a list of rows, perhaps without some cells; or a reader of rows, such as a `datasets.Dataset`
    key: object  # differs for each table
    num_bytes: int  # about
    kinds: dict[str, Any]  # {column: its type in `datasets`} of a file that has types

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        """A row. Its cells are texts or None; lists, dicts and bytes are unchanged."""
        return self._with_texts(self.rows[index])

    def __iter__(self) -> Iterator[Row]:
        return map(self._with_texts, self.rows)

    def _with_texts(self, row: Row) -> Row:
        cells = dict.fromkeys(self.column_names) | row
        return {
            name: cell if isinstance(cell, list | dict | bytes) else text_of_cell(cell, self.kinds.get(name))
            for name, cell in cells.items()
        }

    def check_columns(self, columns: dict[str, str]) -> None:
        """Raises UsageError unless the table has these columns, {flag that names a column: its name}."""
        for flag, name in columns.items():
            if name not in self.column_names and name.partition(".")[0] not in self.column_names:
                found = [repr(each) if re.search(r"^\s|\s$|,", each) else each for each in self._named_texts()]
                advice = f"use {flag} with one of {shorten(found, COLUMNS_NAMED)}{self.form}"
                raise UsageError(f"--data {self.name} has no column {name}: {advice}")

    @property
    def form(self) -> str:
        """For messages: what is expected instead of a single JSON object that may hold all rows; "" for others."""
        is_alone = len(self) == 1 and not self.kinds and any(isinstance(cell, list | dict) for cell in self[0].values())
        return f"; it has one row: {FORM}" if is_alone else ""

    def _named_texts(self) -> Iterator[str]:
        """The columns; a column with texts by name becomes "translation.de" and so on."""
        for column, cell in next(iter(self), dict.fromkeys(self.column_names)).items():
            texts = isinstance(cell, dict) and all(isinstance(text, str) for text in cell.values())
            yield from (f"{column}.{key}" for key in cell) if texts and cell else [column]

    def say_unread(self, *read: str) -> None:
        """Prints the columns that are not among these."""
        if unread := [name for name in self.column_names if name not in read]:
            say(f"--data {self.name}: columns not read: {shorten(unread, COLUMNS_NAMED)}")

    def has_classes(self, *columns: str | None) -> bool:
        """Whether any cell of a column has a class: not empty, not -1 or -100 (no class), nor a list of only these."""
        found = [each for each in columns if each and {each, each.partition(".")[0]} & {*self.column_names}]
        cells = ([*cell.values()] if isinstance(cell, dict) else cell for each in found for cell in self.values(each))
        cells = (cell if isinstance(cell, list) else [cell] for cell in cells)
        nothing = {"", "[]", "-1", "-1.0", "-100"}
        return any({str(one).strip() for one in cell if one is not None} - nothing for cell in cells)

    def values(self, column: str) -> Any:
        """A sequence of the cells of a column; for "translation.de", the values that its cells have as "de"."""
        whole, _, part = column.partition(".")
        if column not in self.column_names and part:
            cells = self.read(whole, lambda cell: cell if isinstance(cell, dict) else parts_of_cell(cell))
            return [cell.get(part) if isinstance(cell, dict) else None for cell in cells]
        is_dataset = hasattr(self.rows, "select_columns")  # which need not read whole rows
        return TableColumn(self.rows, column) if is_dataset else [row.get(column) for row in self.rows]

    def texts(self, column: str) -> Iterator[str | None]:
        """The text in each row of a column; None if there is none. Raises UsageError for lists."""
        return self.read(column, partial(text_of_cell, kind=self.kinds.get(column)))

    def read(self, column: str, read: Callable[[Any], Any]) -> Iterator[Any]:
        """What `read` returns for each cell of a column; its UsageErrors get the place."""
        for number, cell in enumerate(self.values(column), start=1):
            try:
                yield read(cell)
            except UsageError as error:
                raise UsageError(f"--data {self.name}, row {number}, column {column}: {error}{self.form}") from None

    def lists(self, column: str, separator: str | None = None) -> Iterator[list[str]]:
        """The texts in the list, or of the text that a separator or white space divides, in each row of a column."""
        kind = getattr(self.kinds.get(column), "feature", None)
        return self.read(column, lambda cell: [text_of_cell(one, kind) or "" for one in parts_of_cell(cell, separator)])

    def numbers(self, column: str) -> Iterator[float]:
        """The number in each row of a column. Raises UsageError if there is none."""
        for row, text in enumerate(self.texts(column), start=1):
            number = math.nan
            with suppress(ValueError):
                number = float(text or "nan") if "_" not in (text or "") else math.nan  # Python reads 1_000 as 1000
            if not math.isfinite(number):
                advice = f"expected a number, got '{text or ''}'; correct it or remove the row or column"
                raise UsageError(f"--data {self.name}: column {column}, row {row} below the header: {advice}")
            yield number


class TableColumn:
    """A column of a `datasets.Dataset` as its files hold it, six times as fast as by the dataset itself. `parse`: for
    each cell; None: unchanged."""

    def __init__(self, table: Any, name: str, parse: Callable[[Any], Any] | None = None):
        self.table, self.name, self.parse = table.select_columns(name).with_format("arrow"), name, parse

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, wanted: int | slice) -> Any:
        found = self.table[wanted][self.name].to_pylist()
        found = found if self.parse is None else [*map(self.parse, found)]
        return found if isinstance(wanted, slice) else found[0]

    def __iter__(self) -> Iterator[Any]:
        return (cell for start in range(0, len(self), ROWS_PER_READ) for cell in self[start : start + ROWS_PER_READ])


def table_of_dataset(data: str, split: Any) -> Table:
    """The rows of a `datasets.Dataset`; its images and recordings are not decoded."""
    import datasets  # not at the top: the import takes seconds

    plain = datasets.Image(decode=False)
    for column, kind in split.features.items():
        if isinstance(kind, datasets.Audio):
            split = split.cast_column(column, datasets.Audio(decode=False))
        if holds_images(kind):
            split = split.cast_column(column, plain if isinstance(kind, datasets.Image) else datasets.List(plain))
    name = f"{data}, {split.split}" if split.split else data
    return Table(name, split.column_names, split, split._fingerprint, split.data.nbytes, split.features)


def holds_images(kind: Any) -> bool:
    """Whether a column of this type in `datasets` holds images, or lists of them."""
    return getattr(kind, "feature", kind).__class__.__name__ == "Image"


def rows_with_text(table: Table, *columns: str, beside: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
    """The texts in these columns of each row, and its value of `beside`. Rows without text are left out and counted."""
    rows = list(zip(*map(table.texts, columns)))
    if empty := {number for number, row in enumerate(rows) if not all(text and text.strip() for text in row)}:
        what = f"{len(empty):,} of {len(rows):,} rows have no text in column {' or '.join(columns)}"
        say(f"--data {table.name}: {what}, such as row {min(empty) + 1}: left out")
    more = [()] * len(rows) if beside is None else [*zip(beside)]
    return [(*row, *more[number]) for number, row in enumerate(rows) if number not in empty]


def parts_of_cell(cell: Any, separator: str | None = None) -> list[Any]:
    """A list, or the parts of a text. Raises UsageError for a list or dict that pandas' `to_csv` wrote as text."""
    text = cell if isinstance(cell, list) else text_of_cell(cell) or ""
    if isinstance(text, str) and re.match(r"[\[{]\s*(['\"].*|[-+.,\d\s]*)[\]}]$", text, re.DOTALL):
        raise UsageError(f"a cell has a list or dict as text, {text[:40]}: use a real one, in JSON lines or parquet")
    return text.split(separator) if isinstance(text, str) else text


def text_of_cell(value: Any, kind: Any = None) -> str | None:  # noqa: PLR0911 - one for each type
    """The text of a cell; None if it has none, or NaN. `kind`: the type of its column in `datasets`, if it has one.
    Raises UsageError if the cell holds a list, a dict or bytes that are not text."""
    if value is not None and hasattr(kind, "int2str"):  # a class that has a name and a number
        value = kind.encode_example(value)
        value = None if value == NO_CLASS else kind.int2str(value)
    match value:
        case None | str():
            return value
        case bool():
            return str(value).lower()
        case Number():
            return value.text
        case float() if math.isnan(value):
            return None
        case float() if getattr(kind, "dtype", None) in NARROW:
            return str(numpy.dtype(kind.dtype).type(value))  # 0.1, which is 0.10000000149 in 64 bits
        case datetime():
            return str(value).removesuffix(" 00:00:00")
        case bytes():
            with suppress(UnicodeDecodeError):
                return value.decode()
        case int() | float() | date() | time() | Decimal():
            return str(value)
    raise UsageError(f"expected text, found {type(value).__name__} {str(value)[:40]}")


def table_of(data: str, places: Sequence[Place], max_rows: int | None, kinds: dict[str, Any]) -> Table:
    """The rows of CSV, TSV or JSON files, up to `max_rows`: small ones in memory, others on disk. `data`: for messages;
    `kinds`: {column: its declared type in `datasets`}. Raises UsageError for an unreadable file, or no rows."""
    local = [place for place in places if isinstance(place, Path)]
    stats = [place.stat() for place in local]
    sizes = [stat.st_size * (UNPACKED if packing_of(place) else 1) for place, stat in zip(local, stats)]
    facts = [str(place.resolve() if isinstance(place, Path) else place) for place in places]
    key = (VERSION, facts, [(stat.st_size, stat.st_mtime_ns) for stat in stats], max_rows)
    rows = islice(_rows_of_all(places), max_rows)
    if len(local) == len(places) and sum(sizes) <= MAX_BYTES_IN_MEMORY:
        found: Any = [row for row, _ in rows]
        first, size = found, sum(sizes)
    else:
        import datasets  # not at the top: the import takes seconds

        features = datasets.Features({"row": datasets.Value("large_string")})
        texts = ({"row": text or json.dumps(row, ensure_ascii=False)} for row, text in rows)
        disk = rows_on_disk(cache_folder("rows", key), f"reading --data {data}", texts, features, max_rows)
        found = TableColumn(disk, "row", _parse)
        first, size = islice(found, ROWS_LOOKED_AT), disk.data.nbytes
    if len(found) == 0:
        raise UsageError(f"--data {data}: {places[0]} has no rows: expected a name for each column, and rows")
    return Table(data, [*dict.fromkeys(name for row in first for name in row)], found, key, size, kinds)


def _rows_of_all(places: Sequence[Place]) -> Iterator[tuple[Row, str]]:
    """(row, its JSON text, or "" if it has none) of all files. Raises UsageError."""
    found = Counter[str]()
    for place in places:
        is_json = ending_of(place) not in (".csv", ".tsv")
        with open_text(place, "\n" if is_json else "") as text:
            if is_json:
                yield from _json_rows(place, text, found)
            else:
                yield from ((row, "") for row in _csv_rows(place, text))
    if found["rows"]:
        say(f"{found.total():,} rows have half of a character (\\ud800 to \\udfff): read as \N{REPLACEMENT CHARACTER}")


def _csv_rows(place: Place, text: TextIO) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    lines_with_text = filter(str.strip, text)
    first = next(lines_with_text, "")
    each = ["\t"] if ending_of(place) == ".tsv" else SEPARATORS
    if named := EXCEL.fullmatch(first):
        each, first = [named[1]], next(lines_with_text, "")
    if re.match(r'\s*({\s*"|\[\s*{|<[!?h])', first):
        raise UsageError(f"{place} is no {ending_of(place)} but JSON or HTML")
    separator = next((one for one in each if len(next(csv.reader([first], delimiter=one), [])) > 1), each[0])
    if separator not in (",", "\t"):
        say(f"{place}: '{separator}' separates its columns")
    quoting: Any = _quoting_of_tabs(place, first) if separator == "\t" else csv.QUOTE_MINIMAL
    lines = csv.reader(chain([first], text), delimiter=separator, strict=True, quoting=quoting)
    try:
        header = next(lines, [])
        if twice := [name for name, number in Counter(header).items() if number > 1 and name]:
            raise UsageError(f"{place} has several columns called {twice[0]}: give each its own name")
        for number, cells in enumerate(filter(None, lines), start=1):
            if len(cells) > len(header):
                what = f"{place}: row {number} has {len(cells)} values, the header has {len(header)} names"
                raise UsageError(f'{what}: put text that contains "{separator}" in quotes')
            yield dict(zip(header, cells))
    except csv.Error as error:
        advice = "put text that contains quotes in quotes, and double the quotes inside"
        raise UsageError(f"{place}, line {lines.line_num}: {error}: {advice}") from None


def _quoting_of_tabs(place: Place, first: str) -> Any:
    """Whether quotes are text, as in text/tab-separated-values; or CSV's: if no fewer rows have a cell for each name
    then, and the header is in quotes or quotes are doubled. Says which, if it matters."""
    fits, sizes, begins, doubled = list[tuple[int, int]](), list[int](), False, False
    for quoting in (csv.QUOTE_NONE, csv.QUOTE_MINIMAL):
        with open_text(place, "", says_encoding=False) as text, suppress(csv.Error):
            lines = csv.reader(dropwhile(first.__ne__, text), delimiter="\t", strict=True, quoting=quoting)
            header, widths = next(lines, []), Counter[int]()
            for cells in chain([header], filter(None, lines)):
                widths[len(cells)] += 1
                if not fits and (quoted := [cell for cell in cells if cell.startswith('"')]):
                    begins = True
                    doubled |= cells is header or any('""' in cell and QUOTED.fullmatch(cell) for cell in quoted)
            good, size = widths[len(header)], widths.total()
            fits.append((good if len(header) > 1 else 0, good - size))
            sizes.append(size - 1)
        if not begins:
            break
    if len(fits) < 2:
        return csv.QUOTE_NONE
    as_csv = fits[1] > fits[0] or (fits[1] == fits[0] and doubled)
    rule, other = ("surround cells, as in CSV", "as text") if as_csv else ("are text, as usual in TSV", "as CSV")
    say(f"{place}: its quotation marks {rule}: {sizes[as_csv]:,} rows ({sizes[not as_csv]:,} {other})")
    return csv.QUOTE_MINIMAL if as_csv else csv.QUOTE_NONE


def _json_rows(place: Place, text: TextIO, halves: Counter[str]) -> Iterator[tuple[Row, str]]:
    """(object, its text) of JSON lines or a JSON list. `halves` counts rows with half a character (replaced)."""
    number, is_first = 0, True
    try:
        for line in text:
            number += 1
            if (is_list := line.lstrip().startswith("[")) or (is_first and _goes_on(line)):
                line += text.read()
            for part in _items(line) if is_list else filter(str.strip, [line]):
                whole = ESCAPE.sub(lambda found: r"\ufffd" if found[1] else found[0], part) if r"\u" in part else part
                halves["rows"] += whole != part
                yield _parse(whole), whole
            is_first = is_first and not line.strip()
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise
        raise UsageError(f"{place}, line {number}: {first_line(error)}: {FORM}") from None


def _goes_on(line: str) -> bool:
    """Whether the first line of a file ends within an object, which has several lines."""
    try:
        DECODER.decode(line)
    except json.JSONDecodeError as error:
        return line.lstrip().startswith("{") and error.pos >= len(line.rstrip()) - 1
    return False


def _items(text: str) -> Iterator[str]:
    """The text of each item of a JSON list. Raises ValueError."""
    at = GAP.match(text, text.index("[") + 1).end()
    while at < len(text) and text[at] != "]":
        end = GAP.match(text, DECODER.raw_decode(text, at)[1]).end()
        yield text[at:end]
        if text[end : end + 1] not in (",", "]"):
            raise ValueError(f"the list continues with {text[end : end + 20]!r}")
        at = GAP.match(text, end + 1).end() if text[end] == "," else end
    if text[at:].strip() != "]":
        raise ValueError("the list does not end with ]")


def _parse(text: str) -> Row:
    """A row from its JSON text. Raises ValueError, and RecursionError for a deep one."""
    row = DECODER.decode(text)
    if not isinstance(row, dict):
        raise ValueError(f"it holds {text.strip()[:20]}")
    return row


def _object(pairs: list[tuple[str, Any]]) -> Row:
    found = dict(pairs)
    if len(found) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {name} occurs twice in one object")
    return found


DECODER = json.JSONDecoder(parse_float=Number, parse_constant=lambda _: None, object_pairs_hook=_object)
