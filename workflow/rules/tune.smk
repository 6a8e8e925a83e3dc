"""Settings chosen on public stand-ins.

Inputs: public tables and the proxy (nothing, where the config declares settings). Outputs: `public/settings/mixture`,
`public/settings/finetune/method=…`, each the choice and its curve. Touches nothing private. Spends nothing.
"""

TUNE_INPUTS = [*STANDINS, *PROXIES]
MIXTURE_SETTINGS = PATHS.settings("mixture")
TARGETS["settings"] = files_of([MIXTURE_SETTINGS], *SETTINGS) + files_of(
    [PATHS.finetune_settings(method) for method in CONFIG.methods], *SETTINGS
)


rule tune_mixture:
    input:
        TUNE_INPUTS if TUNED_MIXTURE else [],
        code=code_of(stage_of("tune_mixture")),
    output:
        files_of([MIXTURE_SETTINGS], *SETTINGS),
    log:
        PATHS.log("tune_mixture"),
    benchmark:
        PATHS.benchmark("tune_mixture")
    conda:
        "../../envs/cpu.yaml"
    threads: CONFIG.threads
    resources:
        **asks("tune_mixture", gpu=True),
    params:
        settings=subtree("tune_mixture"),
        stage=stage_of("tune_mixture"),
    message:
        "Choosing the mixture's clip, steps and step size on public stand-ins."
    shell:
        "python -m dpmixmin {params.stage} 2>&1 | tee -i {log}"


if CONFIG.text:

    # Pretraining is what a trial costs, and one pretrained model serves all methods: one job for all.
    rule tune_finetune:
        input:
            [*SOURCES, *TOKENIZER] if TUNED_FINETUNE else [],
            code=code_of("text_tune_finetune"),
        output:
            files_of([PATHS.finetune_settings(method) for method in CONFIG.methods], *SETTINGS),
        log:
            PATHS.log("tune_finetune"),
        benchmark:
            PATHS.benchmark("tune_finetune")
        conda:
            "../../envs/cpu.yaml"
        threads: CONFIG.threads
        resources:
            **asks("tune_finetune", gpu=True),
        params:
            settings=subtree("tune_finetune"),
        message:
            "Choosing fine-tuning settings on public stand-ins (the same budget for every method)."
        shell:
            "python -m dpmixmin text_tune_finetune 2>&1 | tee -i {log}"

else:

    for tuned_method in CONFIG.methods:

        rule:
            name:
                f"tune_finetune_{tuned_method}"
            input:
                (
                    [
                        *TUNE_INPUTS,
                        *SOURCES,
                        f"{MIXTURE_SETTINGS}/settings.json",
                    ]
                    if TUNED_FINETUNE
                    else []
                ),
                code=code_of("tune_finetune"),
            output:
                files_of([PATHS.finetune_settings(tuned_method)], *SETTINGS),
            log:
                PATHS.log(f"tune_finetune_{tuned_method}"),
            benchmark:
                PATHS.benchmark(f"tune_finetune_{tuned_method}")
            conda:
                "../../envs/cpu.yaml"
            threads: CONFIG.threads
            resources:
                **asks("tune_finetune", gpu=True),
            params:
                settings=subtree("tune_finetune"),
                method=tuned_method,
            message:
                "Choosing fine-tuning settings of {params.method} on public stand-ins (the same budget for every method)."
            shell:
                "python -m dpmixmin tune_finetune --method {params.method} 2>&1 | tee -i {log}"
