"""Mutants of charging, statements and rooms (rules 14, 18 to 21, 26)."""

from __future__ import annotations

from mutant import Mutant

LEDGER_FILE = "dpmixmin/privacy/ledger.py"
ACCESS = "dpmixmin/privacy/access.py"
LOG = "dpmixmin/privacy/log.py"
LEASE = "dpmixmin/privacy/lease.py"
ARTIFACTS = "dpmixmin/artifacts.py"
STATEMENT = "dpmixmin/privacy/statement.py"

TESTS = "tests/privacy/test_ledger.py"
PROCESSES = "tests/privacy/test_ledger_processes.py"
INTERRUPTED = "tests/privacy/test_interrupted.py"
JOINED = "tests/privacy/test_joined.py"

LEDGER = (
    Mutant(
        14,
        "a statement forgets the test seed",
        STATEMENT,
        '"stamp": PRIVATE_STAMP if private else NOT_PRIVATE_SEED',
        '"stamp": PRIVATE_STAMP',
        (f"{TESTS}::test_rule_14_a_test_seed_anywhere_in_the_chain_stamps_the_statement",),
    ),
    Mutant(
        18,
        "a committed release is drawn again",
        LEDGER_FILE,
        "found = self._take_over(key)",
        "found = self._take_over(key) and None",
        (f"{TESTS}::test_rule_18_a_committed_release_is_published_again_without_noise_and_without_an_entry",),
    ),
    Mutant(
        18,
        "a dead owner's stored output is forgotten",
        LEDGER_FILE,
        'if (self.root / "store" / key).exists():\n                    # The rename',
        "if False:\n                    # The rename",
        (f"{PROCESSES}::test_rule_18_killed_anywhere_the_count_is_right",),
    ),
    Mutant(
        18,
        "two processes work on one release at once",
        LEASE,
        "            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "            pass\n",
        (f"{PROCESSES}::test_rule_18_two_processes_that_ask_at_once_share_one_release",),
    ),
    Mutant(
        18,
        "another label is the same release",
        LEDGER_FILE,
        'identity = {**where, **made, "label": self.label, "code": purpose.code}',
        'identity = {**where, **made, "code": purpose.code}',
        (f"{TESTS}::test_rule_18_other_parts_split_key_or_label_are_other_releases",),
    ),
    Mutant(
        18,
        "a failed attempt leaves no trace",
        LEDGER_FILE,
        '        self.log.append({"event": "void", "entry": entry_id})\n',
        "",
        (f"{TESTS}::test_rule_18_an_exception_inside_voids_the_entry_and_a_retry_draws_afresh",),
    ),
    Mutant(
        18,
        "a process joins a release of other inputs",
        LEDGER_FILE,
        "if entry.key != key or not _same(entry, facts):",
        "if False:",
        (f"{JOINED}::test_rule_18_a_process_joins_only_the_release_it_was_started_for",),
    ),
    Mutant(
        18,
        "a state of other code or inputs is gone on from",
        LEDGER_FILE,
        'found.state == "reserved" and not _same(found, facts)',
        "False",
        (f"{JOINED}::test_rules_18_and_23_an_interrupted_release_of_other_code_or_inputs_is_begun_anew",),
    ),
    Mutant(
        18,
        "a process joins a release that is over",
        LEDGER_FILE,
        '        if entry.state != "reserved":\n            raise PermissionError(',
        "        if False:\n            raise PermissionError(",
        (f"{JOINED}::test_rule_18_nobody_joins_a_release_that_is_over",),
    ),
    Mutant(
        18,
        "any failure leaves a release to go on with",
        LEDGER_FILE,
        "resumable = isinstance(error, KeyboardInterrupt | SystemExit) or disk_failure(error) is not None",
        "resumable = True",
        ("tests/privacy/test_resume.py::test_rule_18_a_failed_mechanism_is_void_and_its_state_is_gone",),
    ),
    Mutant(
        18,
        "a lease's file that was removed is held",
        LEASE,
        "            if _is_at(handle, path):\n",
        "            if True:\n",
        ("tests/privacy/test_lease.py::test_a_lease_whose_file_is_removed_holds_one_owner_at_a_time",),
    ),
    Mutant(
        23,
        "a damaged state is gone on from",
        ACCESS,
        "if hashlib.sha256(state).digest() == expected:",
        "if True:",
        (f"{INTERRUPTED}::test_rule_23_the_newest_whole_state_is_gone_on_from",),
    ),
    Mutant(
        18,
        "an event may be altered",
        LOG,
        'continues = event["previous"] == self._last_hash() and',
        "continues =",
        (f"{TESTS}::test_an_altered_event_breaks_the_hash_chain_and_is_refused",),
    ),
    Mutant(
        18,
        "writers overwrite each other's events",
        LOG,
        "        os.link(temporary, path)\n",
        "        os.replace(temporary, path)\n        temporary.touch()\n",
        (f"{PROCESSES}::test_rule_18_eight_processes_append_under_exclusive_numbers",),
    ),
    Mutant(
        19,
        "private files for everybody",
        ARTIFACTS,
        "atomic.replacing(path, 0o600 if room_of(path) == PRIVATE else 0o644)",
        "atomic.replacing(path, 0o644)",
        (f"{TESTS}::test_rule_19_private_artefacts_are_0600_in_0700_and_named_by_a_random_id",),
    ),
    Mutant(
        19,
        "private folders for everybody",
        ARTIFACTS,
        "folder.chmod(0o700)",
        "folder.chmod(0o755)",
        (f"{TESTS}::test_rule_19_private_artefacts_are_0600_in_0700_and_named_by_a_random_id",),
    ),
    Mutant(
        20,
        "a private parent is named by its content",
        ACCESS,
        '"artifact": artifacts.verify(folder)["artifact"]}',
        '"sha256": artifacts.digest(artifacts.verify(folder)["files"])}',
        (f"{TESTS}::test_rule_19_private_artefacts_are_0600_in_0700_and_named_by_a_random_id",),
    ),
    Mutant(
        20,
        "a process that read records may write anywhere",
        ARTIFACTS,
        "if _writable_rooms is not None and room is not None",
        "if False and room is not None",
        (f"{TESTS}::test_rule_26_each_purpose_may_write_only_to_its_rooms",),
    ),
    Mutant(
        21,
        "aborted attempts are never charged",
        STATEMENT,
        "charged = [*entries, *(aborted if charge_aborted else [])]",
        "charged = [*entries]",
        (f"{TESTS}::test_rule_21_aborted_attempts_are_listed_and_charged_where_asked",),
    ),
    Mutant(
        26,
        "a closed access reads private tables",
        ARTIFACTS,
        'if room_of(path) == PRIVATE and not getattr(access, "is_open", False):',
        "if room_of(path) == PRIVATE and access is None:",
        (
            f"{TESTS}::test_rule_26_private_tables_are_read_through_an_open_access_only",
            f"{TESTS}::test_rule_26_whoever_holds_a_bare_access_object_of_a_closed_door_reads_nothing",
        ),
    ),
    Mutant(
        26,
        "an access shows the other parts too",
        ACCESS,
        'if "part" in table.column_names:',
        "if False:",
        (f"{TESTS}::test_rule_26_an_access_filters_out_the_other_parts",),
    ),
    Mutant(
        26,
        "who joins a release may write anywhere",
        LEDGER_FILE,
        "        artifacts.restrict(set())\n        access = Joined(frozenset(parts), split)\n",
        "        access = Joined(frozenset(parts), split)\n",
        (f"{JOINED}::test_rule_26_who_joins_reads_its_parts_and_writes_nothing",),
    ),
    Mutant(
        26,
        "opening again widens what may be written",
        ARTIFACTS,
        "_writable_rooms = rooms if _writable_rooms is None else _writable_rooms & rooms",
        "_writable_rooms = rooms",
        (f"{TESTS}::test_rule_26_opening_never_widens_what_a_process_may_write",),
    ),
)
