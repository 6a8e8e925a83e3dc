"""Mutants of what a unit of several records contributes (rules 2, 4, 6, 12, 13, 25)."""

from __future__ import annotations

from mutant import Mutant

SGD = "dpmixmin/finetune/dp_sgd.py"
OBJECTIVE = "dpmixmin/mixing/objective.py"
LEARNERS = "dpmixmin/mixing/learners.py"
SUBSAMPLE = "dpmixmin/privacy/subsample.py"

TEST_MIXTURE = "tests/privacy/test_user_level.py"
TEST_TRAINING = "tests/privacy/test_user_level_training.py"
TEST_OBJECTIVE = "tests/unit/test_language_objective.py"

USER_LEVEL = (
    Mutant(
        2,
        "the mixture draws its secret only when a unit is above the limit",
        LEARNERS,
        "return None if limit is None else table.subset",
        "return None if limit is None or max(np.bincount(table.unit), default=0) <= limit else table.subset",
        (f"{TEST_MIXTURE}::test_rule_2_a_mixture_draws_one_secret_a_step_whoever_is_there",),
    ),
    Mutant(
        2,
        "DP-SGD draws its secret only when there are units",
        SGD,
        "secret = None if sums.records_per_step is None else noise.random_bytes(SECRET_BYTES)",
        "secret = noise.random_bytes(SECRET_BYTES) if sums.records_per_step and sums.units else b''",
        (f"{TEST_TRAINING}::test_rule_2_dp_sgd_draws_one_secret_a_step_whoever_is_there",),
    ),
    Mutant(
        4,
        "the pieces of a large unit are clipped one by one",
        SGD,
        "stop = int(ends[max(following, fitting)])",
        "stop = min(start + self._physical, len(rows))",
        (f"{TEST_TRAINING}::test_rule_4_a_unit_in_pieces_is_clipped_when_it_is_whole",),
    ),
    Mutant(
        4,
        "a large unit is in memory as a whole",
        SGD,
        "for start in range(0, len(rows), self._physical):\n            piece = slice(start, start + self._physical)",
        "for start in [0]:\n            piece = slice(None)",
        (f"{TEST_TRAINING}::test_rule_4_no_more_rows_than_the_physical_batch_are_in_memory",),
    ),
    Mutant(
        6,
        "a log-probability of minus infinity is a probability of zero",
        OBJECTIVE,
        "bad = ~np.isfinite(logp).all(axis=1)",
        "bad = np.isnan(logp).any(axis=1)",
        (f"{TEST_OBJECTIVE}::test_rule_6_a_unit_with_a_bad_text_contributes_zero_and_changes_no_other",),
    ),
    Mutant(
        12,
        "a record of two units is accepted",
        SGD,
        "if (self._record_unit[self._record] != self._unit).any():",
        "if False:",
        (f"{TEST_TRAINING}::test_what_does_not_fit_together_is_refused",),
    ),
    Mutant(
        13,
        "every step takes the same records: the secret is ignored",
        SUBSAMPLE,
        "hashlib.shake_256(secret)",
        "hashlib.shake_256(b'')",
        (f"{TEST_MIXTURE}::test_rule_13_a_step_takes_the_limit_or_all_of_a_unit_and_another_secret_takes_others",),
    ),
    Mutant(
        13,
        "the secret is added to the names without mixing",
        SUBSAMPLE,
        "for key in keys[1:]:",
        "for key in keys[1:1]:",
        (f"{TEST_MIXTURE}::test_rule_13_every_subset_of_a_unit_is_equally_likely",),
    ),
    Mutant(
        13,
        "one record too many",
        SUBSAMPLE,
        "mask[order] = place < limit",
        "mask[order] = place <= limit",
        (f"{TEST_MIXTURE}::test_rule_13_a_step_takes_the_limit_or_all_of_a_unit_and_another_secret_takes_others",),
    ),
    Mutant(
        13,
        "the mixture has one secret for all steps",
        LEARNERS,
        "table.subset(noise.random_bytes(SECRET_BYTES), limit)",
        "(noise.random_bytes(SECRET_BYTES), table.subset(bytes(SECRET_BYTES), limit))[1]",
        (f"{TEST_MIXTURE}::test_rule_13_each_step_of_a_mixture_takes_other_records",),
    ),
    Mutant(
        13,
        "DP-SGD has one secret for all steps",
        SGD,
        "total = sums(spec.sample(sums.units, noise), spec.clip, secret).numpy()",
        "total = sums(spec.sample(sums.units, noise), spec.clip, bytes(SECRET_BYTES)).numpy()",
        (f"{TEST_TRAINING}::test_rule_25_the_records_of_the_others_stay_the_same_when_a_user_goes",),
    ),
    Mutant(
        13,
        "the mixture ignores the limit",
        OBJECTIVE,
        "return None if mask.all() else mask",
        "return None",
        (f"{TEST_MIXTURE}::test_rule_13_the_unit_vector_is_the_mean_over_the_chosen_records_alone",),
    ),
    Mutant(
        13,
        "DP-SGD ignores the limit",
        SGD,
        "records = records[chosen(secret, names, unit, self.records_per_step)]",
        "chosen(secret, names, unit, self.records_per_step)",
        (f"{TEST_TRAINING}::test_rule_4_a_unit_in_pieces_is_clipped_when_it_is_whole",),
    ),
    Mutant(
        13,
        "the mixture divides the chosen records' sum by all of a unit's records",
        OBJECTIVE,
        "self.unit if present is None else self.unit[present]",
        "self.unit",
        (f"{TEST_MIXTURE}::test_rule_13_the_unit_vector_is_the_mean_over_the_chosen_records_alone",),
    ),
    Mutant(
        13,
        "DP-SGD divides the chosen records' sum by all of a unit's records",
        SGD,
        "counts = np.bincount(self._record_unit[records], minlength=self.units)",
        "counts = np.bincount(self._record_unit, minlength=self.units)",
        (f"{TEST_TRAINING}::test_rule_4_a_unit_in_pieces_is_clipped_when_it_is_whole",),
    ),
    Mutant(
        13,
        "the mixture clips each row instead of the unit's mean",
        OBJECTIVE,
        "gradients = self.table.unit_sums(self.directions[:, rows] * coefficients, rows)",
        "each = self.directions[:, rows] * coefficients\n"
        "            each = each * np.minimum(1.0, clip / np.maximum(np.sqrt(_over_sources(each * each)), 1e-300))\n"
        "            gradients = self.table.unit_sums(each, rows)",
        (f"{TEST_OBJECTIVE}::test_language_gradients_are_those_of_autograd",),
    ),
    Mutant(
        13,
        "DP-SGD clips each row instead of the unit's mean",
        SGD,
        "units, owner = np.unique(self._unit[rows], return_inverse=True)",
        "units = owner = np.arange(len(rows))",
        (f"{TEST_TRAINING}::test_rule_13_windows_of_a_text_are_one_record",),
    ),
    Mutant(
        13,
        "the weights of a text's windows are forgotten",
        SGD,
        "return rows, self._weight[rows] / counts[self._unit[rows]]",
        "return rows, 1 / counts[self._unit[rows]]",
        (f"{TEST_TRAINING}::test_rule_13_windows_of_a_text_are_one_record",),
    ),
    Mutant(
        13,
        "the length of a sequence is forgotten",
        OBJECTIVE,
        "share * scale[record], record",
        "share, record",
        (f"{TEST_OBJECTIVE}::test_language_gradients_are_those_of_autograd",),
    ),
    Mutant(
        13,
        "responsibilities of tokens are summed over a record",
        OBJECTIVE,
        "* (self.table.share[rows] * factor)",
        "* factor",
        (f"{TEST_OBJECTIVE}::test_responsibilities_of_tokens_are_means_over_tokens_then_records",),
    ),
    Mutant(
        25,
        "which records are chosen depends on where they are",
        SUBSAMPLE,
        "_ranks(secret, record[large])",
        "_ranks(secret, large)",
        (f"{TEST_MIXTURE}::test_rule_25_the_subset_of_a_unit_depends_on_no_other_unit_and_on_no_position",),
    ),
    Mutant(
        25,
        "which records are chosen depends on how many there are in all",
        SUBSAMPLE,
        "hashlib.shake_256(secret)",
        "hashlib.shake_256(secret + b'%d' % len(record))",
        (f"{TEST_TRAINING}::test_rule_25_the_records_of_the_others_stay_the_same_when_a_user_goes",),
    ),
    Mutant(
        25,
        "the last bits of a unit's vector depend on the number of rows: a matrix product",
        OBJECTIVE,
        "inner = _over_sources(self.table.p[:, rows] * weights)",
        "inner = weights[:, 0] @ self.table.p[:, rows]",
        (f"{TEST_MIXTURE}::test_rule_25_every_other_users_vector_stays_the_same_to_the_last_bit",),
    ),
    Mutant(
        25,
        "the last bits of a unit's vector depend on the number of units: numpy's sum",
        OBJECTIVE,
        "norms = np.sqrt(_over_sources(gradients * gradients))",
        "norms = np.sqrt((gradients * gradients).sum(axis=0))",
        (f"{TEST_MIXTURE}::test_rule_25_every_other_users_vector_stays_the_same_to_the_last_bit",),
    ),
    Mutant(
        25,
        "rows of a unit that lie apart are not brought together",
        OBJECTIVE,
        "if (np.diff(owner) < 0).any():",
        "if False:",
        (f"{TEST_MIXTURE}::test_rule_25_a_units_records_may_lie_anywhere_in_the_table",),
    ),
)
