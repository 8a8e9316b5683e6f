"""The report's tables, each a pure function of the records.

S seeds · U test users
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from scipy import stats

from training.study import strata
from training.study.compare import METRICS, Difference, paired_differences
from training.study.comparisons import (
    ALL,
    COLD,
    CONTROLS,
    MIN_SEEDS,
    MIN_USERS,
    MODELS,
    NOISE,
    RARE,
    Comparison,
    Stratum,
    Study,
    control_of,
    mean,
    model_order,
    noise_of,
    per_user,
)
from training.study.layout import Cell, Estimate, Row, Style, Table
from training.study.records import BASELINES, DatasetRecord, ListFigures, RunRecord

LIST_LENGTH = 10
SHIFT = 0.02
"""Relative change of the rare items' places from which the words call it one."""
TARGETS = (
    ("sasrec", "beauty", 3, {"HR@10": 0.090, "NDCG@10": 0.052}),
    ("sasrec", "sports", 3, {"HR@10": 0.055, "NDCG@10": 0.031}),
    ("sasrec", "toys", 3, {"HR@10": 0.094, "NDCG@10": 0.056}),
    ("hstu", "beauty", 1, {"HR@10": 0.078, "NDCG@10": 0.043}),
)
"""What a plain backbone must reach before a gain over it counts: model, data set, seeds, test figures."""
BEST_PUBLISHED = "The best published on the Beauty file: HR@10 0.1008, NDCG@10 0.0611."
SIDES = ("off", "on")


def all_tables(study: Study) -> list[Table]:
    """Every table, in the report's order; each has a key of its own."""
    return [
        answer(study),
        pooled(study),
        main(study),
        headline(study),
        shift(study),
        sparsity(study),
        targets(study),
        controls(study),
        noise(study),
        *map(by_stratum, study.comparisons),
        lists(study),
        exposure(study),
        gain(study, "gain", "item's training uses"),
        gain(study, "gain_by_history_length", "events before"),
        precision(study),
        datasets(study),
        runs(study),
        environments(study),
    ]


# The answer


def answer(study: Study) -> Table:
    """Relative differences of all users and of the headline groups, for what may carry a claim; else for all."""
    claims = [comparison for comparison in study.comparisons if not comparison.caveat]
    shown = claims or study.comparisons

    def row(comparison: Comparison, metric: str) -> Row:
        of_all = comparison.overall[metric]
        groups = {name: _relative_in_words(comparison, stratum, metric) for name, stratum in _GROUPS.items()}
        cells: dict[str, Cell] = {"seeds": len(comparison.seeds), "off": of_all.second, "on": of_all.first, **groups}
        return Row(_of(comparison) | {"metric": metric} | cells, comparison.records)

    rows = [row(comparison, metric) for comparison in shown for metric in METRICS]
    notes = [
        "Change of the mean by filtering, its 95 % interval over users and seeds, and what the interval says. One that"
        " holds zero shows no difference."
    ]
    if study.comparisons and not claims:
        need = f"{MIN_SEEDS} seeds and {MIN_USERS:,} test users with the same settings are needed"
        notes.append(f"**None of these comparisons carries a claim**: {need}.")
    elif claims and len(claims) < len(study.comparisons):
        others = len(study.comparisons) - len(claims)
        notes.append(f"{others} more without a claim follow below, each with the reason.")
    columns: dict[str, Style] = {"seeds": "count", "off": "metric", "on": "metric"} | dict.fromkeys(_GROUPS, "text")
    return Table("answer", "The answer", _OF | {"metric": "text"} | columns, tuple(rows), tuple(notes))


_GROUPS: Mapping[str, Stratum] = {"all users": ALL, "rare target items": RARE, "cold users": COLD}


def _relative_in_words(comparison: Comparison, stratum: Stratum, metric: str) -> str | None:
    difference = comparison.differences.get(stratum, {}).get(metric)
    if difference is None:
        return None
    relative = _relative(difference)
    if relative is None:
        return f"{difference.verdict} (no hit without filtering)"
    return in_percent(relative.value, relative.low, relative.high, difference.verdict)


def in_percent(value: float, low: float, high: float, verdict: str) -> str:
    """`+1.4 % (+0.2 % … +2.7 %): better`"""
    percent = [f"{each:+.1%}".replace("-", "−").replace("%", " %") for each in (value, low, high)]
    return f"{percent[0]} ({percent[1]} … {percent[2]}): {verdict}"


def pooled(study: Study) -> Table:
    """What the data sets say together."""
    rows = [
        Row(
            {
                "model": MODELS.get(model, model),
                "group": name,
                "metric": metric,
                "data sets": len(over),
                "change": Estimate(change.difference, change.low, change.high),
                "in words": change.verdict,
            },
            tuple(record for one in over for record in one.records),
        )
        for (model, stratum), (over, changes) in study.together.items()
        for name, group in _GROUPS.items()
        if group == stratum
        for metric, change in changes.items()
    ]
    columns: dict[str, Style] = {"model": "text", "group": "text", "metric": "text", "data sets": "count"}
    notes = (
        "Mean of the data sets' relative changes, each data set counting the same; users and seeds of each are"
        " resampled by themselves. Over the data sets that may carry a claim: it says nothing of another one.",
    )
    return Table(
        "pooled", "The data sets together", columns | {"change": "change", "in words": "text"}, tuple(rows), notes
    )


# Filtering on against off


def main(study: Study) -> Table:
    """Each comparison over all test users, beside the baselines."""

    def row(comparison: Comparison, metric: str) -> Row:
        name = comparison.dataset.name
        baselines = {baseline: study.named(name, baseline, False) for baseline in BASELINES}
        values: dict[str, Cell] = {
            MODELS[baseline]: mean(per_user(found, comparison.dataset)[metric].ravel()) if found else None
            for baseline, found in baselines.items()
        }
        records = tuple(run.name for found in baselines.values() for run in found)
        difference = comparison.overall[metric]
        gains = (
            per_user(comparison.on, comparison.dataset)[metric] - per_user(comparison.off, comparison.dataset)[metric]
        ).mean(1)
        by_seed = {"seeds": len(gains), "seeds above 0": int((gains > 0).sum())}
        cells = values | by_seed | _difference_cells(comparison, difference)
        return Row(_of(comparison) | {"metric": metric} | cells, records + comparison.records)

    rows = [row(comparison, metric) for comparison in study.comparisons for metric in METRICS]
    notes = [
        "The difference is that of the means over users and seeds; its 95 % interval resamples users and seeds, the"
        " same for both sides (paired bootstrap). With three seeds it is cautious: in simulations it held the true"
        " difference 97 to 99.5 times in 100 while the seeds' own variance was at most that of the users' chance, and"
        " 90 times where it was four times as large.",
        *(
            f"{comparison.label} on {comparison.dataset.name}: {comparison.caveat}."
            for comparison in study.comparisons
            if comparison.caveat
        ),
        *(
            f"{comparison.label} on {comparison.dataset.name}: each side has its own tuned"
            f" {'; '.join(comparison.own_settings)}."
            for comparison in study.comparisons
            if comparison.own_settings
        ),
        *(
            f"`{name}` has no partner with filtering the other way, and stands in no comparison."
            for name in study.unpaired
        ),
    ]
    columns: dict[str, Style] = {MODELS[baseline]: "metric" for baseline in BASELINES}
    order = _OF | {"metric": "text"} | columns | _DIFFERENCE | {"seeds": "count", "seeds above 0": "count"}
    return Table("main", "Filtering on against off, all test users", order, tuple(rows), tuple(notes))


def headline(study: Study) -> Table:
    """The two groups that the claims are about."""
    rows = [
        Row(
            _of(comparison)
            | {"group": name, "metric": metric, **_size(comparison, stratum)}
            | _difference_cells(comparison, comparison.differences[stratum][metric]),
            comparison.records,
        )
        for comparison in study.comparisons
        for name, stratum in (("rare target items", RARE), ("cold users", COLD))
        if stratum in comparison.differences
        for metric in METRICS
    ]
    columns = _OF | {"group": "text", "metric": "text"} | _SIZE | _DIFFERENCE
    notes = (
        f"Rare: at most {strata.ITEM_STRATA[strata.RARE_ITEMS[-1]][1]} training uses."
        f" Cold: at most {strata.USER_STRATA[strata.COLD_USERS[-1]][1]} training events.",
        "The ceiling is the share of users whose target the event allows: what a perfect model would reach.",
    )
    return Table("headline", "Rare target items and cold users", columns, tuple(rows), notes)


def by_stratum(comparison: Comparison) -> Table:
    """One comparison in every division of the test users."""
    rows = []
    for (division, name), differences in comparison.differences.items():
        if division == "headline":
            continue  # has a table of its own
        cells: dict[str, Cell] = {"division": division, "stratum": name, **_size(comparison, (division, name))}
        for metric, difference in differences.items():
            cells |= {
                f"{metric} off": difference.second,
                f"{metric} on": difference.first,
                f"{metric} difference": _absolute(difference),
                f"{metric} in words": difference.verdict,
            }
        rows.append(Row(cells, comparison.records))
    columns: dict[str, Style] = {"division": "text", "stratum": "text"} | _SIZE
    for metric in METRICS:
        columns |= {f"{metric} off": "metric", f"{metric} on": "metric"}
        columns |= {f"{metric} difference": "signed", f"{metric} in words": "text"}
    notes = (f"{comparison.caveat[0].upper()}{comparison.caveat[1:]}.",) if comparison.caveat else ()
    key = "-".join(filter(None, ("strata", comparison.dataset.name, comparison.model, comparison.variant)))
    return Table(key, f"{comparison.label} on {comparison.dataset.name}", columns, tuple(rows), notes)


# What is recommended


def shift(study: Study) -> Table:
    """Whether a gain at rare items goes together with listing more of them."""
    return Table(
        "shift",
        "Rare items: hits, and places in the lists",
        _OF
        | {"HR@10 of rare targets": "signed", "mean uses off": "number", "mean uses on": "number"}
        | {"rare places off": "share", "rare places on": "share"}
        | {"hits per 1,000 off": "number", "hits per 1,000 on": "number", "in words": "text"},
        tuple(Row(_of(comparison) | _shift_cells(comparison), comparison.records) for comparison in study.comparisons),
        (
            "Mean uses: training uses of a listed item. Rare places: share of the lists' places that rare items hold."
            " Hits per 1,000: of such places. More places bring more hits by themselves; a gain that is no shift of"
            " popularity shows in the hits per place.",
        ),
    )


def _shift_cells(comparison: Comparison) -> dict[str, Cell]:
    difference = comparison.differences.get(RARE, {}).get("HR@10")
    places = {side: _exposure(comparison, side, strata.RARE_ITEMS) for side in SIDES}
    cells: dict[str, Cell] = {"HR@10 of rare targets": _absolute(difference) if difference else None}
    for side in SIDES:
        cells[f"mean uses {side}"] = mean(figures.mean_popularity for figures in _lists(comparison, side, "all"))
        cells[f"rare places {side}"] = places[side]
        cells[f"hits per 1,000 {side}"] = _hits_per_place(comparison, side, RARE, places[side])
    return cells | {"in words": "; ".join(filter(None, (shift_in_words(comparison), comparison.caveat)))}


def shift_in_words(comparison: Comparison) -> str:
    """Whether rare items gain, whether they are listed more often, and what the two say together."""
    difference = comparison.differences.get(RARE, {}).get("HR@10")
    off, on = (_exposure(comparison, side, strata.RARE_ITEMS) for side in SIDES)
    if on > off * (1 + SHIFT):
        listed = "listed more often"
    elif on < off * (1 - SHIFT):
        listed = "listed less often"
    else:
        listed = "listed as often"
    if difference is None:
        return f"no user has a rare target; rare items are {listed}"
    if difference.verdict == "better":
        tail = ": this may be a shift of popularity" if listed == "listed more often" else ": no shift of popularity"
        return f"gain at rare items, and they are {listed}{tail}"
    found = "loss" if difference.verdict == "worse" else "no difference shown"
    return f"{found} at rare items, and they are {listed}"


def lists(study: Study) -> Table:
    """Coverage, popularity and rare items of the lists of ten, by users."""
    rows = []
    for comparison in study.comparisons:
        for group in _groups(comparison):
            cells: dict[str, Cell] = {"group": "all users" if group == "all" else f"{group} training events"}
            for side in SIDES:
                figures = _lists(comparison, side, group)
                cells["users"] = figures[0].users
                cells[f"coverage {side}"] = mean(one.coverage for one in figures)
                cells[f"mean uses {side}"] = mean(one.mean_popularity for one in figures)
                cells[f"rare places {side}"] = _exposure(comparison, side, strata.RARE_ITEMS, group)
            rows.append(Row(_of(comparison) | cells, comparison.records))
    pairs: dict[str, Style] = {
        f"{name} {side}": style
        for name, style in (("coverage", "share"), ("mean uses", "number"), ("rare places", "share"))
        for side in SIDES
    }
    notes = ("Coverage: share of the catalogue that is in any list; it grows with the number of users.",)
    columns: dict[str, Style] = _OF | {"group": "text", "users": "count"} | pairs
    return Table("lists", "What the lists of ten recommend", columns, tuple(rows), notes)


def exposure(study: Study) -> Table:
    """The lists' places by the listed item's training uses."""
    rows = []
    for comparison in study.comparisons:
        counts, targets_U = np.array(comparison.dataset.training_counts), np.array(comparison.dataset.target_count)
        in_catalog = strata.members(counts, strata.ITEM_STRATA)
        in_targets = strata.members(targets_U, strata.ITEM_STRATA)
        for name in strata.ITEM_STRATA:
            cells: dict[str, Cell] = {
                "training uses": name,
                "of the catalogue": float(in_catalog[name].mean()),
                "of the targets": float(in_targets[name].mean()),
            }
            for side in SIDES:
                places = _exposure(comparison, side, (name,))
                cells[f"of the places {side}"] = places
                cells[f"hits per 1,000 {side}"] = _hits_per_place(
                    comparison, side, ("targets by training uses", name), places
                )
            rows.append(Row(_of(comparison) | cells, comparison.records))
    columns: dict[str, Style] = {"training uses": "text", "of the catalogue": "share", "of the targets": "share"}
    columns |= {f"of the places {side}": "share" for side in SIDES} | {
        f"hits per 1,000 {side}": "number" for side in SIDES
    }
    return Table("exposure", "Places in the lists by training uses of the item", _OF | columns, tuple(rows))


def _groups(comparison: Comparison) -> list[str]:
    """Groups of users that all its records have lists of."""
    every = (*comparison.off, *comparison.on)
    return [group for group in every[0].lists if all(group in run.lists for run in every)]


def _lists(comparison: Comparison, side: str, group: str) -> list[ListFigures]:
    """The list figures of a group of users under each seed."""
    return [run.lists[group] for run in (comparison.on if side == "on" else comparison.off)]


def _exposure(comparison: Comparison, side: str, items: Iterable[str], group: str = "all") -> float:
    """Share of the lists' places that these strata of items hold, mean over seeds."""
    return mean(sum(figures.exposure[name] for name in items) for figures in _lists(comparison, side, group))


def _hits_per_place(comparison: Comparison, side: str, stratum: Stratum, places: float) -> float | None:
    """Hits of the stratum's targets in 1,000 places that its items hold; None without such places."""
    differences = comparison.differences.get(stratum)
    if places == 0 or differences is None:
        return None
    rate = differences["HR@10"].first if side == "on" else differences["HR@10"].second
    hits = rate * differences["HR@10"].users / comparison.dataset.num_users
    return 1000 * hits / (LIST_LENGTH * places)


# Over data sets


def sparsity(study: Study) -> Table:
    """The relative difference beside how sparse the data are, sparsest first, model by model."""
    compared = sorted(
        study.of_recipe(), key=lambda one: (model_order(one.model), events_per_item(one.dataset), one.dataset.name)
    )
    rows = []
    for comparison in compared:
        cells: dict[str, Cell] = {
            "events per item": events_per_item(comparison.dataset),
            "events per user": float(np.mean(comparison.dataset.history_length)),
            "density": density(comparison.dataset),
        }
        cells |= {metric: _relative(difference) for metric, difference in comparison.overall.items()}
        words = comparison.in_words(comparison.overall["NDCG@10"])
        rows.append(Row(_of(comparison) | cells | {"NDCG@10 in words": words}, comparison.records))
    columns: dict[str, Style] = {"events per item": "number", "events per user": "number", "density": "number"}
    columns |= dict.fromkeys(METRICS, "change") | {"NDCG@10 in words": "text"}
    notes = (
        "In training. The relative difference takes the mean without filtering as fixed.",
        *(f"{MODELS.get(model, model)}: {words}." for model, words in sparsity_in_words(study).items()),
    )
    return Table("sparsity", "Relative gain against sparsity", _OF | columns, tuple(rows), notes)


def sparsity_in_words(study: Study) -> dict[str, str]:
    """By model, whether the relative gain in NDCG@10 grows as the events per item fall, over what carries a claim."""
    words = {}
    for model in dict.fromkeys(comparison.model for comparison in study.of_recipe()):
        points = [
            (events_per_item(one.dataset), one.overall["NDCG@10"].relative)
            for one in study.of_recipe()
            if one.model == model and not one.caveat
        ]
        kept = np.array([(sparse, relative) for sparse, relative in points if relative is not None])
        if len(kept) < 3 or np.ptp(kept, axis=0).min() == 0:
            words[model] = f"too few data sets carry a claim ({len(kept)}) to tell a trend with sparsity"
            continue
        correlation = stats.spearmanr(*kept.T).statistic
        least = 2 / math.factorial(len(kept))
        words[model] = (
            f"rank correlation of the gain with the events per item {correlation:+.2f}".replace("-", "−")
            + f" over {len(kept)} data sets (negative: sparser data gain more; a perfect order has p = {least:.2g})"
        )
    return words


def events_per_item(dataset: DatasetRecord) -> float:
    """Training uses of an item, mean over the catalogue."""
    return float(np.mean(dataset.training_counts))


def density(dataset: DatasetRecord) -> float:
    """Share of the users × items that training has an event for."""
    return sum(dataset.training_counts) / (dataset.data["train_users"] * len(dataset.training_counts))


def targets(study: Study) -> Table:
    """Whether the plain backbones are strong."""
    rows = []
    for model, name, seeds, wanted in TARGETS:
        found = study.named(name, model, False)
        reached = per_user(found, study.datasets[name]) if found else {}
        for metric, target in wanted.items():
            cells: dict[str, Cell] = {"data set": name, "model": MODELS[model], "metric": metric, "target": target}
            cells |= {"seeds": len(found), "reached": mean(reached[metric].ravel()) if found else None}
            short = target - mean(reached[metric].ravel()) if found else None
            rows.append(
                Row(cells | {"in words": _target_in_words(short, len(found), seeds)}, tuple(run.name for run in found))
            )
    columns: dict[str, Style] = _OF | {
        "metric": "text",
        "target": "metric",
        "reached": "metric",
        "seeds": "count",
        "in words": "text",
    }
    return Table("targets", "How strong the plain backbones are", columns, tuple(rows), (BEST_PUBLISHED,))


def _target_in_words(short: float | None, seeds: int, wanted: int) -> str:
    if short is None:
        return "no record"
    words = "reached" if short <= 0 else f"missed by {short:.4f}"
    return words if seeds >= wanted else f"{words}; {seeds} of {wanted} seeds"


# Controls and noise


def controls(study: Study) -> Table:
    """Each part of the filter changed alone, against the full filter and against no filter."""
    kinds = dict.fromkeys((run.dataset, run.model, run.variant) for run in study.runs if control_of(run.variant))
    rows = [row for kind in kinds for row in _control_rows(study, *kind)]
    columns: dict[str, Style] = {
        "changed": "text",
        "metric": "text",
        "off": "metric",
        "full": "metric",
        "changed filter": "metric",
    }
    columns |= {"against full": "signed", "full, in words": "text", "against off": "signed", "off, in words": "text"}
    notes = (
        "Where an item's own τ does something, dealing τ out anew among the items must undo it: the changed filter is"
        " then worse than the full one.",
    )
    return Table(
        "controls", "Parts of the filter changed one at a time", _OF | columns | {"seeds": "count"}, tuple(rows), notes
    )


def _control_rows(study: Study, dataset: str, model: str, variant: str) -> list[Row]:
    matched = control_of(variant)
    recipe, control = matched if matched else ("", variant)
    changed = study.named(dataset, model, True, variant)
    rivals = {"full": study.named(dataset, model, True, recipe), "off": study.named(dataset, model, False, recipe)}
    label = MODELS.get(model, model) + (f", {recipe}" if recipe else "")
    own = per_user(changed, study.datasets[dataset])
    compared = {rival: _against(changed, runs, study.datasets[dataset]) for rival, runs in rivals.items()}
    records = tuple(run.name for runs in (changed, *rivals.values()) for run in runs)
    rows = []
    for metric in METRICS:
        cells: dict[str, Cell] = {"data set": dataset, "model": label, "changed": CONTROLS[control], "metric": metric}
        cells |= {"changed filter": mean(own[metric].ravel()), "seeds": len(changed)}
        for rival, differences in compared.items():
            difference = differences.get(metric)
            cells[rival] = difference.second if difference else None
            cells[f"against {rival}"] = _absolute(difference) if difference else None
            cells[f"{rival}, in words"] = _few_seeds(difference) if difference else "no record to compare with"
        rows.append(Row(cells, records))
    return rows


def _against(first: Sequence[RunRecord], second: Sequence[RunRecord], dataset: DatasetRecord) -> dict[str, Difference]:
    """Differences over the seeds that both have; nothing without one."""
    common = sorted({run.seed for run in first} & {run.seed for run in second})
    if not common:
        return {}
    first_kept, second_kept = ([run for run in runs if run.seed in common] for runs in (first, second))
    return paired_differences(per_user(first_kept, dataset), per_user(second_kept, dataset))


def _few_seeds(difference: Difference) -> str:
    few = difference.seeds < MIN_SEEDS
    return difference.verdict + (f"; {difference.seeds} seed{'s' * (difference.seeds > 1)}, no claim" if few else "")


def noise(study: Study) -> Table:
    """Histories with replaced events, filtering on against off, beside the undisturbed runs of the same seeds."""
    rows = []
    kinds = dict.fromkeys((one.dataset.name, one.model, *_noise_kind(one)) for one in study.noise)
    for dataset, model, recipe, where in kinds:
        disturbed = [
            one
            for one in study.noise
            if (one.dataset.name, one.model, *_noise_kind(one)) == (dataset, model, recipe, where)
        ]
        disturbed.sort(key=_share)
        clean = [
            one.of_seeds(disturbed[0].seeds)
            for one in study.comparisons
            if (one.dataset.name, one.model, one.variant) == (dataset, model, recipe)
            and set(one.seeds) >= set(disturbed[0].seeds)
        ]
        for comparison in (*clean, *disturbed):
            cells = _noise_cells(comparison, disturbed[0] if comparison in clean else comparison)
            label = MODELS.get(model, model) + (f", {recipe}" if recipe else "")
            cells |= {"data set": dataset, "model": label, "replaced in": NOISE[where]}
            cells["share"] = 0.0 if comparison in clean else _share(comparison)
            rows.append(Row(cells, comparison.records))
    columns: dict[str, Style] = {"replaced in": "text", "share": "share", "off": "metric", "on": "metric"}
    columns |= {"difference": "signed", "in words": "text", "confidence off": "metric", "confidence on": "metric"}
    columns |= {"weight off": "number", "weight on": "number", "precision on": "number"}
    notes = (
        "HR@10 of the test users, whose targets are the true ones. Confidence: stated probability that the next event"
        " is among the ten, mean over users.",
        "Weight and precision: of a replaced event, as a multiple of another's; 1 where it is heard like any other.",
    )
    return Table("noise", "Histories with events replaced by random items", _OF | columns, tuple(rows), notes)


def _noise_kind(comparison: Comparison) -> tuple[str, str]:
    return noise_of(comparison.variant) or ("", "")


def _share(comparison: Comparison) -> float:
    noise = comparison.on[0].noise
    return noise["share"] if noise else int(comparison.variant.rpartition("-")[2]) / 100


def _noise_cells(comparison: Comparison, told: Comparison) -> dict[str, Cell]:
    """The figures of a comparison; the confidence in true histories stands in the records of noise, `told`."""
    difference = comparison.overall["HR@10"]
    cells: dict[str, Cell] = {"off": difference.second, "on": difference.first, "difference": _absolute(difference)}
    cells["in words"] = comparison.in_words(difference)
    key = "list_confidence" if comparison is told else "list_confidence_true"
    for side, side_runs in (("off", told.off), ("on", told.on)):
        cells[f"confidence {side}"] = _mean_noise(side_runs, lambda noise: noise.get(key))
        if comparison is told:
            cells[f"weight {side}"] = _mean_noise(side_runs, _multiple("kriging_weight"))
            cells[f"precision {side}"] = _mean_noise(side_runs, _multiple("precision"))
    return cells


def _multiple(quantity: str) -> Callable[[dict[str, float]], float | None]:
    names = (f"{quantity}_replaced", f"{quantity}_other")
    return lambda noise: noise[names[0]] / noise[names[1]] if all(noise.get(name) for name in names) else None


def _mean_noise(runs: Sequence[RunRecord], figure: Callable[[dict[str, float]], float | None]) -> float | None:
    values = [figure(run.noise or {}) for run in runs]
    return mean(value for value in values if value is not None) if None not in values else None


# What the filter learned


def gain(study: Study, name: str, by: str) -> Table:
    """The gain K at the events of test users, by item frequency or history length; `name` as in the record."""
    rows = []
    for comparison in study.comparisons:
        figures = [run.filter[name] for run in comparison.on if run.filter and name in run.filter]
        for label in figures[0] if figures else ():
            values = [one[label]["mean"] for one in figures if label in one]
            estimate = Estimate(mean(values), min(values), max(values))
            rows.append(Row(_of(comparison) | {by: label, "gain": estimate}, tuple(run.name for run in comparison.on)))
    notes = ("Mean over dimensions, layers and events, then over seeds, with the lowest and the highest seed.",)
    columns: dict[str, Style] = {by: "text", "gain": "number"}
    return Table(name, f"Gain K by {by.replace('item', 'the item')}", _OF | columns, tuple(rows), notes)


def precision(study: Study) -> Table:
    """The initial precision τ of the catalogue's items by their training uses: quartiles, mean over seeds."""
    rows = []
    for comparison in study.comparisons:
        figures = [
            run.filter["item_precision"] for run in comparison.on if run.filter and "item_precision" in run.filter
        ]
        for label in figures[0] if figures else ():
            low, median, high = np.mean([one[label]["quartiles"] for one in figures], axis=0).tolist()
            cells: dict[str, Cell] = {"training uses": label, "items": figures[0][label]["items"]}
            cells |= {"first quartile": low, "median": median, "third quartile": high}
            rows.append(Row(_of(comparison) | cells, tuple(run.name for run in comparison.on)))
    columns: dict[str, Style] = {"training uses": "text", "items": "count"}
    columns |= {"first quartile": "number", "median": "number", "third quartile": "number"}
    return Table("item_precision", "Initial precision τ by the item's training uses", _OF | columns, tuple(rows))


# Where the numbers come from


def datasets(study: Study) -> Table:
    """The data sets, as split."""

    def row(dataset: DatasetRecord) -> Row:
        data = dataset.data
        return Row(
            {
                "data set": dataset.name,
                "sha256": data["sha256"][:12],
                "users": data["users"],
                "items": data["items"],
                "events": data["rows_kept"],
                "test users": dataset.num_users,
                "events per item": events_per_item(dataset),
                "density": density(dataset),
                "tied last two": data.get("tied_last_two_users_share"),
                "impossible targets": len(dataset.impossible),
                "event": dataset.event,
                "claims": "yes" if dataset.num_users >= MIN_USERS else "too few users",
            }
        )

    columns: dict[str, Style] = {
        "data set": "text",
        "sha256": "text",
        "users": "count",
        "items": "count",
        "events": "count",
    }
    columns |= {"test users": "count", "events per item": "number", "density": "number", "tied last two": "share"}
    columns |= {"impossible targets": "count", "event": "text", "claims": "text"}
    notes = (
        "Density and events per item are those of training. Tied: users whose last two events have one timestamp;"
        " empty where the log has no timestamps.",
    )
    return Table(
        "datasets", "Data sets", columns, tuple(row(study.datasets[name]) for name in sorted(study.datasets)), notes
    )


def runs(study: Study) -> Table:
    """Every record."""
    letters = _letters(study)

    def row(run: RunRecord) -> Row:
        figures = per_user([run], study.datasets[run.dataset])
        cells: dict[str, Cell] = {
            "record": run.name,
            "seed": run.seed,
            "best epoch": run.best_epoch,
            "epochs": len(run.curve),
        }
        cells |= {"seconds": run.seconds.get("total"), "parameters": run.parameters}
        cells |= {"validation NDCG@10": run.validation.get("ndcg@10")}
        cells |= {metric: mean(values.ravel()) for metric, values in figures.items()}
        cells |= {"nll": run.nll, "data": run.data_sha256[:12], "commit": run.commit}
        return Row(cells | {"environment": letters[_environment(run)]}, (run.name,))

    columns: dict[str, Style] = {
        "record": "text",
        "seed": "count",
        "best epoch": "count",
        "epochs": "count",
        "seconds": "count",
    }
    columns |= {"parameters": "count", "validation NDCG@10": "metric"} | dict.fromkeys(METRICS, "metric")
    columns |= {"nll": "number", "data": "text", "commit": "text", "environment": "text"}
    ordered = sorted(
        study.runs, key=lambda run: (run.dataset, model_order(run.model), run.variant, run.seed, run.filtering)
    )
    dirty = sum("dirty" in (run.commit or "") for run in ordered)
    notes = [f"{dirty} of {len(ordered)} were made with changes that were not committed (`-dirty`)."] if dirty else []
    return Table("runs", "Runs", columns, tuple(map(row, ordered)), tuple(notes))


def environments(study: Study) -> Table:
    """The machines and versions of the runs, by the letter that `runs` gives them."""
    rows = []
    for environment, letter in _letters(study).items():
        cells: dict[str, Cell] = {"environment": letter, **dict(environment)}
        made = tuple(run.name for run in study.runs if _environment(run) == environment)
        rows.append(Row(cells, made))
    names: dict[str, Style] = {name: "text" for environment in _letters(study) for name, _ in environment}
    return Table("environments", "Environments", {"environment": "text"} | names, tuple(rows))


def _letters(study: Study) -> dict[tuple[tuple[str, str], ...], str]:
    found = sorted({_environment(run) for run in study.runs})
    return {environment: f"E{number}" for number, environment in enumerate(found, 1)}


def _environment(run: RunRecord) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(value)) for name, value in run.environment.items())


# Cells that several tables have

_OF: dict[str, Style] = {"data set": "text", "model": "text"}
_SIZE: dict[str, Style] = {"users": "count", "ceiling": "metric"}
_DIFFERENCE: dict[str, Style] = {
    "off": "metric",
    "on": "metric",
    "difference": "signed",
    "change": "change",
    "in words": "text",
}


def _of(comparison: Comparison) -> dict[str, Cell]:
    return {"data set": comparison.dataset.name, "model": comparison.label}


def _size(comparison: Comparison, stratum: Stratum) -> dict[str, Cell]:
    users = comparison.users[stratum]
    impossible = np.zeros(len(users), bool)
    impossible[comparison.dataset.impossible] = True
    return {"users": int(users.sum()), "ceiling": float(1 - impossible[users].mean())}


def _difference_cells(comparison: Comparison, difference: Difference) -> dict[str, Cell]:
    return {
        "off": difference.second,
        "on": difference.first,
        "difference": _absolute(difference),
        "change": difference.relative,
        "in words": comparison.in_words(difference),
    }


def _absolute(difference: Difference) -> Estimate:
    return Estimate(difference.difference, difference.low, difference.high)


def _relative(difference: Difference) -> Estimate | None:
    """The difference as a share of the second mean, which is taken as fixed; None where that is 0."""
    if not difference.second:
        return None
    return Estimate(*(each / difference.second for each in (difference.difference, difference.low, difference.high)))
