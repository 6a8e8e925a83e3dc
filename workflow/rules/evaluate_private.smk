"""The charged evaluation of a deployment.

Inputs: the fine-tuned model, `private/records`, `private/splits`. Outputs: `released/evaluation/.../metrics.json` with
its `privacy.json`.
Spends: one ledger entry on the test part, disjoint from what the other mechanisms read.
"""

EVALUATIONS = cells.select(CELLS, stage="evaluation")
TARGETS["evaluation"] = files_of(folders_of(EVALUATIONS), *EVALUATION)

if EVALUATIONS:

    rule evaluate_private:
        input:
            f"{PATHS.records()}/records.parquet",
            [f"{PATHS.split(seed)}/split.parquet" for seed in seeds_of(EVALUATIONS)],
            files_of(folders_of(cells.select(CELLS, stage="finetuned")), *FINETUNED),
            GATE,
            code=code_of(stage_of("evaluate_private")),
        output:
            TARGETS["evaluation"],
        log:
            PATHS.log("evaluate_private"),
        benchmark:
            PATHS.benchmark("evaluate_private")
        retries: 0
        conda:
            "../../envs/cpu.yaml"
        threads: CONFIG.threads
        resources:
            **asks("evaluate", private=True, gpu=True),
        params:
            settings=subtree("evaluate_private"),
            stage=stage_of("evaluate_private"),
            charge_aborted=CONFIG.privacy.charge_aborted,
        message:
            "Measuring the model on the test part, for a price."
        shell:
            "python -m dpmixmin {params.stage} 2>&1 | tee -i {log}"
