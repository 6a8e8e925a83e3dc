"""Mixture weights: mechanism 1.

Inputs: `private/predictions` (dp_mixmin: mixing part; mixmin: all of train), the mixture's settings, the proxy.
Outputs, per cell: `weights.json`, `trajectory.parquet`, `privacy.json` in `released/` (dp_mixmin), `study/` (mixmin:
not private) or `public/` (uniform, proportional).
Spends: one ledger entry per dp_mixmin cell, at (epsilon, delta) on the mixing part. Re-runs cost nothing.
"""

TARGETS["mixtures"] = files_of(folders_of(cells.select(CELLS, stage="mixture")), *WEIGHTS)

for (mix_task, mix_method), mix_cells in groups("mixture").items():

    rule:
        name:
            group_name("mix", mix_task, mix_method)
        input:
            (
                [f"{PATHS.predictions(seed)}/predictions.parquet" for seed in seeds_of(mix_cells)]
                if mix_method in ("mixmin", "dp_mixmin")
                else TOKENIZER
            ),
            SOURCES if mix_method == "proportional" else [],
            (
                [
                    f"{MIXTURE_SETTINGS}/settings.json",
                    *PROXIES,
                ]
                if mix_method == "dp_mixmin"
                else []
            ),
            GATE if mix_method == "dp_mixmin" else [],
            code=code_of("mix"),
        output:
            files_of(folders_of(mix_cells), *WEIGHTS),
        log:
            PATHS.log(group_name("mix", mix_task, mix_method)),
        retries: 0
        conda:
            "../../envs/cpu.yaml"
        params:
            settings=subtree("mix", mix_task),
            task=task_option(mix_task),
            method=mix_method,
            charge_aborted=CONFIG.privacy.charge_aborted,
            number=len(mix_cells),
        message:
            "Mixture weights by {params.method} {params.task}: {params.number} cell(s)."
        shell:
            "python -m dpmixmin mix --method {params.method} {params.task} 2>&1 | tee {log}"
