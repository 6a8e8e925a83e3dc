"""The real rule graph of every shipped config: no path leads from private data to a release except a mechanism."""

from __future__ import annotations

import ast
import re
from html import unescape
from pathlib import Path

import pytest
from checkout import ROOT, Checkout

from dpmixmin.__main__ import PRIVATE_STAGES
from dpmixmin.paths import PRIVATE, PUBLIC, RELEASED, STUDY, room_of
from dpmixmin.provenance import PACKAGE, code_of

MECHANISM_RULES = ("mix_", "finetune_", "evaluate_private")
"""Rules whose stage opens private tables as a mechanism; test_mechanism_stages_reserve proves that they do."""

CONFIGS = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "config").rglob("*.yaml"))


def rule_graph(checkout: Checkout, config: str) -> dict[str, tuple[set[str], set[str]]]:
    """Return rule name to (inputs, outputs) as Snakemake itself reports them."""
    text = checkout.snakemake("all", "--filegraph", config=config).stdout
    graph: dict[str, tuple[set[str], set[str]]] = {}
    for node in re.findall(r"label ?= ?<(<table.*?</table>)>", text, re.S):
        name = re.search(r'<font point-size="18">(.*?)</font>', node)[1]
        inputs, outputs = set(), set()
        marker = None
        for token in re.findall(r"(input|output)</font>|monospace\">(.*?)</font>", node):
            if token[0]:
                marker = token[0]
            elif marker == "input":
                inputs.add(unescape(token[1]))
            elif marker == "output":
                outputs.add(unescape(token[1]))
        graph[name] = (inputs, outputs)
    return graph


def problems(graph: dict[str, tuple[set[str], set[str]]]) -> list[str]:
    """Return every edge that lets a label fall without a mechanism."""
    found = []
    for rule, (inputs, outputs) in graph.items():
        rooms = {room_of(path) for path in inputs} - {None}
        for path in outputs:
            room = room_of(path)
            if room is None:
                continue
            if PRIVATE in rooms and room == PUBLIC:
                found.append(f"{rule}: private -> public")
            if PRIVATE in rooms and room == RELEASED and not rule.startswith(MECHANISM_RULES):
                found.append(f"{rule}: private -> released without a mechanism")
            if STUDY in rooms and room in (PUBLIC, RELEASED):
                found.append(f"{rule}: study -> {room}")
            if RELEASED in rooms and room == PUBLIC:
                found.append(f"{rule}: released -> public")
    return sorted(set(found))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory) -> Checkout:
    checkout = Checkout.fresh(tmp_path_factory.mktemp("labels") / "checkout")
    (checkout.path / "data/enron/maildir").mkdir(parents=True)  # where config/paper/enron.yaml expects its mail
    return checkout


@pytest.mark.parametrize("config", CONFIGS)
def test_no_label_falls_without_a_mechanism(fresh, config):
    graph = rule_graph(fresh, config)
    rooms = {room_of(path) for inputs, outputs in graph.values() for path in inputs | outputs}
    expected = {PUBLIC, PRIVATE, RELEASED} | (set() if "deploy" in config else {STUDY})
    assert expected == rooms - {None}, "the graph was not read, or a deployment has a study room"
    mechanisms = [rule for rule, (inputs, _) in graph.items() if rule.startswith("mix_") and inputs]
    assert mechanisms
    assert problems(graph) == []


def test_the_walk_sees_a_leak(fresh):
    graph = rule_graph(fresh, "config/test.yaml")
    leak = {"predict": ({"results/mini/private/a"}, {"results/mini/released/b"})}
    assert problems({**graph, **leak}) == ["predict: private -> released without a mechanism"]
    graph["make_report"][1].add("results/mini/public/page.html")
    assert "make_report: study -> public" in problems(graph)


def purposes(stage: str) -> set[str]:
    """Return the purposes with which a stage, or code that it uses, calls ``open`` on a ledger."""
    files = [path for path in code_of(stage) if path.parent.name != "privacy"]
    source = "\n".join(path.read_text() for path in files)
    return {name for name in ("Derive", "Study", "Mechanism") if re.search(rf"(?<!class )\b{name}\(", source)}


def test_mechanism_stages_reserve_and_no_other_stage_may_release():
    """By all the code that a stage uses, so that shared runners count too."""
    stages = {path.stem for path in (PACKAGE / "stages").glob("*.py")} - {"__init__"}
    opens = {stage: purposes(stage) for stage in stages}
    assert opens["mix"] == {"Mechanism", "Study"}
    for prefix in ("", "text_"):
        assert opens[f"{prefix}finetune"] == {"Mechanism"}
        assert opens[f"{prefix}evaluate"] == {"Study"}
        assert opens[f"{prefix}evaluate_private"] == {"Mechanism"}
        assert all(opens[f"{prefix}{stage}"] == {"Derive"} for stage in ("records", "predict"))
    assert opens["split"] == {"Derive"}
    audits = {f"audit_{name}" for name in ("mixture", "training", "membership", "replay")}
    assert all(opens[stage] == {"Study"} for stage in audits)
    names = {"finetune", "evaluate", "evaluate_private", "records", "predict"}
    private = {"mix", "split", *audits, *names, *(f"text_{name}" for name in names)}
    assert private == PRIVATE_STAGES
    assert all(not opens[stage] for stage in stages - private)


def _calls(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            found.add(ast.unparse(node.func))
    return found


def test_only_the_ledger_reads_private_tables():
    """Rule 26, the static half: Parquet is read in one function, and sources by the loaders alone."""
    readers = {"pq.read_table", "pl.read_parquet", "pl.scan_parquet", "polars.read_parquet", "np.load", "pickle.load"}
    allowed = {"artifacts.py": {"pq.read_table"}, "loaders.py": {"pq.read_table"}}
    for path in PACKAGE.rglob("*.py"):
        assert _calls(path) & readers <= allowed.get(path.name, set()), path
    users = {path.name for path in PACKAGE.rglob("*.py") if "load_private" in " ".join(_calls(path))}
    assert users == {"records.py", "text_records.py"}


def test_private_code_never_uses_a_global_generator():
    """Rule 14, the static half: no seed and no global stream in anything a mechanism's stage imports privately.

    A generator of one's own, named in the call, is no global stream (public examples for the gradient check).
    """
    banned = re.compile(
        r"^(np\.random|numpy\.random|random|torch\.(manual_seed|rand|randn|randint|normal|bernoulli)$)"
    )
    folders = ("privacy", "mixing", "finetune", "data", "models")
    files = [path for folder in folders for path in (PACKAGE / folder).glob("*.py")]
    stages = ("mix", "finetune", "evaluate_private", "text_finetune", "text_evaluate_private")
    files += [PACKAGE / f"stages/{stage}.py" for stage in stages]
    found = {}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if banned.match(name) and not any(keyword.arg == "generator" for keyword in node.keywords):
                found.setdefault(path.name, set()).add(name)
    for stage in stages:
        assert not any(path.parent.name == "audit" for path in code_of(stage)), stage
    # An audit draws canaries and the coins that decide about them: public, from seeded generators of its own.
    for path in (PACKAGE / "audit").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if banned.match(text):
                assert re.fullmatch(r"np\.random\.default_rng(\(.+\)\.choice)?", text), path
                assert node.args, f"{path}: a generator without a seed"
    # The public initialisation of a network, and the check of gradients on public examples; both leave it as it was.
    assert found == {"networks.py": {"torch.manual_seed"}, "language.py": {"torch.manual_seed"}}, found


@pytest.mark.parametrize("stage", ["records", "split", "mix", "report", "fetch"])
def test_stages_that_need_only_arrays_import_no_torch(stage):
    """At module level: the noise of a model imports it where it is drawn (tests/privacy/test_noise.py)."""
    for path in code_of(stage):
        for node in ast.parse(path.read_text()).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not any(name.split(".")[0] in ("torch", "opacus", "transformers") for name in names), path


def test_the_rules_page_names_tests_that_exist_and_every_rule_that_the_code_names():
    text = (ROOT / "docs/rules.md").read_text()
    listed = {int(number) for number in re.findall(r"^\| (\d+) \|", text, re.M)}
    for row in re.findall(r"^\| \d+ \|.*\| (.*) \|$", text, re.M):
        folder = ""
        for name in re.findall(r"`([^`]+\.py)`", row):
            folder = name.rpartition("/")[0] or folder
            assert (ROOT / folder / Path(name).name).is_file(), name
    used = set()
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        for found in re.findall(r"\brules? (\d+)(?:(?:,| and| to) (\d+))?", path.read_text(), re.I):
            used |= {int(number) for number in found if number}
    assert used <= listed, used - listed
