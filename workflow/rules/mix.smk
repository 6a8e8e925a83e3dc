"""Mixture weights: mechanism 1.

Inputs: `private/predictions` (dp_mixmin: mixing part; mixmin: all of train), the mixture's settings, the proxy.
Outputs, per cell: `weights.json`, `trajectory.parquet`, `privacy.json` in `released/` (dp_mixmin), `study/` (mixmin:
not private) or `public/` (uniform, proportional).
Spends: one ledger entry per dp_mixmin cell, at (epsilon, delta) on the mixing part. Re-runs cost nothing.
"""

TARGETS["mixtures"] = files_of(folders_of(cells.select(CELLS, stage="mixture")), *WEIGHTS)

for mixing in jobs_of("mixture"):

    rule:
        name:
            mixing.name
        input:
            (
                [f"{PATHS.predictions(seed)}/predictions.parquet" for seed in seeds_of(mixing.cells)]
                if mixing.method in ("mixmin", "dp_mixmin")
                else TOKENIZER
            ),
            SOURCES if mixing.method == "proportional" else [],
            (
                [
                    f"{MIXTURE_SETTINGS}/settings.json",
                    *PROXIES,
                ]
                if mixing.method == "dp_mixmin"
                else []
            ),
            GATE if mixing.method == "dp_mixmin" else [],
            code=code_of("mix"),
        output:
            files_of(folders_of(mixing.cells), *WEIGHTS),
        log:
            PATHS.log(mixing.name),
        benchmark:
            PATHS.benchmark(mixing.name)
        retries: 0
        conda:
            "../../envs/cpu.yaml"
        resources:
            **asks("mix", private=True),
        params:
            settings=subtree("mix", mixing.task),
            options=mixing.options,
            task=mixing.task,
            method=mixing.method,
            charge_aborted=CONFIG.privacy.charge_aborted,
            number=len(mixing.cells),
        message:
            "Mixture weights by {params.method} {params.task}: {params.number} cell(s)."
        shell:
            "python -m dpmixmin mix {params.options} 2>&1 | tee -i {log}"
