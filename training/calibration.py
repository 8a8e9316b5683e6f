"""Fitting the calibration on validation users (math.md, "Scoring and its uncertainty").

Two steps: the temperature T by the likelihood of the true next item, then a logistic map from probability,
precision and frequency to "this item is the next event", over each validation user's first 100 items.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from scipy.optimize import minimize

from model.bundle import FEATURES, Calibration, Event
from model.config import FIRST_ITEM
from training.evaluate import Predictions, ScoredUsers
from training.splits import Targets
from training.tables import DataError

FIT_LIST_LENGTH = 100
"""Items of each validation user's list that the confidence map is fitted on."""
RIDGE = 1.0
"""Squared-weight penalty of the confidence map, in units of one user's log-likelihood."""
TEMPERATURES = np.geomspace(0.25, 4.0, 49)


def fit_temperature(scored_users: Iterable[ScoredUsers], targets: Targets) -> float:
    """The T > 0 whose softmax(logit/T) gives the targets the highest likelihood.

    One pass over the users evaluates a grid in log T; a parabola through its best three points refines it.
    Targets that the event rules out say nothing and are left out.

    Raises:
        DataError: no target is possible under the event.
    """
    total, num_possible = np.zeros(len(TEMPERATURES)), 0
    for scored in scored_users:
        rows = targets.target[scored.users] - FIRST_ITEM
        own = np.take_along_axis(scored.logit.numpy(), rows[:, None], 1)[:, 0]
        possible = np.isfinite(own)
        num_possible += int(possible.sum())
        for index, temperature in enumerate(TEMPERATURES):
            partition = (scored.logit / temperature).logsumexp(-1).numpy()
            total[index] += (partition[possible] - own[possible] / temperature).sum()
    if num_possible == 0:
        raise DataError("no validation target is possible under the event: use event `next_item` for logs with repeats")
    return float(np.exp(_parabola_minimum(np.log(TEMPERATURES), total)))


def fit_confidence(
    predictions: Predictions,
    training_counts: np.ndarray,
    temperature: float,
    variance_scale: float,
    event: Event,
    among: Sequence[str] = FEATURES,
) -> Calibration:
    """The logistic confidence map, by penalised maximum likelihood; the probability's weight is kept ≥ 0.

    Args:
        predictions: of the validation users, at this temperature, with lists of `FIT_LIST_LENGTH`.
        training_counts: (N,).
        temperature, variance_scale: T and c, to be stored beside the map.
        event: what a confidence is the probability of.
        among: the features that the map may have.
    """
    all_features = predictions.features(training_counts, FIT_LIST_LENGTH)
    hit = predictions.hit[:, :FIT_LIST_LENGTH]
    usable = np.isfinite(predictions.list_log_probability[:, :FIT_LIST_LENGTH])
    columns = {name: np.broadcast_to(all_features[name], hit.shape)[usable].astype(np.float64) for name in among}
    # A feature that never varies says nothing: a plain model's precision is infinite for everyone.
    names = tuple(name for name, column in columns.items() if np.isfinite(column).all() and column.std() > 1e-9)
    design = np.stack([columns[name] for name in names], 1)
    mean, std = design.mean(0), design.std(0)
    never_falls = np.array([name == "logit_probability" for name in names])
    weights, bias = fit_logistic((design - mean) / std, hit[usable].astype(np.float64), never_falls)
    return Calibration(
        event=event,
        temperature=temperature,
        variance_scale=variance_scale,
        features=names,
        mean=tuple(mean.tolist()),
        std=tuple(std.tolist()),
        weights=tuple(weights.tolist()),
        bias=bias,
    )


def fit_logistic(
    design: np.ndarray, hit: np.ndarray, nonnegative: np.ndarray | None = None
) -> tuple[np.ndarray, float]:
    """Weights and bias of P(hit) = σ(bias + design·weights), by maximum likelihood with a slight ridge.

    Args:
        design: (R,F), columns of mean 0 and deviation 1.
        hit: (R,) 0 or 1.
        nonnegative: (F,) bool, whose weights stay ≥ 0; None: no one's.

    Returns:
        weights (F,) and the bias.
    """

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        weights, bias = parameters[:-1], parameters[-1]
        logit = design @ weights + bias
        error = 1 / (1 + np.exp(-logit)) - hit
        value = np.logaddexp(0, logit).sum() - (hit * logit).sum() + RIDGE / 2 * weights @ weights
        return float(value), np.append(design.T @ error + RIDGE * weights, error.sum())

    start = np.append(np.zeros(design.shape[1]), np.log(max(hit.mean(), 1e-6)))
    floors = np.zeros(design.shape[1], bool) if nonnegative is None else nonnegative
    bounds = [(0.0 if floor else None, None) for floor in floors] + [(None, None)]
    fitted = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds)
    return fitted.x[:-1], float(fitted.x[-1])


def _parabola_minimum(x: np.ndarray, y: np.ndarray) -> float:
    """Minimum of the parabola through the lowest point and its neighbours; the point itself at an end."""
    best = int(np.argmin(y))
    if best in (0, len(x) - 1):
        return float(x[best])
    left, middle, right = y[best - 1 : best + 2]
    step = x[best + 1] - x[best]
    return float(x[best] + step * (left - right) / (2 * (left - 2 * middle + right)))
