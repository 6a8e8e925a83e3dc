"""Private fine-tuning: mechanism 2.

Inputs: pretrained models, the method's settings, `private/records`, `private/splits` (dp_mixmin: finetune part;
none, uniform, mixmin: all of train). Outputs, per cell: `model.safetensors`, `privacy.json` in `released/`, or in
`study/` for mixmin.
Spends: one ledger entry per cell, at (epsilon, delta). Re-runs cost nothing.
"""

TARGETS["finetuned"] = files_of(folders_of(cells.select(CELLS, stage="finetuned")), *FINETUNED)

for finetuning in jobs_of("finetuned"):

    rule:
        name:
            finetuning.name
        input:
            [f"{folder}/model.safetensors" for folder in folders_of(pretrained_behind(finetuning.cells))],
            f"{PATHS.finetune_settings(finetuning.method)}/settings.json",
            f"{PATHS.records()}/records.parquet",
            [f"{PATHS.split(seed)}/split.parquet" for seed in seeds_of(finetuning.cells)],
            GATE,
            code=code_of(stage_of("finetune")),
        output:
            files_of(folders_of(finetuning.cells), *FINETUNED),
        log:
            PATHS.log(finetuning.name),
        benchmark:
            PATHS.benchmark(finetuning.name)
        retries: 0
        conda:
            "../../envs/cpu.yaml"
        threads: jobs.cores(CONFIG, together=True)
        resources:
            **asks("finetune", private=True, gpu=True, together=True),
        params:
            settings=subtree("finetune", finetuning.task),
            stage=stage_of("finetune"),
            options=finetuning.options,
            task=finetuning.task,
            method=finetuning.method,
            charge_aborted=CONFIG.privacy.charge_aborted,
            number=len(finetuning.cells),
        message:
            "Fine-tuning {params.number} model(s) of {params.method} on {params.task} with DP-SGD."
        shell:
            "python -m dpmixmin.launch {params.stage} {params.options} 2>&1 | tee -i {log}"
