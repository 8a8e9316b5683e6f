"""The events that came since the current model learned: how they compare with those before, and whether to trust them.

A check that fails stops the job before anything is trained. It says what was found, what is accepted, and what to do.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl
from pydantic import BaseModel, ConfigDict, Field

from training.retrain.slices import bucket_without
from training.retrain.store import NUM_BUCKETS, SESSION, Learned, Store

DAY_S = 86_400
REFERENCE_DAYS = 28
"""Days with events, the last before the window, whose median is the usual volume."""
PSI_BINS = 10
LEAST_PART_EVENTS = 2_000
"""Of a part of the window that is checked by itself: of fewer, one eager user or one wrong clock would be too much."""
LEAST_SHARE = 1e-4
"""Of a bin of the PSI: an empty one would make it infinite."""


class Limits(BaseModel):
    """What a window may look like. Strict and frozen; part of the job's configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    min_events: int = Field(default=500, ge=1)
    """New events below which there is nothing to do yet."""
    max_user_share: float = Field(default=0.05, gt=0, le=1)
    """Of the new events, by one user."""
    max_new_user_share: float = Field(default=0.9, gt=0, le=1)
    """Of the new events, by users without earlier ones."""
    max_new_item_share: float = Field(default=0.5, gt=0, le=1)
    """Of the new events, on items without earlier ones."""
    max_psi: float = Field(default=1.0, gt=0)
    """Population stability index of the items' popularity; from 0.25 on it is usually called a shift."""
    max_volume_factor: float = Field(default=10.0, gt=1)
    """Events a day, against the usual number, either way."""
    max_future_share: float = Field(default=0.001, ge=0, le=1)
    """Of the new events, dated more than a day after now."""
    max_late_share: float = Field(default=0.5, ge=0, le=1)
    """Of the new events, dated before the last event that the current model learned."""
    min_known_share: float = Field(default=0.9, ge=0, le=1)
    """Of the users whom the current model learned, where another command fitted it, with earlier events in the log."""


@dataclass(frozen=True)
class Check:
    """One property of a window, and whether it is accepted."""

    name: str
    found: float
    accepted: str
    is_met: bool
    advice: str
    """What to do when it is not."""

    def to_json(self) -> dict[str, Any]:
        """Every field."""
        return asdict(self)


@dataclass(frozen=True)
class Window:
    """The new events beside the ones before. Shares are of the new events."""

    events: int
    earlier_events: int
    earlier_users: int = 0
    users: int = 0
    items: int = 0
    first: float = math.nan
    """Seconds since 1970, as `last`."""
    last: float = math.nan
    learned_until: float = math.nan
    """Time of the last of the earlier events; NaN: there are none."""
    new_user_share: float = 0.0
    new_item_share: float = 0.0
    busiest_user: str = ""
    busiest_user_share: float = 0.0
    future_share: float = 0.0
    late_share: float = 0.0
    psi: float = 0.0
    events_per_day: float = 0.0
    usual_events_per_day: float = math.nan
    by_source: dict[str, int] = field(default_factory=dict)
    """New events by what brought them."""

    def to_json(self) -> dict[str, Any]:
        """Every field that has a value."""
        return {key: value for key, value in asdict(self).items() if value == value}


def look(
    store: Store,
    learned: Learned,
    now: float,
    without_users: Sequence[str] = (),
    ingests: tuple[int, int] | None = None,
) -> Window:
    """Look at the events that are new; those of weight 0 count too.

    Args:
        store: the log. One bucket at a time is in memory, and counts by user, item and day.
        learned: what the current model has learned of it.
        now: seconds since 1970.
        without_users: whose events do not count.
        ingests: the first and the last whose new events count; None: all.
    """
    view = _View(store, learned, without_users, ingests)
    counts = {key: _no_counts(key) for key in ("user_id", "item_id", "day", "source")}
    first, last, learned_until = math.inf, -math.inf, -math.inf
    for number in range(NUM_BUCKETS):
        events = view.bucket(number).with_columns(
            new=learned.is_new(), day=(pl.col("timestamp") // DAY_S).cast(pl.Int64())
        )
        for key, so_far in counts.items():
            counts[key] = _added(so_far, events, key)
        # One event that a wrong clock dated years ahead would make all that follow late.
        known = ~pl.col("new") & (pl.col("timestamp") <= now + DAY_S)
        new, earlier = events.filter("new")["timestamp"], events.filter(known)["timestamp"]
        if len(new):
            first, last = min(first, float(new.min())), max(last, float(new.max()))  # type: ignore[arg-type]
        if len(earlier):
            learned_until = max(learned_until, float(earlier.max()))  # type: ignore[arg-type]
    # In an order of its own: the index tells items of equal counts apart by it.
    users, items = counts["user_id"], counts["item_id"].sort("item_id")
    num_new = int(users["new"].sum())
    window = Window(
        events=num_new,
        earlier_events=int(users["earlier"].sum()),
        earlier_users=int((users["earlier"] > 0).sum()),
        learned_until=learned_until if math.isfinite(learned_until) else math.nan,
    )
    if num_new == 0:
        return window
    future, late = (_num_between(view, *bounds) for bounds in ((now + DAY_S, math.inf), (-math.inf, learned_until)))
    busiest = users.sort("new", "user_id", descending=[True, False]).row(0, named=True)
    return replace(
        window,
        users=int((users["new"] > 0).sum()),
        items=int((items["new"] > 0).sum()),
        first=first,
        last=last,
        # A session is new by its nature.
        new_user_share=_share_of_the_new(users.filter(~pl.col("user_id").str.starts_with(SESSION))),
        new_item_share=_share_of_the_new(items),
        busiest_user=busiest["user_id"],
        busiest_user_share=busiest["new"] / num_new,
        psi=stability_index(items["earlier"].to_numpy(), items["new"].to_numpy()),
        events_per_day=_a_day(counts["day"], learned_until),
        usual_events_per_day=_usual(counts["day"]),
        by_source=dict(counts["source"].filter(pl.col("new") > 0).sort("source").select("source", "new").iter_rows()),
        future_share=future / num_new,
        late_share=late / num_new,
    )


def num_new_events(store: Store, learned: Learned, without_users: Sequence[str] = ()) -> int:
    """Events that a model has not learned."""
    buckets = map(_View(store, learned, without_users).bucket, range(NUM_BUCKETS))
    return sum(int(events.select(learned.is_new().sum()).item()) for events in buckets)


def check_parts(
    store: Store, learned: Learned, now: float, limits: Limits, without_users: Sequence[str] = ()
) -> list[Check]:
    """The checks that find poison, of what single ingests brought: what was refused one night stays so the next ones.

    Among the events of further nights it would be too small a share to be seen. Ingests of fewer events than
    `LEAST_PART_EVENTS` are put together; where all of them make one part, that is the window, and nothing is checked.
    Arguments as of `look` and `check`.
    """
    parts = _parts(store, learned, max(limits.min_events, LEAST_PART_EVENTS), without_users)
    checks = []
    for first, last in parts if len(parts) > 1 else ():
        name = f"ingest {first}" if first == last else f"ingests {first} to {last}"
        window = look(store, learned, now, without_users, (first, last))
        checks += [
            replace(
                one,
                name=f"{one.name} of {name}",
                advice=f"{one.advice}; or take it out of the log with `bft-train log forget`",
            )
            for one in _poison(window, limits)
        ]
    return checks


def _parts(store: Store, learned: Learned, least: int, without_users: Sequence[str]) -> list[tuple[int, int]]:
    """First and last ingest of the parts of the new events, of at least so many events each."""
    view, counts = (
        _View(store, learned, without_users),
        pl.DataFrame(schema={"ingest": pl.UInt32(), "len": pl.UInt32()}),
    )
    for number in range(NUM_BUCKETS):
        new = view.bucket(number).filter(learned.is_new()).group_by("ingest").len()
        counts = pl.concat([counts, new]).group_by("ingest").agg(pl.col("len").sum())
    parts: list[tuple[int, int]] = []
    begin, gathered = None, 0
    for ingest, events in counts.sort("ingest").iter_rows():
        begin, gathered = (ingest if begin is None else begin), gathered + events
        if gathered >= least:
            parts.append((begin, ingest))
            begin, gathered = None, 0
    if begin is not None and parts:
        parts[-1] = (parts[-1][0], ingest)
    return parts


def check(window: Window, limits: Limits, known_users: int | None = None) -> list[Check]:
    """Whether a window can be learned from; checks that need earlier events are left out where there are none.

    Args:
        window: what `look` found.
        limits: what is accepted.
        known_users: of how many users the current model learned where it was not this job that made it, else None.
    """
    checks = _poison(window, limits)
    if known_users:
        share = window.earlier_users / known_users
        known = Check(
            "known",
            share,
            f"at least {limits.min_known_share:g}",
            share >= limits.min_known_share,
            "the log lacks users whom the current model learned, and their histories: put the file that the model was"
            " fitted on beside the new ones, for one night, or give another --registry to begin without that model; or"
            " lower retrain.limits.min_known_share",
        )
        checks.append(known)
    if window.earlier_events:
        checks += [
            _at_most(
                "late",
                window.late_share,
                limits.max_late_share,
                "most events are older than what is known already: a clock is behind, or old files came again under new"
                " ids; mend the source, or raise retrain.limits.max_late_share",
            ),
            _at_most(
                "new_users",
                window.new_user_share,
                limits.max_new_user_share,
                "hardly any user is known: were their ids made anew? Else raise retrain.limits.max_new_user_share",
            ),
            _at_most(
                "new_items",
                window.new_item_share,
                limits.max_new_item_share,
                "too few items are known: were their ids made anew? Else raise retrain.limits.max_new_item_share",
            ),
        ]
    if math.isfinite(window.usual_events_per_day):
        factor = window.events_per_day / window.usual_events_per_day
        volume = _at_most(
            "volume",
            max(factor, 1 / factor),
            limits.max_volume_factor,
            f"{window.events_per_day:,.0f} events a day where {window.usual_events_per_day:,.0f} are usual: is a source"
            " missing, or sent twice under other ids? Else raise retrain.limits.max_volume_factor",
        )
        checks.append(volume)
    return checks


def _poison(window: Window, limits: Limits) -> list[Check]:
    """Checks of what no honest source brings, however many events there are."""
    checks = [
        _at_most(
            "busiest_user",
            window.busiest_user_share,
            limits.max_user_share,
            f"look at the events of user {window.busiest_user!r}: a program makes so many; leave the user out with"
            " retrain.without_users, or raise retrain.limits.max_user_share",
        ),
        _at_most(
            "future",
            window.future_share,
            limits.max_future_share,
            "a clock is ahead, or seconds and milliseconds were mixed up: mend the source, restore the job's log from"
            " before it, or raise retrain.limits.max_future_share",
        ),
    ]
    if window.earlier_events:
        popularity = _at_most(
            "popularity",
            window.psi,
            limits.max_psi,
            "other items are popular than before: look at the sources; if it is so, raise retrain.limits.max_psi",
        )
        checks.append(popularity)
    return checks


def stability_index(earlier_N: np.ndarray, new_N: np.ndarray) -> float:
    """PSI of the items' popularity: Σ (q − p)·ln(q/p) over bins of items that had equal shares p of the earlier events.

    Items without earlier events are left out. 0 where there are no events on either side.

    Args:
        earlier_N, new_N: events on each item.
    """
    known = earlier_N > 0
    earlier, new = earlier_N[known].astype(float), new_N[known].astype(float)
    if earlier.sum() == 0 or new.sum() == 0:
        return 0.0
    order = np.argsort(-earlier, kind="stable")
    share = earlier[order].cumsum() / earlier.sum()
    bins = np.minimum((share - earlier[order] / earlier.sum() / 2) * PSI_BINS, PSI_BINS - 1).astype(int)
    p, q = (np.bincount(bins, values[order], PSI_BINS) / values.sum() for values in (earlier, new))
    filled = p > 0
    p, q = p[filled], np.maximum(q[filled], LEAST_SHARE)
    return float(((q - p) * np.log(q / p)).sum())


def _at_most(name: str, found: float, limit: float, advice: str) -> Check:
    return Check(name, found, f"at most {limit:g}", found <= limit, advice)


def _no_counts(key: str) -> pl.DataFrame:
    type = pl.Int64() if key == "day" else pl.String()
    return pl.DataFrame(schema={key: type, "new": pl.Int64(), "earlier": pl.Int64()})


def _added(so_far: pl.DataFrame, events: pl.DataFrame, key: str) -> pl.DataFrame:
    """Counts of new and earlier events by a key, those of more events added."""
    is_new = pl.col("new")
    counts = events.group_by(key).agg(new=is_new.sum().cast(pl.Int64()), earlier=(~is_new).sum().cast(pl.Int64()))
    return pl.concat([so_far, counts]).group_by(key).sum()


@dataclass(frozen=True)
class _View:
    """The events that are looked at: those learned, and the new ones of some ingests or of all."""

    store: Store
    learned: Learned
    without_users: Sequence[str]
    ingests: tuple[int, int] | None = None

    def bucket(self, number: int) -> pl.DataFrame:
        events = bucket_without(self.store, number, self.without_users)
        if self.ingests is None:
            return events
        return events.filter(~self.learned.is_new() | pl.col("ingest").is_between(*self.ingests))


def _num_between(view: _View, begin: float, end: float) -> int:
    """New events dated after `begin` and before `end`."""
    found = 0
    for number in range(NUM_BUCKETS):
        new = view.bucket(number).filter(view.learned.is_new())["timestamp"]
        found += int(((new > begin) & (new < end)).sum())
    return found


def _share_of_the_new(counts: pl.DataFrame) -> float:
    """Share of the new events that are on keys without earlier ones; 0 where there are no new events."""
    return int(counts.filter(pl.col("earlier") == 0)["new"].sum()) / max(int(counts["new"].sum()), 1)


def _a_day(days: pl.DataFrame, learned_until: float) -> float:
    """New events on a day that has some: of the days since the last earlier event, if any of them has.

    A few events that came late, each on a day of its own, would be as many days on which hardly anything happened.
    """
    new = days.filter(pl.col("new") > 0)
    since = new.filter(pl.col("day") >= learned_until // DAY_S) if math.isfinite(learned_until) else new
    return float((since if len(since) else new)["new"].mean())  # type: ignore[arg-type]


def _usual(days: pl.DataFrame) -> float:
    """Median of the last days that had events before the window; NaN with none."""
    earlier = days.filter(pl.col("earlier") > 0).sort("day")["earlier"].tail(REFERENCE_DAYS)
    return math.nan if earlier.is_empty() else float(earlier.median())  # type: ignore[arg-type]
