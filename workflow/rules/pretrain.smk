"""Pretraining on the weighted public mixture.

Inputs: weights, `public/sources`. Outputs, per cell: the model, `loss.parquet`, `privacy.json` (of texts also a card) in
the room of its weights (`public/` for none and uniform). Post-processing: touches nothing private, spends nothing.
"""

TARGETS["pretrained"] = files_of(folders_of(cells.select(CELLS, stage="pretrained")), *PRETRAINED)

for pretraining in jobs_of("pretrained"):

    rule:
        name:
            pretraining.name
        input:
            SOURCES,
            TOKENIZER,
            [f"{folder}/weights.json" for folder in folders_of(mixtures_behind(pretraining.cells))],
            code=code_of(stage_of("pretrain")),
        output:
            files_of(folders_of(pretraining.cells), *PRETRAINED),
        log:
            PATHS.log(pretraining.name),
        benchmark:
            PATHS.benchmark(pretraining.name)
        conda:
            "../../envs/cpu.yaml"
        threads: jobs.cores(CONFIG, together=True)
        resources:
            **asks("pretrain", gpu=True, together=True),
        params:
            settings=subtree("pretrain"),
            stage=stage_of("pretrain"),
            options=pretraining.options,
            task=pretraining.task,
            method=pretraining.method,
            charge_aborted=CONFIG.privacy.charge_aborted,
            number=len(pretraining.cells),
        message:
            "Pretraining {params.number} model(s) for {params.method} {params.task}."
        shell:
            "python -m dpmixmin.launch {params.stage} {params.options} 2>&1 | tee -i {log}"
