"""The numpy reference held to cases worked out by hand, to finite differences and to its own invariants."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model import config
from tests import reference
from tests.reference import Array, Gaussian
from tests.tolerance import assert_close, assert_precision_close

EXACT = 1e-12
"""Both sides are float64 and short: only the order of the operations differs."""
SEEDS = st.integers(0, 2**32 - 1)
few_cases = settings(max_examples=25, deadline=None, derandomize=True)


def random_params(
    rng: np.random.Generator,
    width: int = 6,
    ffn_width: int = 8,
    layers: int = 2,
    items: int = 7,
    positions: int = 9,
) -> dict[str, Array]:
    """A small network whose every parameter is set, so that no term of an equation is 0 by chance."""
    tokens = items + reference.FIRST_ITEM
    params: dict[str, Array] = {
        "token_embedding": rng.normal(size=(tokens, width)) / math.sqrt(width),
        "position_embedding": rng.normal(size=(positions, width)) * 0.3,
        "precision_intercept": np.array(0.3),
        "precision_slope": np.array(-0.4),
        "precision_offset": rng.normal(size=tokens) * 0.5,
        "training_count": np.concatenate([np.zeros(reference.FIRST_ITEM), rng.integers(0, 30, size=items)]),
        "final_norm_weight": rng.uniform(0.5, 1.5, size=width),
        "final_norm_bias": rng.normal(size=width) * 0.1,
        "candidate_intercept": np.array(-0.7),
        "candidate_slope_raw": np.array(0.2),
        "score_shrinkage_raw": np.array(-0.5),
    }
    for layer in range(layers):
        prefix = f"layers.{layer}."
        for norm in ("attention_norm", "ffn_norm"):
            params[f"{prefix}{norm}_weight"] = rng.uniform(0.5, 1.5, size=width)
            params[f"{prefix}{norm}_bias"] = rng.normal(size=width) * 0.1
        for name in ("query", "key", "value", "output"):
            params[f"{prefix}{name}_weight"] = rng.normal(size=(width, width)) / math.sqrt(width)
            params[f"{prefix}{name}_bias"] = rng.normal(size=width) * 0.1
        params[f"{prefix}w1"] = rng.normal(size=(ffn_width, width)) / math.sqrt(width)
        params[f"{prefix}b1"] = rng.normal(size=ffn_width) * 0.1
        params[f"{prefix}w2"] = rng.normal(size=(width, ffn_width)) / math.sqrt(ffn_width)
        params[f"{prefix}b2"] = rng.normal(size=width) * 0.1
        params[f"{prefix}process_noise_raw"] = rng.normal(size=width) - 3.0
    return params


def random_field_inputs(
    rng: np.random.Generator, neighbours: int = 5, heads: int = 2, channels: int = 3
) -> tuple[Array, Array, Array, Array]:
    """query (1,H,1,C), key and value (1,H,S,C), neighbour precision (1,S)."""
    return (
        rng.normal(size=(1, heads, 1, channels)),
        rng.normal(size=(1, heads, neighbours, channels)),
        rng.normal(size=(1, heads, neighbours, channels)),
        np.exp(rng.normal(size=(1, neighbours))),
    )


def all_visible(neighbours: int) -> np.ndarray:
    return np.ones((1, 1, neighbours), dtype=bool)


# --- the sequence and layer 0 -------------------------------------------------------------------------------


def test_window_moves_by_half_its_length_once_it_is_full() -> None:
    starts = [reference.window_start(count, 4) for count in range(10)]
    assert starts == [0, 0, 0, 0, 0, 2, 2, 4, 4, 6]


@pytest.mark.parametrize("max_len", [2, 4, 10, 50])
def test_the_model_s_window_rule_is_the_reference_s(max_len: int) -> None:
    for count in range(3 * max_len + 1):
        assert config.window_start(count, max_len) == reference.window_start(count, max_len)


def test_initial_precision_is_item_precision_times_event_weight_and_0_at_padding() -> None:
    # τ = exp(log 2 + 1·log(1 + n) + δ): n = 0, δ = 0 gives 2; n = 3, δ = log ½ gives 2·4·½ = 4.
    tau = reference.item_precision(math.log(2.0), 1.0, np.array([0.0, 3.0]), np.array([0.0, math.log(0.5)]))
    assert_close(tau, [2.0, 4.0], EXACT)
    tau_by_token = np.array([99.0, *tau])
    precision = reference.initial_precision(tau_by_token, np.array([[1, 2, 0]]), np.array([[1.0, 0.25, 7.0]]), 2)
    assert_close(precision, [[[2.0, 2.0], [1.0, 1.0], [0.0, 0.0]]], EXACT)


# --- observe ------------------------------------------------------------------------------------------------


def test_krige_matches_a_case_worked_by_hand() -> None:
    # Equal attention, λ̄ = (1, 3): α̃ = (¼, ¾). v = (0, 4): e = 3, s = ¼·9 + ¾·1 = 3.
    # n = 1/(1/16 + 9/16) = 1.6; σ0² = ¼/1 + ¾/3 = ½; ν0 = 1: σ̂² = (½ + 1.6·3)/1.6 = 3.3125.
    query, key, value = np.zeros((1, 1, 1, 1)), np.ones((1, 1, 2, 1)), np.array([[[[0.0], [4.0]]]])
    field = reference.krige(query, key, value, np.array([[1.0, 3.0]]), all_visible(2))
    assert_close(field.kriging_weights, [[[[0.25, 0.75]]]], EXACT)
    assert_close(field.kriged_mean, [[[3.0]]], EXACT)
    assert_close(field.effective_sample_size, [[[1.6]]], EXACT)
    assert_close(field.reml_variance, [[[3.3125]]], EXACT)


def test_shrinkage_dof_weighs_the_prior_variance_against_the_spread() -> None:
    # The case above with ν0 = 3: (3·½ + 1.6·3)/(3 + 0.6) = 1.75.
    query, key, value = np.zeros((1, 1, 1, 1)), np.ones((1, 1, 2, 1)), np.array([[[[0.0], [4.0]]]])
    field = reference.krige(query, key, value, np.array([[1.0, 3.0]]), all_visible(2), shrinkage_dof=3.0)
    assert_close(field.reml_variance, [[[1.75]]], EXACT)


def test_attention_and_neighbour_precision_multiply_in_the_kriging_weights() -> None:
    # C = 1, q = 1, k = (0, log 2): α = (⅓, ⅔); λ̄ = (2, 1) makes them equal.
    query, key = np.ones((1, 1, 1, 1)), np.array([[[[0.0], [math.log(2.0)]]]])
    field = reference.krige(query, key, key, np.array([[2.0, 1.0]]), all_visible(2))
    assert_close(field.kriging_weights, [[[[0.5, 0.5]]]], EXACT)


def test_heads_are_concatenated_in_order() -> None:
    value = np.arange(1.0, 7.0).reshape(1, 2, 1, 3)
    field = reference.krige(np.zeros((1, 2, 1, 3)), np.zeros((1, 2, 1, 3)), value, np.ones((1, 1)), all_visible(1))
    assert_close(field.kriged_mean, [[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]], EXACT)


def test_no_visible_neighbour_gives_nothing() -> None:
    rng = np.random.default_rng(0)
    query, key, value, precision = random_field_inputs(rng)
    field = reference.krige(query, key, value, precision, ~all_visible(5))
    observed = reference.observation_precision(*field[2:], rng.normal(size=(6, 6)))
    posterior = reference.update(np.ones((1, 1, 6)), np.full((1, 1, 6), 2.0), np.ones((1, 1, 6)), observed)
    for nothing in (field.kriged_mean, field.effective_sample_size, observed, posterior.gain):
        assert (nothing == 0).all()
    assert_close(posterior.mean, np.ones((1, 1, 6)), 0.0)
    assert_close(posterior.precision, np.full((1, 1, 6), 2.0), 0.0)


def test_output_projection_mixes_variances_without_rescaling_them() -> None:
    # Rows (1,1) and (0,2) on variances (1,3): the average 2, and 3 whatever the factor.
    observed = reference.observation_precision(
        np.array([[[1.0, 3.0]]]), np.ones((1, 1, 1)), np.array([[1.0, 1.0], [0.0, 2.0]])
    )
    assert_close(observed, [[[0.5, 1.0 / 3.0]]], EXACT)


@few_cases
@given(SEEDS, st.integers(1, 6))
def test_with_one_prior_degree_of_freedom_the_variance_is_spread_plus_prior_over_sample_size(
    seed: int, neighbours: int
) -> None:
    query, key, value, precision = random_field_inputs(np.random.default_rng(seed), neighbours)
    field = reference.krige(query, key, value, precision, all_visible(neighbours))
    for h in range(2):
        weights = field.kriging_weights[0, h, 0]
        # σ0² in its second form, 1/Σ αλ̄, from an attention recovered as α ∝ α̃/λ̄.
        attention = weights / precision[0] / (weights / precision[0]).sum()
        prior_variance = 1.0 / (attention @ precision[0])
        spread = weights @ value[0, h] ** 2 - (weights @ value[0, h]) ** 2
        expected = spread + prior_variance / field.effective_sample_size[0, h, 0]
        assert_close(field.reml_variance[0, 0, 3 * h : 3 * h + 3], expected, EXACT)


@few_cases
@given(SEEDS)
def test_a_lone_neighbour_is_observed_with_its_own_precision_so_a_first_token_has_gain_one_half(
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    query, key, value, precision = random_field_inputs(rng, neighbours=1)
    field = reference.krige(query, key, value, precision, all_visible(1))
    observed = reference.observation_precision(*field[2:], rng.normal(size=(6, 6)))
    prior_precision = np.full((1, 1, 6), precision[0, 0])
    gain = reference.update(np.zeros((1, 1, 6)), prior_precision, np.zeros((1, 1, 6)), observed).gain
    assert_close(observed, prior_precision, EXACT)
    assert_close(gain, np.full((1, 1, 6), 0.5), EXACT)


@few_cases
@given(SEEDS, st.integers(1, 6), st.floats(-5, 5))
def test_with_one_prior_degree_of_freedom_and_no_spread_the_gain_is_scale_free_and_at_most_n_over_n_plus_1(
    seed: int, neighbours: int, log_scale: float
) -> None:
    rng = np.random.default_rng(seed)
    query, key, _, _ = random_field_inputs(rng, neighbours)
    value = np.ones_like(key)
    precision = np.full((1, neighbours), math.exp(log_scale))
    field = reference.krige(query, key, value, precision, all_visible(neighbours))
    observed = reference.observation_precision(*field[2:], np.eye(6))
    gain = reference.update(np.zeros((1, 1, 6)), np.full((1, 1, 6), precision[0, 0]), np.zeros((1, 1, 6)), observed)
    sample_size = np.repeat(field.effective_sample_size[0, :, 0], 3)
    assert_close(gain.gain[0, 0], sample_size / (sample_size + 1.0), EXACT)


# --- update and predict -------------------------------------------------------------------------------------


def test_update_matches_a_case_worked_by_hand() -> None:
    posterior = reference.update(np.array([10.0]), np.array([3.0]), np.array([4.0]), np.array([1.0]))
    assert_close(posterior.gain, [0.25], EXACT)
    assert_close(posterior.mean, [11.0], EXACT)
    assert_close(posterior.precision, [4.0], EXACT)


def test_predict_matches_a_case_worked_by_hand() -> None:
    # With D = 2 and eps = 0, LN(1, −1) = (1, −1) and does not move with its input: J = 0, so that
    # λ'' = 1/(1/2 + ½) = 1. W1 picks the first dimension: GELU(1) = Φ(1), added once and twice.
    one, zero = np.ones(2), np.zeros(2)
    predicted = reference.predict(
        np.array([[[1.0, -1.0]]]),
        np.array([[[2.0, 2.0]]]),
        one,
        zero,
        0.0,
        np.array([[1.0, 0.0]]),
        np.zeros(1),
        np.array([[1.0], [2.0]]),
        zero,
        np.array([0.5, 0.5]),
    )
    phi_of_one = 0.8413447460685429
    assert_close(predicted.mean, [[[1.0 + phi_of_one, -1.0 + 2.0 * phi_of_one]]], EXACT)
    assert_precision_close(predicted.precision, [[[1.0, 1.0]]], EXACT)


@few_cases
@given(SEEDS, st.integers(1, 7), st.integers(1, 9))
def test_jacobian_matches_central_finite_differences(seed: int, width: int, ffn_width: int) -> None:
    rng = np.random.default_rng(seed)
    weight, bias = rng.uniform(0.5, 1.5, size=width), rng.normal(size=width)
    w1, b1 = rng.normal(size=(ffn_width, width)), rng.normal(size=ffn_width)
    w2, b2 = rng.normal(size=(width, ffn_width)), rng.normal(size=width)
    state = rng.normal(size=width)
    eps, step = 0.1, 1e-5  # an eps far from 0 bounds the third derivative, hence the error of the difference

    def dynamics(x: Array) -> Array:
        return reference.feed_forward(reference.layer_norm(x, weight, bias, eps), w1, b1, w2, b2)

    columns = [(dynamics(state + h) - dynamics(state - h)) / (2 * step) for h in step * np.eye(width)]
    expected = np.stack(columns, axis=1)
    assert_close(reference.dynamics_jacobian(state, weight, bias, eps, w1, b1, w2), expected, 1e-7)


# --- math.md, "What must hold", 2 ---------------------------------------------------------------------------


@few_cases
@given(SEEDS, st.integers(1, 5))
def test_duplicating_every_neighbour_keeps_mean_and_spread_and_does_not_lower_observation_precision(
    seed: int, neighbours: int
) -> None:
    rng = np.random.default_rng(seed)
    query, key, value, precision = random_field_inputs(rng, neighbours)
    output_weight = rng.normal(size=(6, 6))

    def observe(copies: int) -> tuple[reference.Kriged, Array, Array]:
        field = reference.krige(
            query,
            np.tile(key, (1, 1, copies, 1)),
            np.tile(value, (1, 1, copies, 1)),
            np.tile(precision, (1, copies)),
            all_visible(copies * neighbours),
        )
        values = np.tile(value, (1, 1, copies, 1))
        spread = np.einsum("bhts,bhsc->bhtc", field.kriging_weights, values**2) - (
            np.einsum("bhts,bhsc->bhtc", field.kriging_weights, values) ** 2
        )
        return field, spread, reference.observation_precision(*field[2:], output_weight)

    (once, spread_once, observed_once), (twice, spread_twice, observed_twice) = observe(1), observe(2)
    assert_close(twice.kriged_mean, once.kriged_mean, EXACT)
    assert_close(spread_twice, spread_once, EXACT)
    assert_close(twice.effective_sample_size, 2.0 * once.effective_sample_size, EXACT)
    assert (observed_twice >= observed_once * (1 - EXACT)).all()


@few_cases
@given(SEEDS, st.integers(1, 6), st.floats(-6, 6))
def test_equal_neighbour_precision_gives_softmax_attention(seed: int, neighbours: int, log_scale: float) -> None:
    query, key, value, _ = random_field_inputs(np.random.default_rng(seed), neighbours)
    field = reference.krige(query, key, value, np.full((1, neighbours), math.exp(log_scale)), all_visible(neighbours))
    logits = np.einsum("bhtc,bhsc->bhts", query, key) / math.sqrt(3)
    assert_close(field.kriging_weights, np.exp(logits) / np.exp(logits).sum(-1, keepdims=True), EXACT)


@few_cases
@given(SEEDS, st.integers(1, 6))
def test_equal_precision_gain_1_and_no_process_noise_make_the_plain_block(seed: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    layer = reference.layer_params(random_params(rng, layers=1), 0)
    state, eps = rng.normal(size=(1, length, 6)), reference.LN_EPS
    query, key, value = reference.attention_inputs(layer, state, 2, eps)
    causal = np.tril(np.ones((1, length, length), dtype=bool))
    field = reference.krige(query, key, value, np.full((1, length), 0.7), causal)
    innovation = field.kriged_mean @ layer["output_weight"].T + layer["output_bias"]
    certain = np.full_like(state, 1e300)  # so precise an observation that K rounds to 1
    posterior = reference.update(state, np.full_like(state, 0.7), innovation, certain)
    ffn = (layer[name] for name in ("w1", "b1", "w2", "b2"))
    predicted = reference.predict(
        *posterior[1:], layer["ffn_norm_weight"], layer["ffn_norm_bias"], eps, *ffn, np.zeros(6)
    )
    assert_close(predicted.mean, reference.plain_block(layer, state, 2, eps), EXACT)


# --- math.md, "What must hold", 3 ---------------------------------------------------------------------------


@few_cases
@given(SEEDS, st.integers(2, 6), st.floats(0.01, 0.99))
def test_lowering_a_neighbour_s_precision_lowers_its_kriging_weight(seed: int, neighbours: int, factor: float) -> None:
    query, key, value, precision = random_field_inputs(np.random.default_rng(seed), neighbours)
    lowered = precision.copy()
    lowered[0, 0] *= factor
    before = reference.krige(query, key, value, precision, all_visible(neighbours)).kriging_weights[..., 0]
    after = reference.krige(query, key, value, lowered, all_visible(neighbours)).kriging_weights[..., 0]
    assert (after < before).all()


@few_cases
@given(SEEDS, st.integers(2, 6), st.floats(1.01, 100.0))
def test_observation_precision_falls_as_the_spread_of_the_neighbours_grows(
    seed: int, neighbours: int, stretch: float
) -> None:
    rng = np.random.default_rng(seed)
    query, key, value, precision = random_field_inputs(rng, neighbours)
    output_weight = rng.normal(size=(6, 6))
    narrow = reference.krige(query, key, value, precision, all_visible(neighbours))
    wide = reference.krige(query, key, value * stretch, precision, all_visible(neighbours))
    observed_narrow = reference.observation_precision(*narrow[2:], output_weight)
    observed_wide = reference.observation_precision(*wide[2:], output_weight)
    assert (observed_wide < observed_narrow).all()


@few_cases
@given(SEEDS, st.integers(2, 6))
def test_a_neighbour_of_vanishing_precision_leaves_the_mean_as_if_it_were_absent(seed: int, neighbours: int) -> None:
    query, key, value, precision = random_field_inputs(np.random.default_rng(seed), neighbours)
    precision[0, 0] = 1e-15
    without = all_visible(neighbours)
    without[..., 0] = False
    vanishing = reference.krige(query, key, value, precision, all_visible(neighbours))
    removed = reference.krige(query, key, value, precision, without)
    assert_close(vanishing.kriging_weights, removed.kriging_weights, EXACT)
    assert_close(vanishing.kriged_mean, removed.kriged_mean, EXACT)
    assert_close(vanishing.effective_sample_size, removed.effective_sample_size, EXACT)


@few_cases
@given(SEEDS, st.integers(2, 6))
def test_a_neighbour_of_vanishing_precision_keeps_its_share_of_attention_in_the_prior_variance(
    seed: int, neighbours: int
) -> None:
    # σ0² = 1/Σ αλ̄ with α over all neighbours: the limit is the value without the neighbour over 1 − α_j.
    query, _, _, precision = random_field_inputs(np.random.default_rng(seed), neighbours)
    key = np.zeros((1, 2, neighbours, 3))
    value = np.ones_like(key)  # no spread: σ̂² = σ0²/n
    precision[0, 0] = 1e-15
    without = all_visible(neighbours)
    without[..., 0] = False
    vanishing = reference.krige(query, key, value, precision, all_visible(neighbours))
    removed = reference.krige(query, key, value, precision, without)
    attention_left = 1.0 - 1.0 / neighbours
    assert_close(vanishing.reml_variance * attention_left, removed.reml_variance, EXACT)


@few_cases
@given(SEEDS, st.floats(-13, 13), st.floats(-13, 13))
def test_gain_lies_between_0_and_1_and_predicted_precision_between_0_and_1_over_process_noise(
    seed: int, log_prior: float, log_observed: float
) -> None:
    rng = np.random.default_rng(seed)
    layer = reference.layer_params(random_params(rng, layers=1), 0)
    mean, noise = rng.normal(size=(1, 1, 6)), reference.softplus(layer["process_noise_raw"])
    posterior = reference.update(
        mean, np.full_like(mean, math.exp(log_prior)), mean, np.full_like(mean, math.exp(log_observed))
    )
    ffn = (layer[name] for name in ("w1", "b1", "w2", "b2"))
    predicted = reference.predict(
        *posterior[1:], layer["ffn_norm_weight"], layer["ffn_norm_bias"], reference.LN_EPS, *ffn, noise
    )
    assert ((posterior.gain >= 0) & (posterior.gain <= 1)).all()
    assert ((predicted.precision > 0) & (predicted.precision <= 1 / noise)).all()


# --- scoring, and math.md, "What must hold", 5 --------------------------------------------------------------


def test_scoring_matches_a_case_worked_by_hand() -> None:
    # h = (3, −1), eps = 0: s = 2, x̂ = (1, −1); γ = (2, 1), β = (0, 1): z = (2, 0).
    # λ = (4, ¼): ρ = γ²/(s²λ) = (4/16, 1/1).
    user, user_variance = reference.final_state(
        np.array([3.0, -1.0]), np.array([4.0, 0.25]), np.array([2.0, 1.0]), np.array([0.0, 1.0]), ln_eps=0.0
    )
    assert_close(user, [2.0, 0.0], EXACT)
    assert_close(user_variance, [0.25, 1.0], EXACT)
    # a' = log 2, softplus(b') = 1, n = (0, 1, 3): r = 2/(1 + n) = (2, 1, ½).
    item_variance = reference.candidate_variance(np.array([0.0, 1.0, 3.0]), math.log(2.0), math.log(math.e - 1.0))
    assert_close(item_variance, [2.0, 1.0, 0.5], EXACT)
    # Σ(z² + ρ)/D = 5.25/2; v = Σe²ρ + r·2.625.
    items = np.array([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]])
    means = reference.score_mean(user, items)
    variances = reference.score_variance(user, user_variance, items, item_variance)
    assert_close(means, [2.0, 0.0, -2.0], EXACT)
    assert_close(variances, [0.25 + 5.25, 4.0 + 2.625, 1.25 + 1.3125], EXACT)
    # ē = (0, 1): m = 0; c = 2.
    logit = reference.predictive_logit(means, float(user @ items.mean(axis=0)), variances, 2.0)
    assert_close(logit, [2.0 / math.sqrt(12.0), 0.0, -2.0 / math.sqrt(6.125)], EXACT)


def test_probability_is_a_tempered_softmax_over_unseen_items_and_entropy_is_in_nats() -> None:
    # T = 2 on logits (2·log 1, 2·log 3) gives ¼ and ¾; the seen item would have taken nearly all.
    logit = np.array([0.0, 50.0, 2.0 * math.log(3.0)])
    probability = reference.catalogue_probability(logit, 2.0, np.array([False, True, False]))
    assert_close(probability, [0.25, 0.0, 0.75], EXACT)
    assert reference.entropy(probability) == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))
    assert reference.entropy(np.full(8, 0.125)) == pytest.approx(math.log(8.0))


def test_reliability_is_the_resolved_share_of_prior_variance_clipped_to_0_and_1() -> None:
    # γ²/λ = (1, 4) against (4, 2), so Σe²γ²/λ = (1, 4, 5) against (4, 2, 6).
    items = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    weight, precision, bos_precision = np.array([2.0, -1.0]), np.array([4.0, 0.25]), np.array([1.0, 0.5])
    resolved = reference.reliability(items, weight, precision, bos_precision)
    assert_close(resolved, [0.75, 0.0, 1.0 / 6.0], EXACT)


def test_a_catalogue_that_is_wholly_seen_is_refused() -> None:
    with pytest.raises(ValueError, match="every item of the catalogue is seen"):
        reference.catalogue_probability(np.zeros(2), 1.0, np.array([True, True]))


@few_cases
@given(SEEDS)
def test_adding_one_vector_to_all_item_embeddings_changes_no_probability(seed: int) -> None:
    rng = np.random.default_rng(seed)
    user, items, shift = rng.normal(size=5), rng.normal(size=(9, 5)), rng.normal(size=5)
    variances = rng.uniform(0.1, 4.0, size=9)  # held fixed
    seen = rng.random(9) < 0.3

    def probability(embedding: Array) -> Array:
        catalogue_mean = float(user @ embedding.mean(axis=0))
        logit = reference.predictive_logit(reference.score_mean(user, embedding), catalogue_mean, variances, 0.8)
        return reference.catalogue_probability(logit, 1.3, seen)

    assert_close(probability(items + shift), probability(items), EXACT)


@few_cases
@given(SEEDS, st.floats(0.01, 10.0))
def test_more_variance_lowers_the_probability_of_an_item_above_the_average(seed: int, more: float) -> None:
    rng = np.random.default_rng(seed)
    means, variances = rng.normal(size=9), rng.uniform(0.1, 4.0, size=9)
    above = int(means.argmax())
    wider = variances.copy()
    wider[above] += more
    unseen = np.zeros(9, dtype=bool)
    before, after = (
        reference.catalogue_probability(reference.predictive_logit(means, means.mean(), v, 0.8), 1.0, unseen)
        for v in (variances, wider)
    )
    assert after[above] < before[above]


# --- the whole network --------------------------------------------------------------------------------------


def random_rows(rng: np.random.Generator) -> tuple[np.ndarray, Array]:
    """Three right-padded rows: a full one, a short one with an unknown item, and BOS alone."""
    items = np.array([[1, 4, 9, 5, 10, 6], [1, 2, 7, 0, 0, 0], [1, 0, 0, 0, 0, 0]])
    weights = rng.uniform(0.3, 2.0, size=items.shape)
    weights[:, 0] = 1.0
    return items, weights


def test_a_position_does_not_know_what_comes_after_it() -> None:
    rng = np.random.default_rng(1)
    params, (items, weights) = random_params(rng), random_rows(rng)
    states = reference.forward_positions(params, items, weights, num_heads=2)
    plain = reference.plain_forward_positions(params, items, num_heads=2)
    for length in range(1, 7):
        prefix = reference.forward(params, items[:1, :length], weights[:1, :length], num_heads=2)
        assert_close(prefix.mean[0], states.mean[0, length - 1], EXACT)
        assert_precision_close(prefix.precision[0], states.precision[0, length - 1], EXACT)
        assert_close(reference.plain_forward(params, items[:1, :length], num_heads=2)[0], plain[0, length - 1], EXACT)


def test_padding_comes_back_with_mean_0_and_precision_0() -> None:
    rng = np.random.default_rng(2)
    params, (items, weights) = random_params(rng), random_rows(rng)
    states = reference.forward_positions(params, items, weights, num_heads=2)
    padding = items == reference.PAD
    assert (states.mean[padding] == 0).all()
    assert (states.precision[padding] == 0).all()
    assert (states.precision[~padding] > 0).all()
    nothing = reference.forward(params, np.zeros((1, 3), dtype=np.int64), np.ones((1, 3)), num_heads=2)
    assert (nothing.mean == 0).all()
    assert (nothing.precision == 0).all()


def test_padding_inside_a_row_is_refused() -> None:
    rng = np.random.default_rng(3)
    with pytest.raises(ValueError, match="right end"):
        reference.plain_forward(random_params(rng), np.array([[1, 0, 5]]), num_heads=2)


def test_one_layer_of_the_network_is_its_three_steps() -> None:
    # λ̄ of a layer is the mean over d of its own prior precision: seen at layer 1, where it varies with d.
    rng = np.random.default_rng(4)
    params, (items, weights) = random_params(rng), random_rows(rng)
    one_layer = {name: array for name, array in params.items() if not name.startswith("layers.1.")}
    prior = Gaussian(*(x[:1] for x in reference.forward_positions(one_layer, items, weights, num_heads=2)))
    layer = reference.layer_params(params, 1)
    query, key, value = reference.attention_inputs(layer, prior.mean, 2, reference.LN_EPS)
    causal = np.tril(np.ones((1, 6, 6), dtype=bool))
    field = reference.krige(query, key, value, prior.precision.sum(axis=-1) / 6, causal)
    observed = reference.observation_precision(*field[2:], layer["output_weight"])
    innovation = field.kriged_mean @ layer["output_weight"].T + layer["output_bias"]
    posterior = reference.update(*prior, innovation, observed)
    ffn = (layer[name] for name in ("w1", "b1", "w2", "b2"))
    predicted = reference.predict(
        *posterior[1:],
        layer["ffn_norm_weight"],
        layer["ffn_norm_bias"],
        reference.LN_EPS,
        *ffn,
        np.log1p(np.exp(layer["process_noise_raw"])),
    )
    states = reference.forward_positions(params, items, weights, num_heads=2)
    assert_close(states.mean[:1], predicted.mean, EXACT)
    assert_precision_close(states.precision[:1], predicted.precision, EXACT)


def test_a_catalogue_is_scored_by_the_equations_in_order() -> None:
    rng = np.random.default_rng(5)
    params, (items, weights) = random_params(rng), random_rows(rng)
    state = reference.forward(params, items, weights, num_heads=2)
    seen = np.array([True, False, False, True, False, False, False])
    scores = reference.score_catalogue(params, state.mean[0], state.precision[0], seen, temperature=1.5)
    user, user_variance = reference.final_state(
        state.mean[0], state.precision[0], params["final_norm_weight"], params["final_norm_bias"]
    )
    item = params["token_embedding"][reference.FIRST_ITEM + 2]
    uses = params["training_count"][reference.FIRST_ITEM + 2]
    own = math.exp(-0.7 - math.log1p(math.exp(0.2)) * math.log1p(uses)) * ((user**2 + user_variance).sum() / 6)
    variance = float(item**2 @ user_variance) + own
    average = float(user @ params["token_embedding"][reference.FIRST_ITEM :].mean(axis=0))
    logit = (float(item @ user) - average) / math.sqrt(1.0 + math.log1p(math.exp(-0.5)) * variance)
    assert_close(scores.score_mean[2], item @ user, EXACT)
    assert_close(scores.score_variance[2], variance, EXACT)
    assert_close(scores.logit[2], logit, EXACT)
    assert scores.probability.sum() == pytest.approx(1.0)
    assert (scores.probability[seen] == 0).all()
    assert scores.entropy == pytest.approx(reference.entropy(scores.probability))
