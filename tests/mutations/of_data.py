"""Mutants of how records are read, named and dealt to parts (rules 5, 6, 9 to 13, 20, 25, 26)."""

from __future__ import annotations

from mutant import Mutant

MAIN = "dpmixmin/__main__.py"
IMAGES = "dpmixmin/data/images.py"
LOADERS = "dpmixmin/data/loaders.py"
RECORDS = "dpmixmin/data/records.py"
SPLIT = "dpmixmin/data/split.py"
TEXTS = "dpmixmin/data/texts.py"
STANDINS = "dpmixmin/tuning/standins.py"
RANKS = "dpmixmin/ranks.py"

TEST_SPLIT = "tests/privacy/test_split.py"
TEST_DATA = "tests/unit/test_data.py"
TEST_LEAKS = "tests/privacy/test_leaks.py"
TEST_TEXT_UNITS = "tests/privacy/test_text_units.py"
TEST_TUNING = "tests/unit/test_tuning.py"
TEST_GAPS = "tests/privacy/test_mutation_gaps.py"

ROWS_OF_A_FILE = f"{TEST_SPLIT}::test_rule_11_deleting_a_row_of_the_parquet_file_moves_no_other_record"
PERSONS = f"{TEST_SPLIT}::test_rules_11_12_25_removing_a_person_leaves_every_record_of_the_others_untouched"
NUMBER = '        number = int.from_bytes(hmac.digest(key, unit.encode(), "sha256")[:8], "big") / 2**64\n'

DATA = (
    Mutant(
        5,
        "an empty sensitive table is an error",
        LOADERS,
        "    units = raw.unit if raw.unit is not None else",
        '    if not len(raw.features):\n        raise UserError("no rows")\n'
        "    units = raw.unit if raw.unit is not None else",
        (f"{TEST_DATA}::test_rule_5_an_empty_private_table_is_a_table",),
    ),
    Mutant(
        6,
        "missing values become zero, not missing",
        LOADERS,
        "return np.clip(scaled, -inputs.bound, inputs.bound)",
        "return np.clip(np.nan_to_num(scaled), -inputs.bound, inputs.bound)",
        (f"{TEST_DATA}::test_rule_6_bad_private_values_stay_nan_or_are_clamped_and_their_rows_stay",),
    ),
    Mutant(
        9,
        "settings are tested on the records they were trained on",
        STANDINS,
        "pool, test = order[:pool_size], order[pool_size:]",
        "pool, test = order[:pool_size], order",
        (
            f"{TEST_TUNING}::test_stand_ins_have_the_nominal_sizes_and_parts_that_do_not_meet",
            f"{TEST_TUNING}::test_few_stand_ins_are_drawn_again_but_never_tested_on",
        ),
    ),
    Mutant(
        9,
        "stand-ins drawn twice feed both mechanisms",
        STANDINS,
        "finetune = generator.choice(pool[cut:], sizes[1])",
        "finetune = generator.choice(pool, sizes[1])",
        (f"{TEST_TUNING}::test_few_stand_ins_are_drawn_again_but_never_tested_on",),
    ),
    Mutant(
        10,
        "label columns that are all zero are left out",
        RECORDS,
        "        names = sorted(self.labels)\n        flat",
        "        names = sorted(name for name, values in self.labels.items() if values.any())\n        flat",
        (f"{TEST_SPLIT}::test_rule_10_the_only_record_of_a_class_leaves_the_shapes_as_they_are",),
    ),
    Mutant(
        10,
        "the width comes from the sensitive rows",
        LOADERS,
        "columns.append(_lists(data[name], name, path, width, alone=len(names) == 1))",
        "columns.append(_lists(data[name], name, path, None, alone=len(names) == 1))",
        (
            f"{TEST_LEAKS}::test_rule_5_an_empty_private_table_of_lists_has_the_public_width",
            f"{TEST_LEAKS}::test_rule_20_a_private_list_of_another_length_is_no_error_but_contributes_zero",
        ),
    ),
    Mutant(
        11,
        "ids from row numbers",
        LOADERS,
        '        identity = hmac.digest(key, content, "sha256")\n',
        '        identity = hmac.digest(key, b"%d" % len(ids), "sha256")\n',
        (ROWS_OF_A_FILE,),
    ),
    Mutant(
        11,
        "equal rows numbered through the whole file",
        LOADERS,
        "occurrence = seen.get(identity, 0)",
        "occurrence = len(ids)",
        (ROWS_OF_A_FILE,),
    ),
    Mutant(
        11,
        "ids without a key",
        LOADERS,
        'return hmac.new(key, purpose + b"\\0" + value, hashlib.sha256).hexdigest()[:32]',
        'return hashlib.sha256(purpose + b"\\0" + value).hexdigest()[:32]',
        (f"{TEST_GAPS}::test_rule_11_ids_of_columns_and_units_are_keyed",),
    ),
    Mutant(
        11,
        "parts by rank among the units",
        SPLIT,
        NUMBER,
        "        number = sorted(set(units.tolist())).index(unit) / len(set(units.tolist()))\n",
        (f"{TEST_SPLIT}::test_rule_11_removing_any_unit_moves_nobody",),
    ),
    Mutant(
        11,
        "parts by a seeded permutation",
        SPLIT,
        "    cache: dict[str, int] = {}\n    for unit in set(units.tolist()):\n" + NUMBER,
        "    cache: dict[str, int] = {}\n"
        "    order = np.random.default_rng(list(key)).permutation(len(set(units.tolist())))\n"
        "    for unit, place in zip(sorted(set(units.tolist())), order, strict=True):\n"
        "        number = place / len(order)\n",
        (f"{TEST_SPLIT}::test_rule_11_removing_any_unit_moves_nobody",),
    ),
    Mutant(
        11,
        "parts without a key",
        SPLIT,
        "hmac.digest(key, unit.encode(),",
        'hmac.digest(b"", unit.encode(),',
        (f"{TEST_SPLIT}::test_rule_11_the_part_depends_on_id_and_key_alone",),
    ),
    Mutant(
        12,
        "each record of a unit is dealt by itself",
        SPLIT,
        "names[[cache[unit] for unit in units.tolist()]]",
        "names[[(cache[unit] + i % 2) % 4 for i, unit in enumerate(units.tolist())]]",
        (f"{TEST_SPLIT}::test_rule_12_each_unit_is_in_exactly_one_part",),
    ),
    Mutant(
        12,
        "parts are joined by the beginning of an id",
        SPLIT,
        "    return records.take(np.isin(records.unit, members))\n",
        "    return records.take(np.isin([name[:1] for name in records.unit], [name[:1] for name in members]))\n",
        (f"{TEST_LEAKS}::test_rule_12_parts_are_joined_by_unit_although_record_ids_repeat_across_patients",),
    ),
    Mutant(
        12,
        "a JSON line without the unit's key is a unit of its own",
        TEXTS,
        "                if all(name in found for name in ids):\n",
        "                if True:\n",
        (f"{TEST_TEXT_UNITS}::test_rule_12_a_json_line_without_unit_or_id_is_left_out_never_a_unit_of_its_own",),
    ),
    Mutant(
        12,
        "a number and its text are two people in JSON lines",
        TEXTS,
        "        [as_id(row[unit]) for row in rows] if unit else None,\n",
        "        [row[unit] for row in rows] if unit else None,\n",
        (f"{TEST_TEXT_UNITS}::test_rule_12_values_of_json_lines_are_compared_as_text",),
    ),
    Mutant(
        12,
        "a unit's records are dealt to several processes",
        RANKS,
        "rows = np.flatnonzero(unit_index % self.world == self.rank)",
        "rows = np.arange(self.rank, len(unit_index), self.world)",
        ("tests/privacy/test_ranks.py::test_rule_12_every_unit_belongs_to_one_rank_with_all_its_records",),
    ),
    Mutant(
        12,
        "processes read different tables",
        "dpmixmin/finetune/charged.py",
        "ranks.check(same=names.encode(), ",
        "ranks.check(same=bytes(64), ",
        ("tests/privacy/test_ranks_resume.py::test_rule_12_processes_that_see_different_tables_do_not_train",),
    ),
    Mutant(
        12,
        "every process trains on all units",
        "dpmixmin/finetune/charged.py",
        "ranks.own(split.open_part(access, paths, wanted, cell.seed))",
        "split.open_part(access, paths, wanted, cell.seed)",
        ("tests/privacy/test_ranks_resume.py::test_rule_12_a_process_builds_its_sums_over_its_own_units",),
    ),
    Mutant(
        13,
        "no cap on a unit's records",
        LOADERS,
        "return records.take(rank < private.max_records_per_unit)",
        "return records",
        (f"{TEST_SPLIT}::test_rule_13_a_unit_keeps_at_most_its_cap_chosen_by_that_unit_alone",),
    ),
    Mutant(
        13,
        "one record above the cap",
        LOADERS,
        "rank < private.max_records_per_unit",
        "rank <= private.max_records_per_unit",
        (f"{TEST_SPLIT}::test_rule_13_a_unit_keeps_at_most_its_cap_chosen_by_that_unit_alone",),
    ),
    Mutant(
        20,
        "a wild value raises a warning",
        LOADERS,
        'with np.errstate(over="ignore", invalid="ignore"):',
        "with np.errstate():",
        (f"{TEST_DATA}::test_rule_20_a_wild_private_value_raises_no_warning",),
    ),
    Mutant(
        20,
        "a list of another length is an error that names its row",
        LOADERS,
        "    out = np.full((len(rows), width), np.nan)\n",
        "    for i, row in enumerate(rows):\n"
        "        if row is None or len(row) != width:\n"
        '            raise UserError(f"{path}: row {i} has another length")\n'
        "    out = np.full((len(rows), width), np.nan)\n",
        (f"{TEST_LEAKS}::test_rule_20_a_private_list_of_another_length_is_no_error_but_contributes_zero",),
    ),
    Mutant(
        20,
        "one unreadable value stops the load",
        LOADERS,
        "        return [_value(scalar) for scalar in column]\n",
        "        raise\n",
        (f"{TEST_LEAKS}::test_rule_20_an_unreadable_value_in_any_column_stops_nothing_and_moves_no_other_id",),
    ),
    Mutant(
        20,
        "a decoder tells of a bad sensitive image",
        IMAGES,
        "with contextlib.nullcontext() if public else _no_standard_error():",
        "with contextlib.nullcontext():",
        (f"{TEST_LEAKS}::test_rule_20_no_decoder_of_images_writes_to_the_public_log",),
    ),
    Mutant(
        20,
        "standard error is not given back after an image",
        IMAGES,
        "        os.dup2(kept, 2)\n",
        "",
        (f"{TEST_LEAKS}::test_rule_20_standard_error_is_given_back_after_an_image",),
    ),
    Mutant(
        20,
        "libraries log what they think of records",
        MAIN,
        "        logging.disable(logging.CRITICAL)\n",
        "",
        (f"{TEST_LEAKS}::test_rule_20_a_library_s_log_line_is_heard_in_public_stages_only",),
    ),
    Mutant(
        25,
        "features scaled by the table's deviation",
        LOADERS,
        "scaled = (features.astype(np.float64) - inputs.offset) / inputs.scale",
        "scaled = (features.astype(np.float64) - inputs.offset) / max(np.nanstd(features), 1e-9)",
        (f"{TEST_DATA}::test_rule_25_a_record_is_prepared_alone",),
    ),
    Mutant(
        25,
        "features centred by the table's mean",
        LOADERS,
        "scaled = (features.astype(np.float64) - inputs.offset) / inputs.scale",
        "scaled = (features.astype(np.float64) - np.nanmean(features)) / inputs.scale",
        (f"{TEST_DATA}::test_rule_25_a_record_is_prepared_alone",),
    ),
    Mutant(
        25,
        "rows that another unit has too are dropped",
        LOADERS,
        "return records.take(rank < private.max_records_per_unit)",
        "first = np.isin(np.arange(len(rank)), np.unique(records.features, axis=0, return_index=True)[1])\n"
        "    return records.take(first & (rank < private.max_records_per_unit))",
        (PERSONS,),
    ),
    Mutant(
        26,
        "the sensitive source is read with a closed access",
        LOADERS,
        'if not getattr(access, "is_open", False):',
        "if access is None:",
        (f"{TEST_LEAKS}::test_the_sensitive_source_is_read_with_an_open_access_only",),
    ),
)
