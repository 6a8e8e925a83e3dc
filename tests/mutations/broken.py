"""Mechanisms with errors that people make, for detectors.py."""

from __future__ import annotations

from dataclasses import dataclass

SPECS = "dpmixmin/privacy/mechanisms.py"
SGD = "dpmixmin/finetune/dp_sgd.py"
OBJECTIVE = "dpmixmin/mixing/objective.py"


@dataclass(frozen=True)
class Edit:
    """One edit: ``old`` is in the file, under ``src/``, exactly once."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Broken:
    """A mechanism with an error.

    Attributes:
        case: name of the case that it is attacked in.
        name: the error.
        edits: what makes it; none for the mechanism as it is.
        test: pytest node id of a test of `make test` that should notice, or empty where there is none.
    """

    case: str
    name: str
    edits: tuple[Edit, ...] = ()
    test: str = ""


_EVENT = "GaussianEvent(self.noise_multiplier, self.sampling_rate, self.steps,"
_NOISE = "noise.rounded_gaussian(scale, total.shape[0])"
_SUM = "self.to_grid(vectors).sum(axis=0, dtype=np.int64)"
_UNIT = "count, unit = (len(scale), np.arange(len(scale))) if units is None else (units[0], np.asarray(units[1]))"
_FINITE = "        finite = np.isfinite(vectors).all(axis=1, keepdims=True)\n"
_CLIP_SGD = "factors = torch.clamp(clip * _FLOAT32_MARGIN / norms.nan_to_num(0.0).clamp(min=1e-30), max=1.0)"
_NOISE_SGD = "noise.gaussian(self.noise_std / math.sqrt(shares), total.shape[0])"

EVERYONE = Edit(SPECS, "return noise.coins(self.sampling_rate, count)", "return np.ones(count, dtype=bool)")
UNCHECKED = Edit(
    SPECS,
    _FINITE,
    f"        return np.trunc(np.where(np.isfinite(vectors), vectors, 0.0) / self.grid).astype(np.int64)\n{_FINITE}",
)
"""The grid checks the norm too, and would keep the sensitivity alone."""

TEST_DEVIATION = "tests/privacy/test_mechanisms.py::test_model_sized_noise_has_the_spec_deviation"
TEST_DRAW = (
    "tests/privacy/test_mechanisms.py::test_rule_15_a_release_is_the_exact_integer_sum_plus_one_draw_a_coordinate"
)
TEST_EMPTY = "tests/privacy/test_dp_sgd.py::test_rule_5_an_empty_batch_still_adds_noise_and_every_step_counts"
TEST_NORM = "tests/privacy/test_replay.py::test_rule_3_clipped_gradients_at_weights_that_miss_a_record"
TEST_MEAN = "tests/privacy/test_dp_sgd.py::test_rule_13_the_mean_over_a_units_records_is_clipped"
TEST_UNIT = "tests/unit/test_mixing.py::test_responsibilities_are_the_mean_over_a_units_records"
TEST_DIVISOR = "tests/privacy/test_dp_sgd.py::test_rule_2_the_update_divides_by_the_public_expected_batch"
TEST_COORDINATES = "tests/privacy/test_mutation_gaps.py::test_rule_15_every_coordinate_of_a_release_gets_noise"
TEST_REPLAYS = "tests/privacy/test_audit_replays.py::test_rule_3_the_shipped_learners_hold_and_come_near_the_bound"
TEST_TARGET = "tests/privacy/test_mechanisms.py::test_rule_16_a_calibrated_spec_spends_at_most_its_target"


def _once(draw: str) -> str:
    """Return code that draws at the first step and gives the same numbers at all others."""
    return f'noise.__dict__.setdefault(("drawn", len(total)), {draw})'


BROKEN = (
    Broken("mixture", "as it is"),
    Broken(
        "mixture",
        "noise x 0.5",
        (Edit(SPECS, "scale = self.noise_multiplier * 2**", "scale = self.noise_multiplier / 2 * 2**"),),
        TEST_DRAW,
    ),
    Broken("mixture", "noise forgotten", (Edit(SPECS, f"total + {_NOISE}", "total"),), TEST_DRAW),
    Broken(
        "mixture",
        "noise drawn once and used in every step",
        (Edit(SPECS, _NOISE, _once(_NOISE)),),
        TEST_REPLAYS,
    ),
    Broken(
        "mixture",
        "noise on all coordinates but the first",
        (Edit(SPECS, _NOISE, f"{_NOISE} * (np.arange(len(total)) % 5 > 0)"),),
        TEST_COORDINATES,
    ),
    Broken(
        "mixture",
        "clip forgotten",
        (Edit(OBJECTIVE, "gradients * np.minimum(1.0, clip / np.maximum(norms, 1e-300))", "gradients"), UNCHECKED),
        TEST_NORM,
    ),
    Broken(
        "mixture",
        "clipped to 2 C",
        (Edit(OBJECTIVE, "np.minimum(1.0, clip / np.max", "np.minimum(1.0, 2 * clip / np.max"), UNCHECKED),
        TEST_NORM,
    ),
    Broken(
        "mixture",
        "records counted as units",
        (Edit(OBJECTIVE, _UNIT, "count, unit = len(scale), np.arange(len(scale))"),),
        TEST_UNIT,
    ),
    Broken(
        "mixture",
        "mean over the batch instead of the sum",
        (Edit(SPECS, _SUM, f"({_SUM} * self.expected_batch / max(1, len(vectors))).astype(np.int64)"),),
        TEST_DRAW,
    ),
    Broken(
        "mixture",
        "one step accounted of ten",
        (Edit(SPECS, _EVENT, _EVENT.replace("self.steps", "1")),),
        TEST_TARGET,
    ),
    Broken("mixture, sampled", "as it is"),
    Broken("mixture, sampled", "sampling without noise", (Edit(SPECS, f"total + {_NOISE}", "total"),), TEST_DRAW),
    Broken("mixture, sampled", "everyone in every step, accounted as sampled", (EVERYONE,), TEST_EMPTY),
    Broken("DP-SGD, sampled", "as it is"),
    Broken(
        "DP-SGD, sampled",
        "noise x 0.5",
        (Edit(SPECS, "return self.noise_multiplier * self.clip\n", "return self.noise_multiplier * self.clip / 2\n"),),
        TEST_DEVIATION,
    ),
    Broken("DP-SGD, sampled", "noise forgotten", (Edit(SPECS, f"total + {_NOISE_SGD}", "total"),), TEST_DEVIATION),
    Broken(
        "DP-SGD, sampled",
        "noise drawn once and used in every step",
        (Edit(SPECS, _NOISE_SGD, _once(_NOISE_SGD)),),
        TEST_EMPTY,
    ),
    Broken(
        "DP-SGD, sampled",
        "an empty batch skips its noise",
        (Edit(SPECS, f"return total + {_NOISE_SGD}", f"return total + {_NOISE_SGD} * total.any()"),),
        TEST_EMPTY,
    ),
    Broken(
        "DP-SGD, sampled", "clip forgotten", (Edit(SGD, _CLIP_SGD, "factors = torch.ones_like(norms)"),), TEST_MEAN
    ),
    Broken(
        "DP-SGD, sampled",
        "clipped to 2 C",
        (Edit(SGD, "torch.clamp(clip * _FLOAT32", "torch.clamp(2 * clip * _FLOAT32"),),
        TEST_MEAN,
    ),
    Broken(
        "DP-SGD, sampled",
        "records counted as units",
        (
            Edit(SGD, "self._unit = np.asarray(unit_index)", "self._unit = np.arange(len(features))"),
            Edit(
                SGD, "self.units, self.records_per_step = units,", "self.units, self.records_per_step = len(labels),"
            ),
        ),
        TEST_MEAN,
    ),
    Broken(
        "DP-SGD, sampled",
        "divided by the units that are there",
        (Edit(SGD, "released / spec.expected_batch)", "released / max(1.0, spec.sampling_rate * sums.units))"),),
        TEST_DIVISOR,
    ),
    Broken("DP-SGD, sampled", "everyone in every step, accounted as sampled", (EVERYONE,), TEST_EMPTY),
    Broken(
        "DP-SGD, sampled",
        "accounted at half the sampling rate",
        (Edit(SPECS, _EVENT, _EVENT.replace("sampling_rate", "sampling_rate / 2")),),
        TEST_TARGET,
    ),
)
