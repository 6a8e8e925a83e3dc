"""Pretraining on the weighted public mixture.

Inputs: weights, `public/sources`. Outputs, per cell: the model, `loss.parquet`, `privacy.json` (of texts also a card) in
the room of its weights (`public/` for none and uniform). Post-processing: touches nothing private, spends nothing.
"""

TARGETS["pretrained"] = files_of(folders_of(cells.select(CELLS, stage="pretrained")), *PRETRAINED)

for (pre_task, pre_method), pre_cells in groups("pretrained").items():

    rule:
        name:
            group_name("pretrain", pre_task, pre_method)
        input:
            SOURCES,
            TOKENIZER,
            [f"{folder}/weights.json" for folder in folders_of(mixtures_behind(pre_cells))],
            code=code_of(stage_of("pretrain")),
        output:
            files_of(folders_of(pre_cells), *PRETRAINED),
        log:
            PATHS.log(group_name("pretrain", pre_task, pre_method)),
        conda:
            "../../envs/cpu.yaml"
        threads: CONFIG.threads
        params:
            settings=subtree("pretrain"),
            stage=stage_of("pretrain"),
            task=task_option(pre_task),
            method=pre_method,
            charge_aborted=CONFIG.privacy.charge_aborted,
            number=len(pre_cells),
        message:
            "Pretraining {params.number} model(s) for {params.method} {params.task}."
        shell:
            "python -m dpmixmin {params.stage} --method {params.method} {params.task} 2>&1 | tee {log}"
