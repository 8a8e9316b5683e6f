"""Between the torch model and tests/reference.py: models worth comparing, and their parameters as a dict."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.backbone import Backbone
from model.build import build_model
from model.config import BOS, FIRST_ITEM, PAD, UNK, ModelConfig
from tests import reference


def small_config(**changes: Any) -> ModelConfig:
    """Two layers, two heads, width 8, six events: small enough for the loops of the reference."""
    sizes = {"max_len": 6, "width": 8, "num_layers": 2, "num_heads": 2, "ffn_width": 12, "dropout": 0.0}
    return ModelConfig(**(sizes | changes))


def perturbed_model(config: ModelConfig, counts: Tensor, seed: int, dtype: torch.dtype = torch.float32) -> Backbone:
    """A model in eval mode with every parameter (θ, q, LayerNorm, biases …) off its starting value."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = build_model(config, counts).to(dtype).eval()
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    if dtype == torch.float64:
        # The buffers were made in float32; a float64 comparison needs log(1+n) to its last digit.
        model.log_count = counts.double().log1p()
        if config.filtering:
            model.initial_precision.log_count[FIRST_ITEM:] = counts.double().log1p()
    return model


def reference_params(model: Backbone, counts: Tensor) -> dict[str, NDArray[np.float64]]:
    """The model's state by the names of tests/reference.py; a plain model lacks what concerns precision."""
    state = {name: tensor.detach().double().numpy() for name, tensor in model.state_dict().items()}
    params = {
        "token_embedding": state["item_embedding.weight"],
        "position_embedding": state["position_embedding.weight"],
        "training_count": np.concatenate([np.zeros(FIRST_ITEM), counts.double().numpy()]),
        "final_norm_weight": state["head.norm.weight"],
        "final_norm_bias": state["head.norm.bias"],
    }
    if model.config.backbone == "bert4rec":
        params |= {f"embedding_norm_{kind}": state[f"embedding_norm.{kind}"] for kind in ("weight", "bias")}
    for index in range(model.config.num_layers):
        params |= {f"layers.{index}.{name}": array for name, array in _layer(state, f"layers.{index}.").items()}
    if model.config.filtering:
        params |= {
            "precision_intercept": state["initial_precision.level"],
            "precision_slope": state["initial_precision.frequency_slope"],
            "precision_offset": state["initial_precision.deviation"],
            "candidate_intercept": state["head.candidate_level"],
            "candidate_slope_raw": state["head.candidate_slope"],
            "score_shrinkage_raw": state["head.variance_scale"],
        }
        for index in range(model.config.num_layers):
            params[f"layers.{index}.process_noise_raw"] = state[f"layers.{index}.raw_process_noise"]
    return params


def _layer(state: dict[str, NDArray[np.float64]], prefix: str) -> dict[str, NDArray[np.float64]]:
    names = {
        "attention_norm_weight": "attention.norm.weight",
        "attention_norm_bias": "attention.norm.bias",
        "ffn_norm_weight": "feed_forward.norm.weight",
        "ffn_norm_bias": "feed_forward.norm.bias",
        "w1": "feed_forward.inner.weight",
        "b1": "feed_forward.inner.bias",
        "w2": "feed_forward.outer.weight",
        "b2": "feed_forward.outer.bias",
    }
    for part in ("query", "key", "value", "output"):
        names |= {f"{part}_{kind}": f"attention.{part}.{kind}" for kind in ("weight", "bias")}
    return {name: state[prefix + ours] for name, ours in names.items()}


def read_as(items: NDArray[np.int64], counts: Tensor, min_input_count: int) -> NDArray[np.int64]:
    """Item numbers as math.md has the encoder read them: one below the minimum count becomes UNK."""
    rare = {FIRST_ITEM + row for row, count in enumerate(counts.tolist()) if count < min_input_count}
    return np.array([[UNK if number in rare else number for number in row] for row in items.tolist()])


def random_rows(
    rng: np.random.Generator, batch: int, length: int, num_items: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """items and weights (B,T): the first row is full, others end at random, the last of several is padding.

    Events are UNK one time in five. Padding carries an odd weight, which must mean nothing.
    """
    items = rng.integers(FIRST_ITEM, FIRST_ITEM + num_items, size=(batch, length))
    items[rng.random(items.shape) < 0.2] = UNK
    items[:, 0] = BOS
    weights = rng.uniform(0.25, 3.0, size=(batch, length)).astype(np.float32)
    weights[:, 0] = 1.0
    lengths = rng.integers(1, length + 1, size=batch)
    lengths[0] = length
    if batch >= 3:
        lengths[-1] = 0
    padding = np.arange(length) >= lengths[:, None]
    items[padding] = PAD
    weights[padding] = 1e6
    return items, weights


def reference_states(
    model: Backbone, counts: Tensor, items: NDArray[np.int64], weights: NDArray[np.float32]
) -> reference.Gaussian:
    """The reference's mean and precision (B,T,D) for the model's parameters."""
    config = model.config
    return reference.forward_positions(
        reference_params(model, counts),
        read_as(items, counts, config.min_input_count),
        weights.astype(np.float64),
        config.num_heads,
        shrinkage_dof=config.shrinkage_dof,
    )


def hstu_params(model: Backbone, counts: Tensor) -> dict[str, NDArray[np.float64]]:
    """`reference_params` for HSTU."""
    state = {name: tensor.detach().double().numpy() for name, tensor in model.state_dict().items()}
    params = {
        "token_embedding": state["item_embedding.weight"],
        "training_count": np.concatenate([np.zeros(FIRST_ITEM), counts.double().numpy()]),
    }
    for index in range(model.config.num_layers):
        prefix = f"layers.{index}."
        projections = np.split(state[f"{prefix}inner.weight"], 4)
        names = ("gate", "value", "query", "key")
        params |= {f"{prefix}{name}_weight": part for name, part in zip(names, projections, strict=True)}
        params |= {f"{prefix}{name}": state[f"{prefix}{name}"] for name in ("position_bias", "time_bias")}
        params |= {f"{prefix}output_{kind}": state[f"{prefix}output.{kind}"] for kind in ("weight", "bias")}
        if model.config.filtering:
            params[f"{prefix}process_noise_raw"] = state[f"{prefix}raw_process_noise"]
    if model.config.filtering:
        params |= {
            "precision_intercept": state["initial_precision.level"],
            "precision_slope": state["initial_precision.frequency_slope"],
            "precision_offset": state["initial_precision.deviation"],
            "candidate_intercept": state["head.candidate_level"],
            "candidate_slope_raw": state["head.candidate_slope"],
            "score_shrinkage_raw": state["head.variance_scale"],
        }
    return params


def hstu_states(
    model: Backbone,
    counts: Tensor,
    items: NDArray[np.int64],
    weights: NDArray[np.float32],
    timestamps: NDArray[np.float64],
) -> reference.Gaussian:
    """The reference's mean and precision (B,T,D) for an HSTU's parameters."""
    config = model.config
    return reference.hstu_forward_positions(
        hstu_params(model, counts),
        read_as(items, counts, config.min_input_count),
        weights.astype(np.float64),
        timestamps,
        config.num_heads,
        config.attention_norm,
        config.shrinkage_dof,
    )
