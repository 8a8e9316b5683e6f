"""Beginning from the current model: its weights, and rows for items that it does not know."""

from collections.abc import Mapping

from torch import Tensor


def grown_weights(known: Mapping[str, Tensor], fresh: Mapping[str, Tensor], num_known: int) -> dict[str, Tensor]:
    """The weights of a fresh model of a grown catalogue, as far as possible those of the known model.

    A tensor that has a row for each item, after rows for special tokens or not, keeps its rows, since numbers never
    move; the row of a new item is the mean of the known items'.

    Args:
        known, fresh: state dicts of models that differ by the number of items alone.
        num_known: items of the known model.

    Raises:
        ValueError: the models differ in more.
    """
    if known.keys() != fresh.keys():
        raise ValueError(f"the models differ in {', '.join(sorted(known.keys() ^ fresh.keys()))}")
    grown = {}
    for name, target in fresh.items():
        rows = known[name]
        if rows.shape == target.shape:
            grown[name] = rows.clone()
            continue
        if rows.ndim == 0 or rows.shape[1:] != target.shape[1:] or not num_known <= len(rows) < len(target):
            raise ValueError(f"{name} has shape {tuple(rows.shape)} and would be {tuple(target.shape)}")
        grown[name] = target.clone()
        grown[name][: len(rows)] = rows
        grown[name][len(rows) :] = rows[-num_known:].mean(0)
    return grown
