"""A log whose next item follows from the last one, in a file, and a recipe for it that trains in seconds."""

from pathlib import Path

from tests.training.histories import successor_walks

RECIPE = """\
model: {backbone: sasrec, width: 16, num_layers: 1, num_heads: 2, ffn_width: 32, max_len: 8, dropout: 0.0}
training: {epochs: 8, batch_size: 32, learning_rate: 2.0e-2, precision_rate_multiple: 1.0}
"""
NUM_ITEMS = 30


def write_log(path: Path, num_users: int = 120, length: int = 7) -> list[str]:
    """Write the log; returns the overrides that name it."""
    walks = successor_walks(num_users, NUM_ITEMS, length)
    path.write_text("".join(f"u{user} {' '.join(map(str, walk))}\n" for user, walk in enumerate(walks)))
    return [f"data.path={path}"]


def write_recipe(folder: Path) -> Path:
    """Write the recipe of SASRec on the data set `planted`; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sasrec-planted.yaml").write_text(RECIPE)
    return folder
