"""Accounting events: validation, and JSON without loss."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpmixmin.privacy.events import ADJACENCIES, GaussianEvent, PureEvent, RepeatSelectEvent, from_json, to_json

GAUSSIAN = GaussianEvent(1.2, 0.03, 30)
PURE = PureEvent(0.5, 1.0)

gaussians = st.builds(
    GaussianEvent,
    st.floats(1e-3, 1e6),
    st.floats(1e-9, 1.0),
    st.integers(1, 10**6),
    st.floats(1.0, 2.0),
)
pures = st.builds(PureEvent, st.floats(1e-6, 50), st.floats(1e-6, 100))
repeats = st.builds(
    RepeatSelectEvent,
    st.lists(st.one_of(gaussians, pures), min_size=1, max_size=3).map(tuple),
    st.floats(1.01, 1e4),
    st.one_of(st.just(math.inf), st.floats(0, 10)),
    st.floats(1e-15, 0.5),
)


@given(st.one_of(gaussians, pures, repeats))
def test_every_event_survives_json_unchanged(event):
    text = json.dumps(to_json(event), allow_nan=False)
    assert from_json(json.loads(text)) == event
    assert hash(from_json(json.loads(text))) == hash(event)


def test_adjacencies_have_three_names():
    assert ADJACENCIES == ("add_remove", "replace_one", "zero_out")


def test_events_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GAUSSIAN.steps = 1


@pytest.mark.parametrize(
    "arguments",
    [
        (0.0, 0.1, 1),
        (-1.0, 0.1, 1),
        (math.inf, 0.1, 1),
        (math.nan, 0.1, 1),
        (1.0, 0.0, 1),
        (1.0, 1.1, 1),
        (1.0, math.nan, 1),
        (1.0, 0.1, 0),
        (1.0, 0.1, 1.5),
        (1.0, 0.1, True),
        ("1", 0.1, 1),
        (1.0, 0.1, 1, 0.9),
        (1.0, 0.1, 1, 2.1),
        (1.0, 0.1, 1, math.nan),
    ],
)
def test_gaussian_events_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError, match="GaussianEvent needs"):
        GaussianEvent(*arguments)


@pytest.mark.parametrize("arguments", [(0.0, 1.0), (1.0, 0.0), (math.inf, 1.0), (1.0, math.nan), (None, 1.0)])
def test_pure_events_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError, match="PureEvent needs"):
        PureEvent(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ((), 10.0, 1.0, 1e-6),
        ([GAUSSIAN], 10.0, 1.0, 1e-6),
        ((RepeatSelectEvent((PURE,), 2.0, 1.0, 1e-6),), 10.0, 1.0, 1e-6),
        ((GAUSSIAN,), 1.0, 1.0, 1e-6),
        ((GAUSSIAN,), 0.5, math.inf, 1e-6),
        ((GAUSSIAN,), math.inf, 1.0, 1e-6),
        ((GAUSSIAN,), 10.0, -0.5, 1e-6),
        ((GAUSSIAN,), 10.0, math.nan, 1e-6),
        ((GAUSSIAN,), 10.0, 1.0, 0.0),
        ((GAUSSIAN,), 10.0, 1.0, 1.0),
    ],
)
def test_repeat_select_events_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError, match="RepeatSelectEvent needs"):
        RepeatSelectEvent(*arguments)


@pytest.mark.parametrize(
    "change",
    [{"kind": "laplace"}, {"kind": None}, {"extra": 1}, {"steps": 0}],
)
def test_json_of_no_known_event_is_refused(change):
    with pytest.raises(ValueError, match=r"kind|needs"):
        from_json({**to_json(GAUSSIAN), **change})


def test_json_that_lacks_a_field_is_refused():
    values = to_json(GAUSSIAN)
    del values["replace_factor"]
    with pytest.raises(ValueError, match="fields"):
        from_json(values)
