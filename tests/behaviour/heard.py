"""Whom the positions of one history hear, layer by layer, by tests/reference.py."""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from model.backbone import Backbone, Reasons
from model.config import PAD
from tests import reference
from tests.behaviour.instances import COUNTS, Rows
from tests.model.adapter import hstu_params, reference_params
from tests.tolerance import assert_close, assert_precision_close
from training.batches import Batch
from training.trace import with_query


class Expected(NamedTuple):
    """One row of the reference: per layer, weights (T,S), λ̄ (S,), effective sample size and gain (T,); precisions."""

    weights: list[np.ndarray]
    neighbour_precision: list[np.ndarray]
    effective_sample_size: list[np.ndarray]
    gain: list[np.ndarray]
    initial_precision: np.ndarray
    final_precision: np.ndarray


def expected_row(model: Backbone, items: np.ndarray, weights: np.ndarray, timestamps: np.ndarray) -> Expected:
    """By the steps of tests/reference.py, a layer at a time, on one row (T,) without padding."""
    config, name = model.config, model.config.backbone
    params = (hstu_params if name == "hstu" else reference_params)(model, COUNTS)
    length, width = len(items), config.width
    if name == "hstu":
        mean = params["token_embedding"][items][None] * math.sqrt(width)
    elif name == "bert4rec":
        mean = reference.embed_normalised(params, items, reference.LN_EPS)
    else:
        mean = reference.embed(params, items)
    # A plain model weights its neighbours as if all were equally precise.
    precision = np.ones((1, length, width))
    if config.filtering:
        terms = [params[f"precision_{term}"] for term in ("intercept", "slope")]
        tau = reference.item_precision(*map(float, terms), params["training_count"], params["precision_offset"])
        precision = reference.initial_precision(tau, items[None], weights[None], width)
    every = np.ones((1, length, length), bool)
    visible = every if name == "bert4rec" else np.tril(every)

    found = Expected([], [], [], [], precision[0].mean(-1), precision[0].mean(-1))
    state = reference.Gaussian(mean, precision)
    for number in range(config.num_layers):
        layer = reference.layer_params(params, number)
        neighbour_precision = state.precision.mean(-1)
        if name == "hstu":
            parts = reference.hstu_projections(layer, state.mean)
            query, key, value = (
                reference.split_heads(parts[part], config.num_heads) for part in ("query", "key", "value")
            )
            bias = reference.hstu_bias(layer, timestamps)
            field = reference.sandwich(
                query, key, value, bias, neighbour_precision, visible, config.attention_norm, config.shrinkage_dof
            )
            shares = np.abs(field.weights) / np.abs(field.weights).sum(-1, keepdims=True)
            variance = field.variance
        else:
            if name == "bert4rec":
                query, key, value = reference.project_heads(layer, state.mean, config.num_heads)
            else:
                query, key, value = reference.attention_inputs(layer, state.mean, config.num_heads, reference.LN_EPS)
            field = reference.krige(query, key, value, neighbour_precision, visible, config.shrinkage_dof)
            shares, variance = field.kriging_weights, field.reml_variance
        found.weights.append(shares[0].mean(0))
        found.neighbour_precision.append(neighbour_precision[0])
        found.effective_sample_size.append(field.effective_sample_size[0].mean(0))
        observed = reference.observation_precision(variance, field.effective_sample_size, layer["output_weight"])
        found.gain.append(reference.update(state.mean, state.precision, mean, observed).gain[0].mean(-1))
        state = next_state(model, layer, state, visible, timestamps)
    return found._replace(final_precision=state.precision[0].mean(-1))


def next_state(
    model: Backbone, layer: Any, state: reference.Gaussian, visible: np.ndarray, timestamps: np.ndarray
) -> reference.Gaussian:
    """One whole layer of the reference."""
    config, eps = model.config, reference.LN_EPS
    if config.backbone == "hstu":
        bias = reference.hstu_bias(layer, timestamps)
        if config.filtering:
            return reference.hstu_filtering_block(
                layer, state, bias, config.num_heads, config.attention_norm, config.shrinkage_dof
            )
        mean = reference.hstu_plain_block(layer, state.mean, bias, config.num_heads, config.attention_norm)
    elif config.backbone == "bert4rec":
        if config.filtering:
            return reference.post_norm_filtering_block(layer, state, config.num_heads, eps, config.shrinkage_dof)
        mean = reference.post_norm_plain_block(layer, state.mean, config.num_heads, eps)
    else:
        if config.filtering:
            return reference.filtering_block(layer, state, visible, config.num_heads, eps, config.shrinkage_dof)
        mean = reference.plain_block(layer, state.mean, config.num_heads, eps)
    return reference.Gaussian(mean, state.precision)


@torch.no_grad()
def assert_reasons(found: Reasons, model: Backbone, rows: Rows, tol: float) -> None:
    """What the reference says of each row alone."""
    nothing = torch.zeros(0, dtype=torch.int64)
    batch = Batch(*rows, last=nothing, positions=nothing, targets=nothing)
    items, weights, timestamps = (part.numpy() for part in with_query(model, batch))
    read_as = model.input_number.numpy()[items]
    assert found.kriging_weight.shape == found.precision.shape == rows.items.shape
    for row, length in enumerate(rows.lengths()):
        read = int((items[row] != PAD).sum())
        wanted = expected_row(model, *(part[row, :read] for part in (read_as, weights, timestamps)))
        share, precision = wanted.weights[-1][-1], wanted.neighbour_precision[-1]
        assert_close(found.kriging_weight[row, :length], share[:length], tol, "kriging weight")
        assert (found.kriging_weight[row, length:] == 0).all(), "padding is heard by nobody"
        assert (found.precision[row, length:] == 0).all()
        if model.config.filtering:
            assert_precision_close(found.precision[row, :length], precision[:length], tol)
        else:
            assert (found.precision[row, :length] == torch.inf).all()
        own = 0.0 if model.causal else float(share[-1])  # a MASK also hears itself
        assert float(found.kriging_weight[row].sum()) == pytest.approx(1 - own, abs=tol)
