"""Test metrics: study only.

Inputs: every model and mixture of a task, `private/records`, `private/splits` (test part). Outputs:
`study/metrics/task=…`. Reads the test part without charge, so its output is for the researcher and never released.
"""

TARGETS["metrics"] = files_of([PATHS.metrics(task) for task in CONFIG.task_names], "metrics.parquet")

for eval_task in CONFIG.task_names:

    rule:
        name:
            f"evaluate_{eval_task}"
        input:
            [
                f"{cell.folder(PATHS)}/{name}"
                for cell in models_of(eval_task)
                for name in (FILES[cell.stage][0], "privacy.json")
            ],
            f"{PATHS.records()}/records.parquet",
            TARGETS["splits"],
            code=code_of(stage_of("evaluate")),
        output:
            files_of([PATHS.metrics(eval_task)], "metrics.parquet"),
        log:
            PATHS.log(f"evaluate_{eval_task}"),
        benchmark:
            PATHS.benchmark(f"evaluate_{eval_task}")
        retries: 0
        conda:
            "../../envs/cpu.yaml"
        threads: CONFIG.threads
        resources:
            **asks("evaluate", private=True, gpu=True),
        params:
            settings=subtree("evaluate", eval_task),
            stage=stage_of("evaluate"),
            task=eval_task,
        message:
            "Measuring {params.task} on the test part (study only)."
        shell:
            "python -m dpmixmin {params.stage} --task {params.task} 2>&1 | tee -i {log}"
