"""Turning a validation error into one line that a user can act on: key, value, fix."""

from __future__ import annotations

import difflib
import json
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


def model_in(annotation: Any) -> Any:
    """Find the config model inside an annotation such as ``dict[str, LabelRule]``; of a union, a dict by kind."""
    found, stack = [], [annotation]
    while stack:
        item = stack.pop()
        if isinstance(item, type) and issubclass(item, BaseModel):
            found.append(item)
        stack += get_args(item)
    if len(found) == 1:
        return found[0]
    return {get_args(model.model_fields["kind"].annotation)[0]: model for model in found} or None


def _model_at(root: Any, location: tuple) -> Any:
    """Follow pydantic's location of an error to the model there, or None."""
    model = root
    for step in location:
        if isinstance(model, dict):
            model = model.get(step)
        elif step in model.model_fields:
            model = model_in(model.model_fields[step].annotation)
        # Otherwise the step is a name that the user chose (axes.three) or a list's index: the model stays.
        if model is None:
            return None
    return None if isinstance(model, dict) else model


def _keys(root: Any, location: tuple) -> tuple:
    """Return a location without discriminators' choices ("idx", "text"), which are no keys of the user's."""
    return tuple(step for i, step in enumerate(location) if not _is_choice(root, location[:i], step))


def _is_choice(root: Any, before: tuple, step: Any) -> bool:
    model: Any = root
    for one in before:
        if isinstance(model, dict):
            model = model.get(one)
        elif model is not None and one in model.model_fields:
            model = model_in(model.model_fields[one].annotation)
    return isinstance(model, dict) and step in model


def _help_of(root: Any, location: tuple) -> str:
    """Return the help text of the innermost key of a location that has one."""
    for end in range(len(location), 0, -1):
        model = _model_at(root, location[: end - 1])
        if model is not None and location[end - 1] in model.model_fields:
            return model.model_fields[location[end - 1]].description
    return "it has no default"


def _kinds_at(root: Any, location: tuple) -> str:
    """Name the kinds that may stand at a location: ``idx, images or parquet``."""
    model: Any = root
    for step in location:
        if not isinstance(model, dict) and step in model.model_fields:
            model = model_in(model.model_fields[step].annotation)
    *some, last = sorted(model)
    return f"{', '.join(some)} or {last}" if some else last


_FIXES = {
    "missing": "add it",
    "int_parsing": "write a whole number",
    "int_from_float": "write a whole number",
    "int_type": "write a whole number",
    "float_parsing": "write a number",
    "float_type": "write a number",
    "string_type": "write text",
    "bool_parsing": "write true or false",
    "tuple_type": "write a list: [a, b]",
    "dict_type": "write `key: value` lines",
    "model_type": "write `key: value` lines",
    "finite_number": "write a finite number",
}


def explain(error: ValidationError, root: type[BaseModel]) -> str:
    """Turn the first problem of a validation error into one line: key, value, fix.

    Args:
        error: what pydantic found.
        root: the model that was validated.
    """
    # A misspelt key is often missing under its right name too: the misspelling is the better news.
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    location = _keys(root, first["loc"])
    key = ".".join(str(step) for step in location) or "config"
    kind, value = first["type"], first.get("input")
    if kind == "extra_forbidden":
        known = list(_model_at(root, first["loc"][:-1]).model_fields)
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.5)
        fix = f"did you mean `{near[0]}`?" if near else f"remove it; known keys: {', '.join(known)}"
        return f"{key}: unknown key; {fix}"
    if kind == "missing":
        return f"{key}: missing; add it ({_help_of(root, first['loc'])})"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return (
            f"{key}.kind: {json.dumps((value or {}).get('kind'))} is not valid; write {_kinds_at(root, first['loc'])}"
        )
    if kind == "string_pattern_mismatch":
        return f"{key}: {json.dumps(value)} is not valid; use letters, digits and _, starting with a letter"
    if kind == "value_error":
        where = f"{key}: " if location else ""
        return where + first["msg"].removeprefix("Value error, ")
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"{key}: {shown} is not valid: {message}; {_FIXES.get(kind) or _help_of(root, first['loc'])}"
