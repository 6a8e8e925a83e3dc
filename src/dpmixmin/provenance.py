"""Which first-party code a stage uses: the inputs that make an edit rerun it, and the digest in a study's store key.

Snakemake sees neither an edit in an imported package nor what a stage imports, so the closure is read from the
source: every ``dpmixmin`` import, at any depth of a module, starting at ``stages/{stage}.py``. Left out are the config
(help texts; its values are tracked as params), and what decides neither a value nor a draw: how cells are packed into
jobs, progress lines, when a signal stops a process.
"""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
_LEFT_OUT = {
    *("config", "section", "sections", "table_sections", "text_sections", "compute_section"),
    *("jobs", "progress", "interrupt"),
    *("explain", "provenance", "__main__", "__init__"),
}


def code_of(stage: str) -> list[Path]:
    """Return the source files that a stage uses, sorted."""
    todo, seen = [f"stages.{stage}"], set()
    while todo:
        module = todo.pop()
        if module in seen or module in _LEFT_OUT:
            continue
        seen.add(module)
        todo += _imports(module)
    return sorted(_file(module) for module in seen)


def code_digest(stage: str) -> str:
    """Return a short hash of the code that a stage uses."""
    whole = hashlib.sha256()
    for path in code_of(stage):
        whole.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return whole.hexdigest()[:16]


def made(config: dict, stages: tuple[str, ...]) -> dict:
    """Say how private inputs were made, for a store key: their config and the code of the stages that made them."""
    return {"config": config, "code": {stage: code_digest(stage) for stage in stages}}


@cache
def _imports(module: str) -> list[str]:
    """Return the first-party modules that a module imports, named below the package."""
    found = []
    for node in ast.walk(ast.parse(_file(module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            inside = name.removeprefix("dpmixmin.")
            if inside != name and (PACKAGE / (inside.replace(".", "/") + ".py")).is_file():
                found.append(inside)
    return found


def _file(module: str) -> Path:
    return PACKAGE / (module.replace(".", "/") + ".py")
