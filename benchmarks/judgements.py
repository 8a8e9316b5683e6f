"""The records of confidences and of cold users that the documents tell of: trains what is compared, judges, keeps.

    python benchmarks/judgements.py confidence beauty [--ensemble 5] [--folder runs/judgements] [--records DIR]
    python benchmarks/judgements.py cold beauty       [--folder runs/judgements] [--records DIR]

By the data set's recipe (configs/recipes/BACKBONE-DATA.yaml, `--backbone sasrec`). `confidence` trains the model with
filtering and without, the former with a second seed too, and for `--ensemble N` the latter with N seeds; it writes
`calibration-DATA.json`. `cold` trains both with a tenth of the users held out (`split=users`), and writes
`cold-DATA.json`. Each is a `bft-train fit` into a folder of its own in `--folder`: what lies there is used, and a
training that was interrupted goes on. `bft-train report` makes the pages of the records.
"""

import argparse
from pathlib import Path

from model.bundle import Bundle, open_bundle
from model.registry import current_bundle
from training.cold.bundles import judge_bundle as judge_cold
from training.cold.records import record_path as cold_path
from training.confidence.bundles import judge_bundle as judge_confidence
from training.confidence.paid import MC_DROPOUT_PASSES
from training.confidence.records import record_path
from training.config import load_config
from training.events import DataConfig
from training.pipeline import train
from training.progress import JsonReporter
from training.study.records import write

RECIPES = Path("configs/recipes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("judged", choices=("confidence", "cold"))
    parser.add_argument("data", help="name of a data set with a recipe")
    parser.add_argument("--backbone", default="sasrec")
    parser.add_argument("--ensemble", type=int, default=0, metavar="N", help="seeds of the paid ensemble; 0: none")
    parser.add_argument("--folder", type=Path, default=Path("runs/judgements"), help="where the trainings lie")
    parser.add_argument("--records", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of all trainings")
    arguments = parser.parse_intermixed_args()
    path = confidence(arguments) if arguments.judged == "confidence" else cold(arguments)
    print(path)


def confidence(arguments: argparse.Namespace) -> Path:
    served, other = (trained(arguments, True, seed) for seed in (1, 2))
    plain = [trained(arguments, False, seed) for seed in range(1, max(arguments.ensemble, 1) + 1)]
    record = judge_confidence(
        served,
        log_of(arguments),
        arguments.data,
        plain[0],
        plain[: arguments.ensemble],
        other,
        MC_DROPOUT_PASSES,
        JsonReporter(judged=arguments.data),
    )
    path = record_path(arguments.records, arguments.data)
    write(path, record)
    return path


def cold(arguments: argparse.Namespace) -> Path:
    model, plain = (trained(arguments, filtering, 1, "split=users") for filtering in (True, False))
    record = judge_cold(model, log_of(arguments), arguments.data, plain, JsonReporter(judged=arguments.data))
    path = cold_path(arguments.records, arguments.data)
    write(path, record)
    return path


def recipe_of(arguments: argparse.Namespace) -> Path:
    return RECIPES / f"{arguments.backbone}-{arguments.data}.yaml"


def log_of(arguments: argparse.Namespace) -> DataConfig:
    return load_config(recipe_of(arguments), [f"data.path={arguments.data}"]).data


def trained(arguments: argparse.Namespace, filtering: bool, seed: int, *others: str) -> Bundle:
    """The bundle of a training, which is done unless its folder has one."""
    switches = [f"model.filtering={'on' if filtering else 'off'}", f"training.seed={seed}", *others]
    name = "-".join([arguments.data, arguments.backbone, *(switch.partition("=")[2] for switch in switches)])
    out = arguments.folder / name
    if (found := current_bundle(out / "registry")) is not None:
        return found
    overrides = [f"data.path={arguments.data}", *switches, *arguments.overrides]
    command = ["bft-train", "fit", "--config", str(recipe_of(arguments)), *overrides]
    out.mkdir(parents=True, exist_ok=True)
    config = load_config(recipe_of(arguments), overrides)
    return open_bundle(train(config, out, JsonReporter(run=name), command, resume=True).bundle)


if __name__ == "__main__":
    main()
