"""Reading logs: every format, every kind of bad row, and the order of events."""

import csv
import hashlib
import io
import json
import math
import random
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from training import tables
from training.events import Columns, DataConfig, EventLog, WeightMap, read_events, sort_events
from training.tables import DataError

STRANGE_IDS = [
    "007",
    "7",
    "7.0",
    "1e3",
    "😀🎬",
    "a,b",
    'say "hi"',
    "naïve",
    " padded ",
    "NULL",
    "é" * 128,
    "1;2",
]


def rows_of(log: EventLog) -> list[tuple[str, str, float, float]]:
    return log.events.rows()


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def rejects_of(config: DataConfig) -> list[dict[str, object]]:
    # Not splitlines: it also splits at U+0085, which may stand in a value.
    return [json.loads(line) for line in config.rejects_path.read_text().split("\n") if line]


def lenient(path: Path, **settings: object) -> DataConfig:
    return DataConfig.model_validate({"path": path, "max_bad_share": 1.0, **settings})


# Formats


def test_all_formats_of_one_log_read_alike(tmp_path: Path) -> None:
    events = [("u1", "007", 5.0), ("u2", "7", 3.0), ("u1", "x y", 4.5)]
    frame = pl.DataFrame(events, schema=["user_id", "item_id", "timestamp"], orient="row")
    frame.write_csv(tmp_path / "log.csv")
    frame.write_parquet(tmp_path / "log.parquet")
    header = "user_id:token\titem_id:token\ttimestamp:float\n"
    write(tmp_path / "log.inter", header + "".join(f"{u}\t{i}\t{t}\n" for u, i, t in events))

    expected = [("u1", "x y", 4.5, 1.0), ("u1", "007", 5.0, 1.0), ("u2", "7", 3.0, 1.0)]
    for name in ("log.csv", "log.parquet", "log.inter"):
        assert rows_of(read_events(DataConfig(path=tmp_path / name))) == expected, name


def test_a_line_file_gives_each_users_items_in_the_order_of_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / "log.txt", "9 3 1  2 \n10\t5 5\n\n9 4\n")
    log = read_events(DataConfig(path=path))

    assert [row[:2] for row in rows_of(log)] == [
        ("10", "5"), ("10", "5"), ("9", "3"), ("9", "1"), ("9", "2"), ("9", "4"),
    ]  # fmt: skip
    assert all(math.isnan(row[2]) for row in rows_of(log))
    summary = log.summary()
    assert (summary["rows_read"], summary["blank_lines"]) == (6, 1)
    assert summary["has_timestamps"] is False
    assert summary["tied_events_share"] is summary["tied_last_two_users_share"] is None


@pytest.mark.parametrize("item_id", STRANGE_IDS)
def test_ids_come_back_exactly_as_written(item_id: str, tmp_path: Path) -> None:
    text = io.StringIO()
    csv.writer(text).writerows([["item_id", "user_id"], [item_id, "u"], ["plain", item_id]])
    pl.DataFrame({"user_id": ["u", item_id], "item_id": [item_id, "plain"]}).write_parquet(tmp_path / "l.parquet")
    write(tmp_path / "l.csv", text.getvalue())
    write(tmp_path / "l.inter", f"user_id:token\titem_id:token\nu\t{item_id}\n{item_id}\tplain\n")

    for name in ("l.csv", "l.parquet", "l.inter"):
        found = {row[:2] for row in rows_of(read_events(DataConfig(path=tmp_path / name)))}
        assert found == {("u", item_id), (item_id, "plain")}, name


def test_whole_numbers_in_parquet_become_their_decimal_text(tmp_path: Path) -> None:
    pl.DataFrame({"user_id": [7], "item_id": pl.Series([2**63], dtype=pl.UInt64)}).write_parquet(tmp_path / "l.pq")

    assert rows_of(read_events(DataConfig(path=tmp_path / "l.pq")))[0][:2] == ("7", str(2**63))


def test_a_float_id_column_in_parquet_is_refused(tmp_path: Path) -> None:
    pl.DataFrame({"user_id": [7.0], "item_id": ["a"]}).write_parquet(tmp_path / "l.parquet")

    with pytest.raises(DataError, match=r"column 'user_id' for user_id has type Float64; accepted: String"):
        read_events(DataConfig(path=tmp_path / "l.parquet"))


def test_columns_can_have_any_name_and_order(tmp_path: Path) -> None:
    path = write(tmp_path / "l.csv", "note,when,what,who,w\n-,5,a,u,0.5\n")
    columns = Columns(user_id="who", item_id="what", timestamp="when", weight="w")

    assert rows_of(read_events(DataConfig(path=path, columns=columns))) == [("u", "a", 5.0, 0.5)]


def test_a_byte_order_mark_and_windows_line_ends_change_nothing(tmp_path: Path) -> None:
    body = 'user_id,item_id\r\nu,a\r\n"u","b"\r\nv,c'
    path = write(tmp_path / "l.csv", b"\xef\xbb\xbf" + body.encode())
    lines = write(tmp_path / "l.txt", b"\xef\xbb\xbfu a\r\n")

    assert [row[:2] for row in rows_of(read_events(DataConfig(path=path)))] == [
        ("u", "a"),
        ("u", "b"),
        ("v", "c"),
    ]
    assert [row[:2] for row in rows_of(read_events(DataConfig(path=lines)))] == [("u", "a")]


def test_a_folder_is_read_in_the_order_of_file_names(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    write(folder / "part-2.csv", "user_id,item_id\nu,second\n")
    write(folder / "part-1.csv", "item_id,user_id\nfirst,u\n")
    write(folder / "_SUCCESS", "")
    log = read_events(DataConfig(path=folder))

    listing = "".join(
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in ("part-1.csv", "part-2.csv")
    )
    assert [row[1] for row in rows_of(log)] == ["first", "second"]
    assert log.sha256 == hashlib.sha256(listing.encode()).hexdigest()


@pytest.mark.parametrize("name", ["l.csv", "l.txt", "l.parquet"])
def test_sha256_is_that_of_the_files_bytes(name: str, tmp_path: Path) -> None:
    if name == "l.parquet":
        pl.DataFrame({"user_id": ["u"], "item_id": ["a"]}).write_parquet(tmp_path / name)
    else:
        first = b"u a\r\n" if name == "l.txt" else b"user_id,item_id\r\n"
        write(tmp_path / name, b"\xef\xbb\xbf" + first + b"v,w x\r\n\r\n")
    log = read_events(DataConfig(path=tmp_path / name))

    assert log.sha256 == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()


# Quoting and blocks


def test_a_quoted_line_break_does_not_shift_later_line_numbers(tmp_path: Path) -> None:
    path = write(
        tmp_path / "l.csv",
        'user_id,note,item_id\nu,"one\ntwo, ""three""\n\nfour",a\nu,-,\nu,"x",b\n',
    )
    config = lenient(path)
    log = read_events(config)

    assert [row[1] for row in rows_of(log)] == ["a", "b"]
    assert [(row["line"], row["field"], row["reason"]) for row in rejects_of(config)] == [(6, "item_id", "missing")]
    assert log.blank_lines == 0


def test_a_stray_quote_costs_its_own_row_and_no_other(tmp_path: Path) -> None:
    rows = [f"u,item {n},{n}" for n in range(2, 400)]
    rows[10] = 'u,"never closed,12'
    rows[20] = 'u,"too"late,22'
    rows[30] = 'u,5" disk,32'
    path = write(tmp_path / "l.csv", "user_id,item_id,timestamp\n" + "\n".join(rows) + "\n")
    config = lenient(path)
    log = read_events(config)

    assert [row["line"] for row in rejects_of(config)] == [12, 22]
    assert len(log.events) == len(rows) - 2
    assert ("u", '5" disk', 32.0, 1.0) in rows_of(log)


def test_two_stray_quotes_do_not_swallow_the_rows_between_them(tmp_path: Path) -> None:
    path = write(tmp_path / "l.csv", 'user_id,item_id\nu,"a\nu,b\nu,c"\nu,d\n"u",e\n')
    config = lenient(path)
    log = read_events(config)

    # Read as one field, lines 2 to 4 would be an id with line breaks: refused as one row, at its first line.
    assert [row[1] for row in rows_of(log)] == ["d", "e"]
    assert [(row["line"], row["reason"]) for row in rejects_of(config)] == [(2, "holds a control character")]


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 1000])
def test_where_a_block_ends_makes_no_difference(
    block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(3)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["user_id", "item_id", "note"])
    expected = []
    for n in range(60):
        note = generator.choice(["", 'a "b"', "two\nlines", "😀\n\n,", "plain"])
        writer.writerow([f"u{n:02}", f"i😀{n}", note])
        expected.append((f"u{n:02}", f"i😀{n}"))
    path = write(tmp_path / "l.csv", text.getvalue() + 'u99,"open\n')
    monkeypatch.setattr(tables, "BLOCK_BYTES", block_bytes)
    config = lenient(path)
    log = read_events(config)

    assert [row[:2] for row in rows_of(log)] == expected
    assert [row["line"] for row in rejects_of(config)] == [text.getvalue().count("\n") + 1]
    assert log.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


FIELD = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=6)
NOTE = st.text(st.sampled_from('ab,"\n é'), max_size=6)


@given(st.lists(st.tuples(FIELD, FIELD, NOTE), min_size=1, max_size=12))
def test_any_csv_that_pythons_writer_makes_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, str]]
) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("user_id", "item_id", "note"), *rows])
    path = write(tmp_path_factory.mktemp("csv") / "l.csv", text.getvalue())
    log = read_events(DataConfig(path=path))

    assert sorted(row[:2] for row in rows_of(log)) == sorted(row[:2] for row in rows)
    assert log.rows_rejected == 0


# Timestamps


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("881250949", 881250949.0),
        ("881250949.25", 881250949.25),
        ("8.5e8", 8.5e8),
        ("0", 0.0),
        ("1997-12-04T15:55:49Z", datetime(1997, 12, 4, 15, 55, 49, tzinfo=UTC).timestamp()),
        ("1997-12-04T15:55:49", datetime(1997, 12, 4, 15, 55, 49, tzinfo=UTC).timestamp()),
        ("1997-12-04 15:55:49.5", datetime(1997, 12, 4, 15, 55, 49, 500_000, tzinfo=UTC).timestamp()),
        ("1997-12-04T15:55:49.5+02:00", datetime(1997, 12, 4, 13, 55, 49, 500_000, tzinfo=UTC).timestamp()),
        ("1997-12-04", datetime(1997, 12, 4, tzinfo=UTC).timestamp()),
    ],
)
def test_a_timestamp_is_seconds_or_iso_8601(text: str, seconds: float, tmp_path: Path) -> None:
    path = write(tmp_path / "l.csv", f"user_id,item_id,timestamp\nu,a,{text}\n")

    assert rows_of(read_events(DataConfig(path=path)))[0][2] == seconds


def test_milliseconds_are_divided_but_iso_8601_is_not(tmp_path: Path) -> None:
    path = write(tmp_path / "l.csv", "user_id,item_id,timestamp\nu,a,881250949125\nu,b,1970-01-01T00:00:01Z\n")
    log = read_events(DataConfig(path=path, timestamp_unit="ms"))

    assert [row[2] for row in rows_of(log)] == [1.0, 881250949.125]


@pytest.mark.parametrize("unit", ["s", "ms"])
@pytest.mark.parametrize("precision", ["ms", "us", "ns"])
def test_parquet_date_times_need_no_unit(unit: str, precision: str, tmp_path: Path) -> None:
    moment = datetime(2024, 2, 29, 12, 30, 15, 500_000, tzinfo=UTC)
    times = pl.Series([moment], dtype=pl.Datetime(precision, "UTC"))  # type: ignore[arg-type]
    pl.DataFrame({"user_id": ["u"], "item_id": ["a"], "timestamp": times}).write_parquet(tmp_path / "l.parquet")

    log = read_events(lenient(tmp_path / "l.parquet", timestamp_unit=unit))
    assert rows_of(log)[0][2] == moment.timestamp()


# Weights


def test_weights_by_event_type_keep_an_event_of_weight_zero(tmp_path: Path) -> None:
    path = write(tmp_path / "l.csv", "user_id,item_id,type\nu,a,view\nu,b,buy\nu,c,hide\nu,d,\n")
    weight_map = WeightMap(column="type", values={"view": 0.5, "buy": 2, "hide": 0}, default=1.0)

    assert [row[3] for row in rows_of(read_events(DataConfig(path=path, weight_map=weight_map)))] == [
        0.5,
        2,
        0,
        1,
    ]


@pytest.mark.parametrize("name", ["l.csv", "l.parquet"])
def test_ratings_are_matched_as_numbers(name: str, tmp_path: Path) -> None:
    frame = pl.DataFrame({"user_id": ["u"] * 3, "item_id": ["a", "b", "c"], "rating": [5.0, 1.0, 4.5]})
    frame.write_csv(tmp_path / "l.csv")
    frame.write_parquet(tmp_path / "l.parquet")
    weight_map = WeightMap(column="rating", values={"5": 3.0, "1": 0.0}, default=1.0)

    log = read_events(DataConfig(path=tmp_path / name, weight_map=weight_map))
    assert [row[3] for row in rows_of(log)] == [3.0, 0.0, 1.0]


def test_without_a_default_an_unlisted_value_is_a_bad_row(tmp_path: Path) -> None:
    path = write(tmp_path / "l.csv", "user_id,item_id,rating\nu,a,5\nu,b,4\n")
    config = lenient(path, weight_map={"column": "rating", "values": {"5": 1.0}})
    read_events(config)

    (reject,) = rejects_of(config)
    assert (reject["line"], reject["field"], reject["value"]) == (3, "rating", "4")
    assert "a value of weight_map: 5" in str(reject["accepted"])


# Bad rows

BAD_FIELDS = [
    ("user_id", "", "missing"),
    ("user_id", "x" * 257, "too long"),
    ("user_id", "é" * 129, "too long"),
    ("item_id", "a\x07b", "holds a control character"),
    ("item_id", "a\x7fb", "holds a control character"),
    ("item_id", "a\x85b", "holds a control character"),
    ("timestamp", "", "missing"),
    ("timestamp", "soon", "not a time"),
    ("timestamp", "nan", "not a time"),
    ("timestamp", "inf", "not a time"),
    ("timestamp", "1997-02-30", "not a time"),
    ("timestamp", "-1", "before 1970"),
    ("timestamp", "1969-12-31", "before 1970"),
    ("timestamp", "881250949000", "after the year 9999"),
    ("weight", "", "missing"),
    ("weight", "much", "not a weight"),
    ("weight", "-0.5", "not a weight"),
    ("weight", "nan", "not a weight"),
    ("weight", "inf", "not a weight"),
    ("weight", "1e-9", "not a weight"),
]


@pytest.mark.parametrize(("field", "value", "reason"), BAD_FIELDS)
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_bad_field_is_set_aside_with_its_place_and_reason(
    field: str, value: str, reason: str, suffix: str, tmp_path: Path
) -> None:
    good = {"user_id": "u", "item_id": "a", "timestamp": "5", "weight": "1"}
    frame = pl.DataFrame([good, good | {field: value}, good])
    path = tmp_path / f"l.{suffix}"
    frame.write_csv(path) if suffix == "csv" else frame.write_parquet(path)
    config = lenient(path, columns=Columns(weight="weight"))
    log = read_events(config)

    (reject,) = rejects_of(config)
    assert (reject["file"], reject["field"], reject["reason"]) == (str(path), field, reason)
    assert reject["line"] == (3 if suffix == "csv" else 2)
    assert reject["value"] == (value if len(value) <= 80 else value[:80] + "…")
    assert reject["accepted"]
    assert (log.rows_read, log.rows_kept, log.rows_rejected) == (3, 2, 1)


def test_a_missing_value_in_parquet_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "l.parquet"
    pl.DataFrame({"user_id": ["u", None], "item_id": ["a", "b"], "timestamp": [1, 2]}).write_parquet(path)
    config = lenient(path)
    read_events(config)

    assert [(row["line"], row["field"], row["value"]) for row in rejects_of(config)] == [(2, "user_id", None)]


@pytest.mark.parametrize("quoted", [False, True])
def test_rows_that_cannot_be_split_or_decoded_are_set_aside(quoted: bool, tmp_path: Path) -> None:
    rows = [b"u,a,1", b"u,b", b"u,c,3,4", b"u,caf\xe9,5", b"", b'"u",d,6' if quoted else b"u,d,6"]
    path = write(tmp_path / "l.csv", b"user_id,item_id,timestamp\n" + b"\n".join(rows))
    config = lenient(path)
    log = read_events(config)

    assert [row[1] for row in rows_of(log)] == ["a", "d"]
    assert [(row["line"], row["field"], row["reason"]) for row in rejects_of(config)] == [
        (3, "(row)", "2 fields where the header has 3"),
        (4, "(row)", "4 fields where the header has 3"),
        (5, "(row)", "not UTF-8"),
    ]
    assert (log.rows_read, log.blank_lines) == (5, 1)


def test_bad_lines_of_a_line_file_are_set_aside(tmp_path: Path) -> None:
    path = write(tmp_path / "l.txt", b"u a b\nlonely\nv \xff\nw c\x01 d\n")
    config = lenient(path)
    log = read_events(config)

    assert [row[:2] for row in rows_of(log)] == [("u", "a"), ("u", "b"), ("w", "d")]
    assert [(row["line"], row["reason"]) for row in rejects_of(config)] == [
        (2, "no item"), (3, "not UTF-8"), (4, "holds a control character"),
    ]  # fmt: skip
    assert log.rows_read == log.rows_kept + log.rows_rejected == 6


def test_too_many_bad_rows_stop_the_run_and_show_the_first_ten(tmp_path: Path) -> None:
    rows = [f"u,{'' if n % 5 == 0 else 'a'},{n}" for n in range(100)]
    path = write(tmp_path / "l.csv", "user_id,item_id,timestamp\n" + "\n".join(rows))
    config = DataConfig(path=path, max_bad_share=0.19)

    with pytest.raises(DataError, match=r"20 of 100 rows are bad \(20.00%\)") as caught:
        read_events(config)
    shown = [line for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert len(shown) == 10
    assert shown[1] == (
        f"  {path} line 7, field item_id, value '': missing; accepted: text of 1 to 256 bytes without control"
        " characters"
    )
    assert len(rejects_of(config)) == 20


def test_bad_rows_up_to_the_allowed_share_do_not_stop_the_run(tmp_path: Path) -> None:
    path = write(tmp_path / "l.csv", "user_id,item_id\n" + "u,a\n" * 99 + "u,\n")

    assert read_events(DataConfig(path=path)).rows_rejected == 1


def test_a_clean_run_empties_an_older_rejects_file_but_makes_none(tmp_path: Path) -> None:
    path = write(tmp_path / "l.csv", "user_id,item_id\nu,a\n")
    config = DataConfig(path=path)
    read_events(config)
    assert not config.rejects_path.exists()

    config.rejects_path.write_text("stale")
    read_events(config)
    assert config.rejects_path.read_text() == ""


def test_the_rejects_file_can_lie_elsewhere_but_not_on_the_source(tmp_path: Path) -> None:
    path = write(tmp_path / "l.csv", "user_id,item_id\nu,\nu,a\n")
    elsewhere = tmp_path / "new" / "folder" / "bad.jsonl"
    read_events(lenient(path, rejects=elsewhere))

    assert json.loads(elsewhere.read_text())["line"] == 2
    assert [file.name for file in elsewhere.parent.iterdir()] == ["bad.jsonl"]
    for rejects in (path, path / "x"):
        with pytest.raises(ValidationError, match="is the source or lies in it"):
            DataConfig(path=path, rejects=rejects)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["u", "", "v"]),
            st.sampled_from(["a", "", "b\x01"]),
            st.sampled_from(["1", "-1", "x"]),
        ),
        max_size=20,
    )
)
def test_every_row_is_kept_or_rejected(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, str]]
) -> None:
    rows = [("u", "a", "1"), *rows]
    text = "user_id,item_id,timestamp\n" + "".join(",".join(row) + "\n" for row in rows)
    config = lenient(write(tmp_path_factory.mktemp("log") / "l.csv", text))
    log = read_events(config)

    usable = [row for row in rows if row[0] and row[1] == "a" and row[2] == "1"]
    assert (log.rows_read, log.rows_kept) == (len(rows), len(usable))
    rejected = rejects_of(config) if config.rejects_path.exists() else []
    assert [row["line"] for row in rejected] == [n for n, row in enumerate(rows, start=2) if row not in usable]


# Order and ties

EVENT = st.tuples(st.sampled_from(["b", "a", "10", "9"]), st.integers(0, 4))


@given(st.lists(EVENT, min_size=1, max_size=40))
def test_order_is_by_user_then_time_then_input(events: list[tuple[str, int]]) -> None:
    frame = pl.DataFrame(
        {
            "user_id": [user for user, _ in events],
            "item_id": [str(n) for n in range(len(events))],
            "timestamp": [float(time) for _, time in events],
        }
    )
    expected = sorted(range(len(events)), key=lambda n: (events[n], n))

    assert sort_events(frame)["item_id"].to_list() == [str(n) for n in expected]


@given(st.lists(EVENT, min_size=1, max_size=40))
def test_tie_shares_equal_a_count_by_hand(events: list[tuple[str, int]]) -> None:
    frame = pl.DataFrame(
        {
            "user_id": [u for u, _ in events],
            "item_id": "i",
            "timestamp": [float(t) for _, t in events],
            "weight": 1.0,
        }
    )
    log = EventLog(sort_events(frame), "", len(events), 0, 0, has_timestamps=True)

    by_user: dict[str, list[int]] = {}
    for user, time in sorted(events):
        by_user.setdefault(user, []).append(time)
    tied = sum(a == b for times in by_user.values() for a, b in pairwise(times))
    tied_last = sum(len(times) > 1 and times[-1] == times[-2] for times in by_user.values())
    assert log.tie_shares() == (tied / len(events), tied_last / len(by_user))


def test_exact_duplicates_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "l.csv", "user_id,item_id,timestamp\n" + "u,a,1\n" * 3)

    assert read_events(DataConfig(path=path)).rows_kept == 3


def test_the_summary_fits_into_json(tmp_path: Path) -> None:
    path = write(tmp_path / "l.csv", "user_id,item_id,timestamp\nu,a,1\nu,b,1\nv,a,2\n")
    summary = read_events(DataConfig(path=path)).summary()

    assert json.loads(json.dumps(summary)) == {
        "rows_read": 3,
        "rows_kept": 3,
        "rows_rejected": 0,
        "blank_lines": 0,
        "users": 2,
        "items": 2,
        "has_timestamps": True,
        "tied_events_share": 1 / 3,
        "tied_last_two_users_share": 1 / 2,
        "last_timestamp": 2.0,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }


# Sources that cannot be read at all


def test_a_log_of_bad_rows_only_is_refused_with_their_reasons(tmp_path: Path) -> None:
    path = write(tmp_path / "l.csv", "user_id,item_id\nu,\n")

    with pytest.raises(DataError, match=r"holds no usable event\n.* line 2, field item_id, value '': missing"):
        read_events(lenient(path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("l.csv", b"", "no header"),
        ("l.csv", b"user_id,item_id\n", "holds no usable event"),
        ("l.csv", b"user_id,item\nu,a\n", r"no column 'item_id' for item_id \(nearest: 'item'\)"),
        ("l.csv", b"user_id,item_id,item_id\nu,a,a\n", "column 'item_id' occurs more than once"),
        ("l.csv", "user_id,item_id\n".encode("utf-16"), "header is not UTF-8"),
        ("l.csv", b'"user_id,item_id\n', "not valid CSV"),
        ("l.inter", b"user_id\titem_id\nu\ta\n", "must read name:type"),
        ("l.parquet", b"not parquet", "not a readable Parquet file"),
        ("l.xlsx", b"", r"accepted: \.csv, \.parquet"),
    ],
)
def test_an_unusable_file_is_refused_with_what_is_wrong(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / name, content)

    with pytest.raises(DataError, match=message) as caught:
        read_events(DataConfig(path=path))
    assert str(path) in str(caught.value)


def test_a_missing_path_an_empty_folder_and_mixed_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_events(DataConfig(path=tmp_path / "nowhere.csv"))
    with pytest.raises(DataError, match="folder without event files"):
        read_events(DataConfig(path=tmp_path))
    write(tmp_path / "a.csv", "user_id,item_id\nu,a\n")
    write(tmp_path / "b.txt", "u a\n")
    with pytest.raises(DataError, match=r"mixes formats \(a\.csv, b\.txt\)"):
        read_events(DataConfig(path=tmp_path))


def test_files_that_disagree_about_timestamps_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "user_id,item_id\nu,a\n")
    write(tmp_path / "b.csv", "user_id,item_id,timestamp\nu,a,1\n")

    with pytest.raises(DataError, match="make them agree"):
        read_events(DataConfig(path=tmp_path))


def test_a_named_timestamp_column_must_exist(tmp_path: Path) -> None:
    path = write(tmp_path / "l.csv", "user_id,item_id,timestamp\nu,a,1\n")

    with pytest.raises(DataError, match="no column 'time' for timestamp"):
        read_events(DataConfig(path=path, columns=Columns(timestamp="time")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"paths": "x"}, "Extra inputs"),
        ({"max_bad_share": "0.1"}, "valid number"),
        ({"max_bad_share": 1.5}, "less than or equal to 1"),
        ({"weight_map": {"column": "r", "values": {"1": -1}}}, "weight -1.0 is not accepted"),
        (
            {"weight_map": {"column": "r", "values": {"1": 1}, "default": math.nan}},
            "weight nan is not accepted",
        ),
        ({"weight_map": {"column": "r", "values": {"5": 1, "5.0": 2}}}, "'5' and '5.0' are the same number"),
        ({"weight_map": {"column": "r", "values": {"5": 1}}, "columns": {"weight": "w"}}, "keep one of them"),
    ],
)
def test_a_wrong_setting_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig.model_validate({"path": "log.csv", **settings})
