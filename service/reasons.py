"""From what a history's state heard to the reasons of an answer (math.md, "Reasons")."""

from collections.abc import Sequence

import numpy as np

from service.engine import EncoderRow, Heard
from service.schemas import Explanation, Reason

MAX_REASONS = 10
COLD_START = Explanation(reasons=[], prior_weight=1.0)
"""Nothing is known but that there is a user."""


def explanation(row: EncoderRow, heard: Heard, item_ids: Sequence[str | None]) -> Explanation:
    """The events that weighed most, of equal ones the older first.

    Args:
        row: BOS and the events of the window, T positions.
        heard: by the positions of the row.
        item_ids: of the kept events, the last T − 1 of which are the window's; None where an id is not known.
    """
    num_events = len(row.items) - 1
    window_ids = item_ids[len(item_ids) - num_events :]
    weights, precisions, timestamps = heard.kriging_weight[1:], heard.precision[1:], row.timestamps[1:]
    heaviest = np.argsort(-weights, kind="stable")[:MAX_REASONS]
    return Explanation(
        reasons=[
            Reason(
                item_id=window_ids[place],
                timestamp=None if np.isnan(timestamps[place]) else float(timestamps[place]),
                kriging_weight=float(weights[place]),
                precision=None if np.isinf(precisions[place]) else float(precisions[place]),
            )
            for place in heaviest.tolist()
        ],
        # Rounding can leave the sum of float32 shares a little above 1.
        prior_weight=max(0.0, 1.0 - float(weights.sum(dtype=np.float64))),
    )
