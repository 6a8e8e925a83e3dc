"""Mutants of deployments, PAC, resuming and adjacency (rules 11, 12, 18, 21 to 23, 26, 27)."""

from __future__ import annotations

from mutant import Mutant

LEDGER = "dpmixmin/privacy/ledger.py"
LOG = "dpmixmin/privacy/log.py"
STATEMENT = "dpmixmin/privacy/statement.py"
COMPOSITION = "dpmixmin/privacy/composition.py"
ACCESS = "dpmixmin/privacy/access.py"
DP_SGD = "dpmixmin/finetune/dp_sgd.py"
MECHANISMS = "dpmixmin/privacy/mechanisms.py"

DEPLOYED = "tests/privacy/test_deploy_ledger.py"
KEYS = "dpmixmin/privacy/keys.py"
PARTITION = "tests/privacy/test_partition.py"
PAC = "tests/privacy/test_pac.py"
RESUME = "tests/privacy/test_resume.py"
GOES_ON = (
    "tests/privacy/test_ranks_resume.py::"
    "test_rule_23_any_number_of_processes_goes_on_with_exactly_the_steps_that_are_left"
)
EVALUATION = "dpmixmin/evaluation.py"
EVALUATED = "tests/privacy/test_evaluation.py"
RELEASED = "tests/privacy/test_text_release.py"

DEPLOY = (
    Mutant(
        11,
        "a deployment's split key from the seed",
        KEYS,
        '        kept = self._kept()\n        return f"key={kept[\'id\']}", bytes.fromhex(kept["split"])',
        '        kept = {"id": str(seed), "split": hashlib.sha256(b"%d" % seed).hexdigest()}\n'
        '        return f"key={kept[\'id\']}", bytes.fromhex(kept["split"])',
        (f"{DEPLOYED}::test_rule_11_a_deployment_draws_its_keys_once_and_a_study_derives_them",),
    ),
    Mutant(
        11,
        "a partition's name does not say the unit and the ids",
        "dpmixmin/data/split.py",
        '    return f"{split_key}/{_rule(private)}/fractions={fractions}"',
        '    return f"{split_key}/fractions={fractions}"',
        ("tests/privacy/test_split.py::test_rule_11_whatever_deals_units_anew_gives_the_partition_another_name",),
    ),
    Mutant(
        11,
        "ids by content change with a column that is not used",
        "dpmixmin/data/loaders.py",
        "content = [row.tobytes() + value_bytes(owner) for row, owner in zip(numbers, owners, strict=True)]",
        "content = [repr(row).encode() for row in data.to_pylist()]",
        (f"{PARTITION}::test_rule_11_another_column_or_type_deals_nobody_anew",),
    ),
    Mutant(
        12,
        "a mechanism reads a table of another partition",
        ACCESS,
        "            if manifest.get(key) != value:",
        "            if False:",
        (f"{PARTITION}::test_rule_12_a_mechanism_reads_tables_of_its_own_partition_only",),
    ),
    Mutant(
        21,
        "a study spends past a deployment's cap",
        KEYS,
        "    if not deploy:\n        raise UserError(",
        "    if False:\n        raise UserError(",
        (f"{PARTITION}::test_rule_21_a_deployment_is_held_to_its_mode_and_its_unit",),
    ),
    Mutant(
        21,
        "guarantees for different units are added up",
        STATEMENT,
        "    if len(units) > 1:",
        "    if False:",
        (f"{PARTITION}::test_rule_21_a_statement_never_adds_up_what_protects_different_units",),
    ),
    Mutant(
        18,
        "the cap looks at the new release alone",
        LEDGER,
        "together, _ = total([entry.touch() for entry in [*before, new]], self.cap.delta)",
        "together, _ = total([new.touch()], self.cap.delta)",
        (f"{DEPLOYED}::test_rule_18_a_release_over_the_cap_is_refused_before_it_is_reserved_and_says_what_used_it",),
    ),
    Mutant(
        18,
        "the cap is checked once, before the race",
        LOG,
        "            if check is not None:\n                check(events)\n",
        "            if check is not None:\n                check(events)\n                check = None\n"
        "                time.sleep(0.2)\n",
        (f"{DEPLOYED}::test_rule_18_of_releases_that_race_for_the_last_budget_one_wins",),
    ),
    Mutant(
        18,
        "changed inputs publish the old output",
        LEDGER,
        'if done.facts["inputs_digest"] != facts["inputs_digest"]:',
        "if False:",
        (f"{DEPLOYED}::test_rule_18_in_deploy_changed_inputs_need_a_new_label",),
    ),
    Mutant(
        18,
        "in deploy an edit of code is a second release",
        LEDGER,
        'identity = {**where, "label": self.label}',
        'identity = {**where, "label": self.label, "code": purpose.code}',
        (f"{DEPLOYED}::test_rule_18_in_deploy_an_edit_of_code_publishes_the_old_output",),
    ),
    Mutant(
        18,
        "the log's last event may be altered",
        LOG,
        'elif self._hashes[number - 1] != head["sha256"]:',
        "elif False:",
        (f"{DEPLOYED}::test_rule_18_altering_or_losing_the_last_event_is_seen",),
    ),
    Mutant(
        21,
        "releases still running do not count",
        LEDGER,
        'return [entry for entry in entries if self.charge_aborted or entry.state != "void"]',
        'return [entry for entry in entries if self.charge_aborted or entry.state == "committed"]',
        (f"{DEPLOYED}::test_running_entries_count_and_aborted_ones_where_they_are_charged",),
    ),
    Mutant(
        22,
        "PAC entries pass for no cost",
        STATEMENT,
        'return any(event["kind"] == "pac" for event in entry["events"])',
        "return False",
        (PAC,),
    ),
    Mutant(
        22,
        "DP spent beside PAC is stated for the same units",
        COMPOSITION,
        "touches = [Touch(t.events, t.parts - without, t.split) for t in touches if t.parts - without]",
        "touches = list(touches)",
        (f"{PAC}::test_rule_22_dp_spent_on_units_that_a_pac_step_reads_is_no_guarantee",),
    ),
    Mutant(
        22,
        "mutual information of several releases does not add up",
        STATEMENT,
        "sum(event.mutual_information for event in events)",
        "max(event.mutual_information for event in events)",
        (f"{PAC}::test_rule_22_mutual_information_adds_up_per_subset_and_never_meets_an_accountant",),
    ),
    Mutant(
        22,
        "a cap on DP is met by PAC",
        "dpmixmin/privacy/totals.py",
        "        return math.inf  # DP says",
        "        return 0.0  # DP says",
        (f"{PAC}::test_rule_22_mutual_information_adds_up_per_subset_and_never_meets_an_accountant",),
    ),
    Mutant(
        23,
        "a resumed run makes all steps again",
        DP_SGD,
        "for step in range(done, spec.steps):",
        "for step in range(spec.steps):",
        (f"{RESUME}::test_rule_23_resumed_twice_makes_exactly_the_spec_s_steps",),
    ),
    Mutant(
        23,
        "a resumed run makes one step more",
        DP_SGD,
        "for step in range(done, spec.steps):",
        "for step in range(max(0, done - 1), spec.steps):",
        (f"{RESUME}::test_rule_23_resumed_twice_makes_exactly_the_spec_s_steps",),
    ),
    Mutant(
        23,
        "a resumed run forgets its weights",
        DP_SGD,
        "        networks.load_bytes(sums.model, state)\n",
        "        pass\n",
        (f"{RESUME}::test_rule_23_resumed_twice_makes_exactly_the_spec_s_steps",),
    ),
    Mutant(
        23,
        "a run that lost a process skips a step",
        DP_SGD,
        "progress.save(step, ",
        "progress.save(step + 1, ",
        (GOES_ON,),
    ),
    Mutant(
        23,
        "a stopped run makes its last step twice",
        DP_SGD,
        "progress.save(step + 1, ",
        "progress.save(step, ",
        (GOES_ON,),
    ),
    Mutant(
        23,
        "only the leader goes on from the state",
        DP_SGD,
        "found = ranks.led(load)",
        "found = load()",
        (GOES_ON,),
    ),
    Mutant(
        23,
        "an interrupted run is void though its state goes on",
        LEDGER,
        "elif not self.progress(entry.id).exists():",
        "else:",
        (f"{RESUME}::test_rule_23_an_interrupted_mechanism_keeps_its_entry",),
    ),
    Mutant(
        26,
        "a deployment may look without charge",
        LEDGER,
        "            if self.cap is not None:\n                raise PermissionError(",
        "            if False:\n                raise PermissionError(",
        (f"{DEPLOYED}::test_rule_26_a_deployment_measures_nothing_without_charge",),
    ),
    Mutant(
        27,
        "statements give the adjacency that was asked for",
        COMPOSITION,
        '        "epsilon": epsilons[ADD_REMOVE],',
        '        "epsilon": max(epsilons.values()),',
        ("tests/privacy/test_ledger.py",),
    ),
    Mutant(
        27,
        "responsibilities are replaced at the cost of removal",
        MECHANISMS,
        "    replace_factor: ClassVar[float] = math.sqrt(2.0)",
        "    replace_factor: ClassVar[float] = 1.0",
        ("tests/privacy/test_mechanisms.py::test_rule_27_the_adjacency_changes_the_sensitivity_and_the_noise",),
    ),
    Mutant(
        3,
        "a user's loss per token is not clipped",
        EVALUATION,
        "np.clip(loss[usable] / tokens[usable], 0, bound) / bound",
        "loss[usable] / tokens[usable] / bound",
        (f"{EVALUATED}::test_rule_3_a_users_vector_has_a_norm_of_at_most_one_whatever_the_model_says",),
    ),
    Mutant(
        6,
        "a user with a score that is not finite counts in the evaluation",
        EVALUATION,
        "    usable[index[~finite]] = False\n",
        "",
        (f"{EVALUATED}::test_rule_3_one_user_moves_the_evaluation_of_texts_by_at_most_one",),
    ),
    Mutant(
        13,
        "in the evaluation of texts, a user counts by its tokens",
        EVALUATION,
        "    rows[usable, 1] = 1.0\n    return rows / math.sqrt(TEXT_BLOCKS)",
        "    rows[usable, 1] = 1.0\n    return rows * (tokens / max(tokens))[:, None] / math.sqrt(TEXT_BLOCKS)",
        (f"{EVALUATED}::test_rule_13_a_user_counts_once_however_many_records_it_has",),
    ),
    Mutant(
        20,
        "a bundle names the file that lists the private images",
        "dpmixmin/release/derive.py",
        "if table[key] is not None:",
        'if table[key] is not None and key != "table":',
        (f"{RELEASED}::test_rule_20_a_public_config_withholds_every_private_place_and_is_a_config",),
    ),
    Mutant(
        21,
        "a model card may say what it likes",
        "dpmixmin/release/language_model.py",
        "if files[CARD] != card(config, privacy, files):",
        "if False:",
        (f"{RELEASED}::test_a_file_that_an_expert_swapped_is_refused",),
    ),
    Mutant(
        25,
        "users are scored in common batches",
        "dpmixmin/models/scoring.py",
        "for start, stop in pairwise(edges):",
        "for start, stop in [(0, len(records))]:",
        (f"{EVALUATED}::test_rule_25_the_last_bits_of_a_users_scores_depend_on_that_user_alone",),
    ),
)
