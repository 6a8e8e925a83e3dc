"""Tables, figures and the page.

Inputs: `study/metrics`, `public/settings`. Outputs: `study/report`. Reads no sensitive record; what it shows was
measured without charge, so it is for the researcher and never released.
"""

REPORT_FIGURES = ("perplexity" if CONFIG.text else "auc", "gain", "weights", "tuning")
REPORT_FILES = (
    "summary.csv",
    "summary.txt",
    "table.csv",
    "mixtures.csv",
    "index.html",
    *(("twice.csv",) if CONFIG.finetune.twice_the_steps else ()),
    *(f"figure_{name}.{kind}" for name in REPORT_FIGURES for kind in ("svg", "png")),
)
TARGETS["report"] = files_of([PATHS.report()], *REPORT_FILES)


rule make_report:
    input:
        [f"{PATHS.metrics(task)}/metrics.parquet" for task in CONFIG.task_names],
        [path for path in TARGETS["settings"] if not path.endswith("manifest.json")],
        [f"{AUDIT_SUMMARY}/{name}" for name in SUMMARY] if TARGETS["audits"] else [],
        code=code_of("report"),
    output:
        TARGETS["report"],
    log:
        PATHS.log("make_report"),
    benchmark:
        PATHS.benchmark("make_report")
    conda:
        "../../envs/cpu.yaml"
    params:
        settings=subtree("report"),
    message:
        "Writing tables, figures and the page."
    shell:
        "python -m dpmixmin report 2>&1 | tee -i {log}"
