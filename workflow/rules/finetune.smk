"""Private fine-tuning: mechanism 2.

Inputs: pretrained models, the method's settings, `private/records`, `private/splits` (dp_mixmin: finetune part;
none, uniform, mixmin: all of train). Outputs, per cell: `model.safetensors`, `privacy.json` in `released/`, or in
`study/` for mixmin.
Spends: one ledger entry per cell, at (epsilon, delta). Re-runs cost nothing.
"""

TARGETS["finetuned"] = files_of(folders_of(cells.select(CELLS, stage="finetuned")), *FINETUNED)

for (fine_task, fine_method), fine_cells in groups("finetuned").items():

    rule:
        name:
            group_name("finetune", fine_task, fine_method)
        input:
            [f"{folder}/model.safetensors" for folder in folders_of(pretrained_behind(fine_cells))],
            f"{PATHS.finetune_settings(fine_method)}/settings.json",
            f"{PATHS.records()}/records.parquet",
            [f"{PATHS.split(seed)}/split.parquet" for seed in seeds_of(fine_cells)],
            GATE,
            code=code_of(stage_of("finetune")),
        output:
            files_of(folders_of(fine_cells), *FINETUNED),
        log:
            PATHS.log(group_name("finetune", fine_task, fine_method)),
        retries: 0
        conda:
            "../../envs/cpu.yaml"
        threads: CONFIG.threads
        params:
            settings=subtree("finetune", fine_task),
            stage=stage_of("finetune"),
            task=fine_task,
            method=fine_method,
            charge_aborted=CONFIG.privacy.charge_aborted,
            number=len(fine_cells),
        message:
            "Fine-tuning {params.number} model(s) of {params.method} on {params.task} with DP-SGD."
        shell:
            "python -m dpmixmin {params.stage} --method {params.method} --task {params.task} 2>&1 | tee {log}"
