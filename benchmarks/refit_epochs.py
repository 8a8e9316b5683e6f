"""For how many epochs should the published model go on with the validation events? Asked without the test events.

    python benchmarks/refit_epochs.py --config configs/recipes/sasrec-beauty.yaml --data beauty [--epochs 0,1,2,4]

Every user's last event, the target of the test, is taken off the log. What is left is split as any log: its last events
are a test that no figure is reported of elsewhere. One training by the recipe is refitted for each number of epochs
(`training.refit_epochs`), and its confidences are judged (decision 14). The better number has a slope of hits over list
confidence nearer to 1 and a smaller calibration error, and ranks no worse.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import polars as pl
from _environment import environment

from model.bundle import open_bundle
from training.confidence.bundles import judge_bundle
from training.config import load_config
from training.events import DataConfig, read_events
from training.pipeline import train
from training.progress import JsonReporter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="the recipe")
    parser.add_argument("--data", required=True, help="the log, or the name of a data set")
    parser.add_argument("--epochs", type=numbers, default=[0, 1, 2, 4], help="numbers to try, with commas between them")
    parser.add_argument("--out", type=Path, help="folder of the training, which goes on there; default: one that goes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        out = arguments.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        source = load_config(arguments.config, [f"data.path={arguments.data}", *arguments.overrides]).data
        log = shortened(source, out / "log.csv")
        read_as = [f"data={json.dumps(log.model_dump(mode='json', exclude_defaults=True))}", *arguments.overrides]
        rows = [
            refitted(arguments.config, read_as, log, epochs, out, Path(arguments.data).stem)
            for epochs in arguments.epochs
        ]
    result = {
        "environment": environment(),
        "recipe": arguments.config.name,
        "overrides": arguments.overrides,
        "rows": rows,
    }
    print(json.dumps(result) if arguments.json else as_text(rows))


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def shortened(source: DataConfig, path: Path) -> DataConfig:
    """The log without every user's last event, as a CSV file; returns how to read it."""
    events = read_events(source).events
    is_last = pl.col("user_id") != pl.col("user_id").shift(-1)
    kept = events.filter(~is_last.fill_null(True))
    has_timestamps = not kept["timestamp"].is_nan().any()
    (kept if has_timestamps else kept.drop("timestamp")).write_csv(path)
    columns = {"weight": "weight"} if has_timestamps else {"weight": "weight", "timestamp": None}
    return DataConfig.model_validate({"path": path, "columns": columns})


def refitted(recipe: Path, overrides: list[str], log: DataConfig, epochs: int, out: Path, name: str) -> dict[str, Any]:
    """What the confidences of a model are worth that went on for some epochs."""
    config = load_config(recipe, [*overrides, f"training.refit_epochs={epochs}"])
    report = JsonReporter(refit_epochs=str(epochs))
    done = train(config, out, report, ["refit_epochs.py"], resume=True)
    judged = judge_bundle(open_bundle(done.bundle), log, name, None, (), None, 0, report)
    lists, items = judged.lists, judged.items
    return {
        "epochs": epochs,
        "hr@10": lists.realised,
        "ndcg@10": done.record["test"]["ndcg@10"],
        "nll": judged.likelihood.model.value,
        "stated": lists.stated,
        "slope": None if lists.slope is None else lists.slope.model_dump(),
        "p_value": lists.p_value,
        "ece@10": items.ece.value,
        "ece_null": items.ece_null,
        "mean_confidence": items.mean_confidence,
    }


def as_text(rows: list[dict[str, Any]]) -> str:
    lines = ["epochs  HR@10  NDCG@10     NLL  stated  slope (95 %)       χ² p     ECE@10 of a mean confidence"]
    for row in rows:
        slope = "–" if row["slope"] is None else "{value:.2f} ({low:.2f} … {high:.2f})".format(**row["slope"])
        p_value = "–" if row["p_value"] is None else f"{row['p_value']:.2g}"
        lines.append(
            f"{row['epochs']:>6} {row['hr@10']:>6.4f}  {row['ndcg@10']:>7.4f} {row['nll']:>7.4f}  {row['stated']:>6.3f}"
            f"  {slope:<17}  {p_value:<7}  {row['ece@10']:.4f} of {row['mean_confidence']:.4f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
