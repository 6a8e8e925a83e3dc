"""Mutants of what is released, and of what it is accounted at (rules 1 to 9, 13, 15, 16, 17, 20, 21, 24, 27)."""

from __future__ import annotations

from mutant import Mutant
from of_user_level import USER_LEVEL

SPECS = "dpmixmin/privacy/mechanisms.py"
SGD = "dpmixmin/finetune/dp_sgd.py"
RANKS = "dpmixmin/ranks.py"
GRADIENTS = "dpmixmin/models/gradients.py"
NETWORKS = "dpmixmin/models/networks.py"
OBJECTIVE = "dpmixmin/mixing/objective.py"
LEARNERS = "dpmixmin/mixing/learners.py"
SELECTION = "dpmixmin/privacy/selection.py"
ACCOUNTING = "dpmixmin/privacy/accounting.py"
GAUSSIAN = "dpmixmin/privacy/gaussian.py"
COMPOSITION = "dpmixmin/privacy/composition.py"

TEST_SPECS = "tests/privacy/test_mechanisms.py"
TEST_SGD = "tests/privacy/test_dp_sgd.py"
TEST_REPLAY = "tests/privacy/test_replay.py"
TEST_SELECTION = "tests/privacy/test_selection.py"
TEST_LEDGER = "tests/privacy/test_ledger.py"
TEST_GAPS = "tests/privacy/test_mutation_gaps.py"

MECHANISMS = (
    Mutant(
        1,
        "accounted at half the sampling rate",
        SPECS,
        "GaussianEvent(self.noise_multiplier, self.sampling_rate, self.steps",
        "GaussianEvent(self.noise_multiplier, self.sampling_rate / 2, self.steps",
        (f"{TEST_SPECS}::test_rule_16_a_calibrated_spec_spends_at_most_its_target",),
    ),
    Mutant(
        2,
        "DP-SGD divides by the units that are there",
        SGD,
        "sums.add(-learning_rate * released / spec.expected_batch)",
        "sums.add(-learning_rate * released / max(1.0, spec.sampling_rate * sums.units))",
        (f"{TEST_SGD}::test_rule_2_the_update_divides_by_the_public_expected_batch",),
    ),
    Mutant(
        2,
        "the mixture divides by the actual batch",
        LEARNERS,
        "gradient = spec.release_sum(vectors, noise) / spec.expected_batch",
        "gradient = spec.release_sum(vectors, noise) / max(1, batch.sum())",
        (f"{TEST_SPECS}::test_rule_2_the_divisor_is_the_public_expected_batch",),
    ),
    Mutant(
        3,
        "mean over the batch instead of sum",
        SPECS,
        "total = self.to_grid(vectors).sum(axis=0, dtype=np.int64)",
        "total = (self.to_grid(vectors).sum(axis=0) * self.expected_batch / max(1, len(vectors))).astype(np.int64)",
        (f"{TEST_REPLAY}::test_rule_3_mixture_release_moves_by_at_most_the_clip_whichever_unit_goes",),
    ),
    Mutant(
        3,
        "mixture gradients clipped coordinate by coordinate",
        OBJECTIVE,
        "norms = np.sqrt(_over_sources(gradients * gradients))",
        "norms = np.abs(gradients).max(axis=0)",
        (f"{TEST_REPLAY}::test_rule_3_clipped_gradients_at_weights_that_miss_a_record",),
    ),
    Mutant(
        3,
        "mixture gradients not clipped",
        OBJECTIVE,
        "np.ascontiguousarray((gradients * np.minimum(1.0, clip / np.maximum(norms, 1e-300))).T)",
        "np.ascontiguousarray(gradients.T)",
        (f"{TEST_REPLAY}::test_rule_3_clipped_gradients_at_weights_that_miss_a_record",),
    ),
    Mutant(
        3,
        "DP-SGD gradients not clipped",
        SGD,
        "factors = torch.clamp(clip * _FLOAT32_MARGIN / norms.nan_to_num(0.0).clamp(min=1e-30), max=1.0)",
        "factors = torch.ones_like(norms)",
        (f"{TEST_REPLAY}::test_rule_3_dp_sgd_sum_moves_by_at_most_the_clip_whichever_unit_goes",),
    ),
    Mutant(
        3,
        "DP-SGD gradients clipped to twice the norm",
        SGD,
        "torch.clamp(clip * _FLOAT32_MARGIN",
        "torch.clamp(2 * clip * _FLOAT32_MARGIN",
        (f"{TEST_REPLAY}::test_rule_3_dp_sgd_sum_moves_by_at_most_the_clip_whichever_unit_goes",),
    ),
    Mutant(
        3,
        "DP-SGD noise halved",
        SPECS,
        "return self.noise_multiplier * self.clip\n",
        "return self.noise_multiplier * self.clip / 2\n",
        (
            f"{TEST_SPECS}::test_model_sized_noise_has_the_spec_deviation",
            f"{TEST_SGD}::test_rule_13_the_noise_of_an_update_has_the_spec_deviation",
        ),
    ),
    Mutant(
        3,
        "mixture noise halved",
        SPECS,
        "scale = self.noise_multiplier * 2**self.grid_bits",
        "scale = self.noise_multiplier * 2**self.grid_bits / 2",
        (f"{TEST_SPECS}::test_rule_15_a_release_is_the_exact_integer_sum_plus_one_draw_a_coordinate",),
    ),
    Mutant(
        4,
        "each physical batch is averaged",
        SGD,
        "total += factors @ exact",
        "total += (factors @ exact) / len(gradients)",
        (f"{TEST_SGD}::test_rule_4_the_update_is_the_same_for_physical_batches_1_4_and_64",),
    ),
    Mutant(
        4,
        "a process that does not lead draws no coins",
        SGD,
        "sums(spec.sample(sums.units, noise), ",
        "sums(spec.sample(sums.units, noise) | (not ranks.leads), ",
        ("tests/privacy/test_ranks.py::test_rule_4_each_process_draws_the_coins_of_its_own_units",),
    ),
    Mutant(
        4,
        "only the first physical batch counts",
        SGD,
        "            start = stop\n",
        "            return\n",
        (f"{TEST_SGD}::test_rule_4_every_sampled_record_is_read_once_whatever_the_chunks",),
    ),
    Mutant(
        5,
        "an empty batch skips its noise",
        SGD,
        "            share = torch.from_numpy(spec.release_sum(",
        "            if not total.any():\n                continue\n"
        "            share = torch.from_numpy(spec.release_sum(",
        (f"{TEST_SGD}::test_rule_5_an_empty_batch_still_adds_noise_and_every_step_counts",),
    ),
    Mutant(
        5,
        "an empty part gives exact zeros",
        SPECS,
        "        return self.add_noise(total, noise) * self.grid\n",
        "        if not len(vectors):\n            return total * self.grid\n"
        "        return self.add_noise(total, noise) * self.grid\n",
        (f"{TEST_SPECS}::test_rule_5_and_15_an_empty_part_still_gets_noise_on_the_grid",),
    ),
    Mutant(
        6,
        "the finite coordinates of a bad vector count",
        SPECS,
        "np.where(finite, vectors, 0.0) / self.grid",
        "np.nan_to_num(vectors) / self.grid",
        (f"{TEST_SPECS}::test_rule_6_a_row_that_is_not_finite_contributes_zero",),
    ),
    Mutant(
        6,
        "a bad gradient is multiplied by zero",
        SGD,
        "exact[~torch.isfinite(norms)] = 0.0",
        "exact = exact * torch.isfinite(norms)[:, None]",
        (f"{TEST_SGD}::test_rule_6_a_unit_whose_gradient_is_not_finite_contributes_zero",),
    ),
    Mutant(
        7,
        "batch statistics are accepted",
        NETWORKS,
        "isinstance(module, nn.modules.batchnorm._BatchNorm | nn.modules.instancenorm._InstanceNorm)",
        "isinstance(module, nn.modules.instancenorm._InstanceNorm)",
        (f"{TEST_SGD}::test_rule_7_layers_that_mix_records_are_refused_by_name",),
    ),
    Mutant(
        7,
        "the network normalises over the batch",
        NETWORKS,
        "nn.GroupNorm(1, hidden)",
        "nn.BatchNorm1d(hidden)",
        (f"{TEST_SGD}::test_rule_7_one_record_does_not_see_another",),
    ),
    Mutant(
        8,
        "wrong per-record gradients are believed",
        GRADIENTS,
        "if fault is None:",
        "if True:",
        (
            "tests/privacy/test_gradients.py::test_rule_8_a_model_that_no_engine_gets_right_is_refused_by_its_parameter",
        ),
    ),
    Mutant(
        8,
        "the gradient of the sum, shared out among the records",
        SGD,
        "        return self._gradients(*(part.to(self._device) for part in batch))\n",
        "        found = self._gradients(*(part.to(self._device) for part in batch))\n"
        "        return found.mean(dim=0, keepdim=True).expand_as(found)\n",
        (f"{TEST_SGD}::test_rule_8_per_example_gradients_equal_a_loop_of_batches_of_1",),
    ),
    Mutant(
        9,
        "repeat-and-select compares exact scores",
        SELECTION,
        "if not isinstance(score, NoisyScore):",
        "if not isinstance(score, float):",
        (f"{TEST_SELECTION}::test_rule_9_an_exact_score_is_refused",),
    ),
    Mutant(
        9,
        "selection at twice its epsilon",
        SELECTION,
        "rate = Fraction(self.epsilon) / int(self.sensitivity)",
        "rate = 2 * Fraction(self.epsilon) / int(self.sensitivity)",
        (f"{TEST_SELECTION}::test_the_choice_follows_the_exact_law",),
    ),
    Mutant(
        9,
        "selection scores not clipped",
        SELECTION,
        "clipped = np.clip(np.where(finite, scores, 0.0), 0.0, self.bound)",
        "clipped = np.where(finite, scores, 0.0)",
        (f"{TEST_SELECTION}::test_rule_6_and_15_scores_are_clipped_and_rounded_down",),
    ),
    Mutant(
        13,
        "a unit's gradients are summed, not averaged",
        SGD,
        "return rows, self._weight[rows] / counts[self._unit[rows]]",
        "return rows, self._weight[rows]",
        (f"{TEST_SGD}::test_rule_13_the_mean_over_a_units_records_is_clipped",),
    ),
    Mutant(
        13,
        "a unit's responsibilities are summed, not averaged",
        OBJECTIVE,
        "return rows, 1 / counts[self.owner[rows]]",
        "return rows, np.ones(len(self.owner[rows]))",
        (
            f"{TEST_REPLAY}::test_rule_3_and_13_mixture_release_moves_by_at_most_the_clip_for_worst_case_units",
            "tests/unit/test_mixing.py::test_responsibilities_are_the_mean_over_a_units_records",
        ),
    ),
    *USER_LEVEL,
    Mutant(
        15,
        "contributions rounded to the nearest point",
        SPECS,
        "np.trunc(np.where(finite, vectors, 0.0)",
        "np.rint(np.where(finite, vectors, 0.0)",
        (f"{TEST_SPECS}::test_rule_15_rounding_goes_toward_zero_and_never_lengthens",),
    ),
    Mutant(
        15,
        "no check of the rounded norm",
        SPECS,
        "if not over.any():",
        "if True:",
        (
            f"{TEST_SPECS}::test_rule_15_vectors_at_the_clip_and_ulps_above_it_stay_inside",
            f"{TEST_SPECS}::test_rule_15_a_vector_far_above_the_clip_is_shrunk_too",
        ),
    ),
    Mutant(
        15,
        "noise on all coordinates but the last",
        SPECS,
        "noise.rounded_gaussian(scale, total.shape[0])",
        "np.append(noise.rounded_gaussian(scale, total.shape[0] - 1), 0)",
        (f"{TEST_GAPS}::test_rule_15_every_coordinate_of_a_release_gets_noise",),
    ),
    Mutant(
        15,
        "one draw for all coordinates",
        SPECS,
        "noise.rounded_gaussian(scale, total.shape[0])",
        "noise.rounded_gaussian(scale, 1)",
        (f"{TEST_SPECS}::test_rule_15_a_release_is_the_exact_integer_sum_plus_one_draw_a_coordinate",),
    ),
    Mutant(
        15,
        "responsibilities off the simplex count",
        SPECS,
        "        integers[outside] = 0\n",
        "",
        (f"{TEST_SPECS}::test_rule_15_responsibilities_off_the_simplex_count_as_zero",),
    ),
    Mutant(
        16,
        "the number of steps is not accounted",
        ACCOUNTING,
        "(self._factor(each) / each.noise_multiplier) ** 2 * each.steps for each",
        "(self._factor(each) / each.noise_multiplier) ** 2 for each",
        (f"{TEST_GAPS}::test_rule_16_four_full_batches_with_twice_the_noise_cost_what_one_costs",),
    ),
    Mutant(
        16,
        "calibrated to twice the target",
        SPECS,
        "        sigma = calibrate(\n            epsilon,\n",
        "        sigma = calibrate(\n            2 * epsilon,\n",
        (f"{TEST_SPECS}::test_rule_16_a_calibrated_spec_spends_at_most_its_target",),
    ),
    Mutant(
        17,
        "an epsilon below zero",
        GAUSSIAN,
        "<= delta:\n        return 0.0\n",
        "<= delta:\n        return math.log(gaussian_delta(mu, 0.0) / delta)\n",
        (f"{TEST_GAPS}::test_rule_17_epsilon_is_zero_and_never_less_where_delta_pays_for_everything",),
    ),
    Mutant(
        17,
        "replacing a unit in a selection costs half of what it does",
        SELECTION,
        "return (PureEvent(self.epsilon, 2 * self.epsilon),)",
        "return (PureEvent(self.epsilon, self.epsilon),)",
        (f"{TEST_SELECTION}::test_rule_17_a_selection_spends_its_epsilon_whatever_the_adjacency",),
    ),
    Mutant(
        20,
        "progress tells the number of units",
        SGD,
        "epsilon=epsilon, start=done)",
        'epsilon=epsilon, start=done, unit=f"{sums.units} units, step")',
        ("tests/privacy/test_leaks.py::test_rule_20_progress_says_nothing_about_the_number_of_units",),
    ),
    Mutant(
        21,
        "releases on one part do not add up",
        COMPOSITION,
        "sum((touch.events for touch in under if atom in touch.parts), ())",
        "next(touch.events for touch in under if atom in touch.parts)",
        (f"{TEST_LEDGER}::test_rule_21_a_chain_that_touches_the_same_part_twice_composes",),
    ),
    Mutant(
        21,
        "disjoint parts cost the smaller epsilon",
        COMPOSITION,
        "epsilons[adjacency] = max(",
        "epsilons[adjacency] = min(",
        (f"{TEST_LEDGER}::test_rule_21_a_chain_of_mixing_and_finetuning_costs_the_larger_of_the_two",),
    ),
    Mutant(
        24,
        "noise shares that do not add up",
        SPECS,
        "noise.gaussian(self.noise_std / math.sqrt(shares),",
        "noise.gaussian(self.noise_std / shares,",
        ("tests/privacy/test_ranks.py::test_rule_24_the_shares_add_up_to_the_noise_of_one_process",),
    ),
    Mutant(
        24,
        "every rank adds the whole noise",
        SGD,
        "shares=ranks.world",
        "shares=1",
        ("tests/privacy/test_ranks.py::test_rule_24_the_shares_add_up_to_the_noise_of_one_process",),
    ),
    Mutant(
        24,
        "ranks that repeat each other's noise are accepted",
        RANKS,
        "if len(set(self._gather(different))) < self.world:",
        "if False:",
        ("tests/privacy/test_ranks.py::test_rule_24_processes_that_do_not_fit_together_are_refused_by_all",),
    ),
    Mutant(
        27,
        "replacing a unit costs what removing it costs",
        SPECS,
        "replace_factor: ClassVar[float] = 2.0",
        "replace_factor: ClassVar[float] = 1.0",
        (f"{TEST_SPECS}::test_rule_27_the_adjacency_changes_the_sensitivity_and_the_noise",),
    ),
)
