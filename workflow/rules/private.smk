"""The sensitive dataset: its record table, its partitions, its predictions.

Inputs: the sensitive source (opened through the ledger), the public proxy. Outputs: `private/records`,
`private/splits`, `private/predictions`. Reads sensitive records; spends nothing, because nothing leaves `private/`.
"""

SEEDS = list(CONFIG.seeds)
TARGETS["splits"] = files_of([PATHS.split(seed) for seed in SEEDS], "split.parquet")
TARGETS["predictions"] = files_of([PATHS.predictions(seed) for seed in SEEDS], "predictions.parquet")


rule prepare_records:
    input:
        PATHS.fetched(),
        TOKENIZER if CONFIG.text else SOURCES,
        local_files(CONFIG.private.table),
        code=code_of(stage_of("records")),
    output:
        files_of([PATHS.records()], "records.parquet", "counts.json"),
    log:
        PATHS.log("prepare_records"),
    benchmark:
        PATHS.benchmark("prepare_records")
    retries: 0
    conda:
        "../../envs/cpu.yaml"
    resources:
        **asks("records", private=True),
    params:
        settings=subtree("records"),
        stage=stage_of("records"),
    message:
        "Preparing the sensitive table (stays in private/)."
    shell:
        "python -m dpmixmin {params.stage} 2>&1 | tee -i {log}"


rule assign_parts:
    input:
        f"{PATHS.records()}/records.parquet",
        code=code_of("split"),
    output:
        TARGETS["splits"],
    log:
        PATHS.log("assign_parts"),
    benchmark:
        PATHS.benchmark("assign_parts")
    retries: 0
    conda:
        "../../envs/cpu.yaml"
    resources:
        **asks("split", private=True),
    params:
        settings=subtree("split"),
    message:
        "Assigning every unit to a part by a keyed hash, once per seed (stays in private/)."
    shell:
        "python -m dpmixmin split 2>&1 | tee -i {log}"


rule predict:
    input:
        f"{PATHS.records()}/records.parquet",
        [f"{PATHS.split(seed)}/split.parquet" for seed in SEEDS],
        PROXIES,
        code=code_of(stage_of("predict")),
    output:
        TARGETS["predictions"],
    log:
        PATHS.log("predict"),
    benchmark:
        PATHS.benchmark("predict")
    retries: 0
    conda:
        "../../envs/cpu.yaml"
    threads: CONFIG.threads
    resources:
        **asks("predict", private=True, gpu=True),
    params:
        settings=subtree("predict"),
        stage=stage_of("predict"),
    message:
        "Predicting sensitive training records with the public proxies (stays in private/)."
    shell:
        "python -m dpmixmin {params.stage} 2>&1 | tee -i {log}"
