"""The catalogue: external item ids ↔ item numbers, training counts, titles.

An item's number is FIRST_ITEM + its row, and a number never changes its meaning within one lineage: `grow`
only appends. N catalogue items
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl

from model.bundle import Bundle
from model.config import FIRST_ITEM, UNK
from training.tables import CSV, RECBOLE, DataError, describe_bad_rows, read_header, read_table

TITLE_COLUMNS = ("title", "movie_title")


@dataclass(frozen=True, eq=False)
class Catalog:
    """Every item a model can name, by row; item number = FIRST_ITEM + row."""

    item_ids: pl.Series
    """(N,) String, no two alike."""
    lineage: str
    """Name of the lineage: sha256 of the first catalogue's ids, kept by everything grown from it."""
    training_counts: np.ndarray
    """(N,) int64: uses in training, 0 until `with_training_counts`."""
    titles: pl.Series
    """(N,) String, null where unknown."""

    def __post_init__(self) -> None:
        if self.item_ids.n_unique() != len(self.item_ids):
            raise ValueError("a catalogue's item ids must differ from one another")
        if not len(self.item_ids) == len(self.training_counts) == len(self.titles):
            raise ValueError(
                f"{len(self.item_ids)} items, {len(self.training_counts)} training counts and"
                f" {len(self.titles)} titles; a catalogue needs one of each per item"
            )

    @classmethod
    def from_ids(cls, ids: Iterable[str]) -> "Catalog":
        """The first catalogue of a new lineage: distinct `ids` in order of first appearance."""
        item_ids = _distinct(ids)
        # Ids hold no control characters, so a line break cannot make two lists of ids look alike.
        lineage = hashlib.sha256("\n".join(item_ids.to_list()).encode()).hexdigest()
        return cls(item_ids, lineage, np.zeros(len(item_ids), dtype=np.int64), _no_titles(len(item_ids)))

    @classmethod
    def of_bundle(cls, bundle: Bundle) -> "Catalog":
        """The catalogue that a bundle's model was trained on."""
        return cls(
            item_ids=pl.Series(bundle.items.ids, dtype=pl.String),
            lineage=bundle.manifest.lineage,
            training_counts=bundle.items.training_counts,
            titles=pl.Series(bundle.items.titles, dtype=pl.String),
        )

    def __len__(self) -> int:
        return len(self.item_ids)

    def grow(self, ids: Iterable[str]) -> "Catalog":
        """This catalogue with the ids it lacks appended; no number moves, the lineage stays."""
        offered = _distinct(ids)
        new = offered.filter(~offered.is_in(self.item_ids.implode()))
        return replace(
            self,
            item_ids=pl.concat([self.item_ids, new]),
            training_counts=np.concatenate([self.training_counts, np.zeros(len(new), dtype=np.int64)]),
            titles=pl.concat([self.titles, _no_titles(len(new))]),
        )

    def num_among(self, ids: Iterable[str]) -> int:
        """How many of this catalogue's items are among `ids`."""
        return int(self.item_ids.is_in(_distinct(ids).implode()).sum())

    def with_training_counts(self, counts: np.ndarray) -> "Catalog":
        """This catalogue with (N,) int64 counts, as `splits.training_counts` gives them."""
        return replace(self, training_counts=counts.astype(np.int64))

    def with_titles(self, titles: Mapping[str, str]) -> "Catalog":
        """This catalogue with the titles of the items it holds; ids it does not hold are left out."""
        found = [titles.get(item_id) for item_id in self.item_ids]
        return replace(self, titles=pl.Series("title", found, dtype=pl.String()))

    def numbers(self, ids: Iterable[str]) -> np.ndarray:
        """Item numbers (int64) of `ids`; UNK for an id the catalogue does not hold."""
        rows = pl.int_range(FIRST_ITEM, FIRST_ITEM + len(self), dtype=pl.Int64(), eager=True)
        asked = pl.Series("item_id", ids, dtype=pl.String())
        return asked.replace_strict(self.item_ids, rows, default=UNK, return_dtype=pl.Int64()).to_numpy()

    def ids(self, numbers: np.ndarray) -> list[str]:
        """External ids of item numbers.

        Raises:
            IndexError: a number is not a catalogue item's.
        """
        rows = np.asarray(numbers, dtype=np.int64) - FIRST_ITEM
        outside = rows[(rows < 0) | (rows >= len(self))]
        if len(outside):
            raise IndexError(
                f"{outside[0] + FIRST_ITEM} is not an item number; the catalogue's are"
                f" {FIRST_ITEM} to {FIRST_ITEM + len(self) - 1}"
            )
        return self.item_ids.gather(rows).to_list()


def read_titles(path: Path) -> dict[str, str]:
    """Item id → title from a RecBole `.item` file or a `.csv` with `item_id` and `title` (or `movie_title`).

    An item with an empty title is left out. Control characters in a title become blanks: titles are printed.

    Raises:
        DataError: a missing column, a bad row, a title without an id, or two titles for one id.
    """
    dialects = {".item": RECBOLE, ".csv": CSV}
    if path.suffix.lower() not in dialects or not path.is_file():
        raise DataError(f"{path} is not a titles file; accepted: an existing .item or .csv file")
    dialect = dialects[path.suffix.lower()]
    header = read_header(path, dialect)
    title = next((name for name in TITLE_COLUMNS if name in header), None)
    if title is None or "item_id" not in header:
        accepted = " or ".join(TITLE_COLUMNS)
        raise DataError(f"{path} needs the columns item_id and {accepted}; its columns: {', '.join(header)}")
    columns = {"item_id": "item_id", "title": title}
    blocks = list(read_table(path, dialect, header, columns, hashlib.sha256()))
    bad = [block.bad.insert_column(0, pl.lit(str(path)).alias("file")) for block in blocks if len(block.bad)]
    if bad:
        raise DataError(f"{path} has bad rows; correct them:\n{describe_bad_rows(pl.concat(bad))}")
    titles: dict[str, str] = {}
    for block in blocks:
        clean = block.rows.select("line", "item_id", title=pl.col("title").str.replace_all(r"\p{Cc}+", " "))
        for line, item_id, text in clean.filter(pl.col("title") != "").iter_rows():
            if not item_id:
                raise DataError(f"{path} line {line}, field item_id: missing; accepted: the id of an item")
            if titles.setdefault(item_id, text) != text:
                raise DataError(
                    f"{path} line {line}, field title, value {text!r}: item {item_id!r} already has the title"
                    f" {titles[item_id]!r}; keep one"
                )
    return titles


def read_retired(path: Path) -> frozenset[str]:
    """The item ids of a text file, one a line; empty lines are passed over, and blanks around an id are no part of it.

    Raises:
        DataError: the file cannot be read, or is not UTF-8.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a list of retired items ({error}); accepted: UTF-8 text, an id a line") from error
    return frozenset(filter(None, map(str.strip, lines)))


def _distinct(ids: Iterable[str]) -> pl.Series:
    return pl.Series("item_id", ids, dtype=pl.String()).unique(maintain_order=True)


def _no_titles(count: int) -> pl.Series:
    return pl.Series("title", [None] * count, dtype=pl.String())
