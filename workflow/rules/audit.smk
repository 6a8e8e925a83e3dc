"""Audits: every claim is attacked, with controls and stated power; and the gate that the results make.

Inputs: a study audits the mechanisms on its sensitive parts (`private/predictions`, `private/records`, the pretrained
models) and attacks its released models; a deployment audits the same specs on public stand-ins, before it spends
anything, and never its sensitive set. Outputs: `study/audits`, in a deployment `public/audits`: scores of every run,
a report per cell, a summary, and `gate/passed.json`, which `all` and `release` wait for.
Spends: nothing. What is drawn here is measured and never released; a second audit costs nothing in the ledger.
"""

for audited_task in sorted({cell.task for cell in AUDITED_MIXTURES}):

    rule:
        name:
            f"audit_mixture_{audited_task}"
        input:
            f"{MIXTURE_SETTINGS}/settings.json",
            PROXIES,
            [f"{PATHS.predictions(CONFIG.seeds[0])}/predictions.parquet"] if STUDIED else STANDINS,
            code=code_of("audit_mixture"),
        output:
            files_of(mixture_audits(audited_task), *AUDIT_FILES),
        log:
            PATHS.log(f"audit_mixture_{audited_task}"),
        benchmark:
            PATHS.benchmark(f"audit_mixture_{audited_task}")
        retries: 0
        conda:
            "../../envs/cpu.yaml"
        threads: CONFIG.threads
        resources:
            **asks("audit", private=True),
        params:
            settings=subtree("audit_mixture", audited_task),
            task=audited_task,
        message:
            "Attacking the mixture of {params.task}: two worlds, three canaries, with and without noise."
        shell:
            "python -m dpmixmin audit_mixture --task {params.task} 2>&1 | tee -i {log}"


for audited_method in sorted({cell.method for cell in AUDITED_TRAININGS}):
    training_cells = [cell for cell in AUDITED_TRAININGS if cell.method == audited_method]

    rule:
        name:
            f"audit_training_{audited_method}"
        input:
            f"{PATHS.finetune_settings(audited_method)}/settings.json",
            f"{MIXTURE_SETTINGS}/settings.json" if CONFIG.privacy.composition == "sequential" else [],
            (
                [
                    f"{PATHS.records()}/records.parquet",
                    *[f"{PATHS.split(seed)}/split.parquet" for seed in seeds_of(training_cells)],
                    *[f"{folder}/model.safetensors" for folder in folders_of(pretrained_behind(training_cells))],
                ]
                if STUDIED
                else [*STANDINS, *TOKENIZER]
            ),
            code=code_of("audit_training"),
        output:
            files_of(training_audits(training_cells), *AUDIT_FILES),
        log:
            PATHS.log(f"audit_training_{audited_method}"),
        benchmark:
            PATHS.benchmark(f"audit_training_{audited_method}")
        retries: 0
        conda:
            "../../envs/cpu.yaml"
        threads: CONFIG.threads
        resources:
            **asks("audit", private=True, gpu=True),
        params:
            settings=subtree("audit_training"),
            method=audited_method,
        message:
            "Attacking the fine-tuning of {params.method}: one run with canaries, one without noise."
        shell:
            "python -m dpmixmin audit_training --method {params.method} 2>&1 | tee -i {log}"


if CONFIG.audit.gate != "none":

    rule audit_replay:
        input:
            f"{MIXTURE_SETTINGS}/settings.json" if AUDITED_MIXTURES else [],
            [
                f"{PATHS.finetune_settings(method)}/settings.json"
                for method in sorted({c.method for c in AUDITED_TRAININGS})
            ],
            PROXIES if AUDITED_MIXTURES else [],
            (
                [
                    f"{PATHS.records()}/records.parquet",
                    f"{PATHS.split(CONFIG.seeds[0])}/split.parquet",
                    f"{PATHS.predictions(CONFIG.seeds[0])}/predictions.parquet" if AUDITED_MIXTURES else [],
                    *[f"{folder}/model.safetensors" for folder in folders_of(pretrained_behind(AUDITED_TRAININGS))],
                ]
                if STUDIED
                else [*STANDINS, *TOKENIZER]
            ),
            code=code_of("audit_replay"),
        output:
            files_of([PATHS.audit(ROOM, "replay")], *AUDIT_FILES),
        log:
            PATHS.log("audit_replay"),
        benchmark:
            PATHS.benchmark("audit_replay")
        retries: 0
        conda:
            "../../envs/cpu.yaml"
        threads: CONFIG.threads
        resources:
            **asks("audit", private=True, gpu=True),
        params:
            settings=subtree("audit_replay"),
        message:
            "Replaying the mechanisms on neighbours: does one unit move a release by its declared sensitivity at most?"
        shell:
            "python -m dpmixmin audit_replay 2>&1 | tee -i {log}"


for audited_task in cells.attacked_tasks(CONFIG):

    rule:
        name:
            f"audit_membership_{audited_task}"
        input:
            [f"{folder}/model.safetensors" for folder in folders_of(finetuned_of(audited_task))],
            [f"{folder}/model.safetensors" for folder in folders_of(pretrained_behind(finetuned_of(audited_task)))],
            f"{PATHS.records()}/records.parquet",
            TARGETS["splits"],
            code=code_of("audit_membership"),
        output:
            files_of([PATHS.audit(ROOM, "membership", task=audited_task)], *AUDIT_FILES),
        log:
            PATHS.log(f"audit_membership_{audited_task}"),
        benchmark:
            PATHS.benchmark(f"audit_membership_{audited_task}")
        retries: 0
        conda:
            "../../envs/cpu.yaml"
        threads: CONFIG.threads
        resources:
            **asks("audit", private=True, gpu=True),
        params:
            settings=subtree("audit_membership", audited_task),
            task=audited_task,
        message:
            "Membership inference on the fine-tuned models of {params.task} (study only)."
        shell:
            "python -m dpmixmin audit_membership --task {params.task} 2>&1 | tee -i {log}"


TARGETS["audits"] = []
if CONFIG.audit.gate != "none":
    AUDIT_SUMMARY = PATHS.audit(ROOM, "summary")
    AUDIT_GATE = f"{PATHS.audit(ROOM, 'gate')}/passed.json"
    TARGETS["audits"] = [*files_of([AUDIT_SUMMARY], *SUMMARY), *files_of([PATHS.audit(ROOM, "gate")], "passed.json")]

    rule audit_summary:
        input:
            [f"{folder}/{name}" for folder in cells.audit_folders(CONFIG, PATHS) for name in AUDIT_FILES],
            code=code_of("audit_summary"),
        output:
            files_of([AUDIT_SUMMARY], *SUMMARY),
        log:
            PATHS.log("audit_summary"),
        benchmark:
            PATHS.benchmark("audit_summary")
        localrule: True
        conda:
            "../../envs/cpu.yaml"
        params:
            settings=subtree("audit_summary"),
        message:
            "Claims, bounds, controls and power in one table."
        shell:
            "python -m dpmixmin audit_summary 2>&1 | tee -i {log}"

    # A rule of its own: when it fails, the summary that says why stays.
    rule audit_gate:
        input:
            f"{AUDIT_SUMMARY}/audits.csv",
            code=code_of("audit_gate"),
        output:
            files_of([PATHS.audit(ROOM, "gate")], "passed.json"),
        log:
            PATHS.log("audit_gate"),
        benchmark:
            PATHS.benchmark("audit_gate")
        localrule: True
        conda:
            "../../envs/cpu.yaml"
        params:
            settings=subtree("audit_gate"),
        message:
            "Do the claims hold?"
        shell:
            "python -m dpmixmin audit_gate 2>&1 | tee -i {log}"


# A deployment is audited before it spends; the gate's time is no reason to draw again (nor would the ledger).
GATE = [ancient(AUDIT_GATE)] if CONFIG.mode == "deploy" and CONFIG.audit.gate == "required" else []
