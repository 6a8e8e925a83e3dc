"""Public data.

Inputs: what the config names. Outputs: `public/data/fetched.json`, `public/sources/{sources,standins}`.
Touches nothing private (fetching a file that plays the sensitive dataset does not open it). Spends nothing.
"""

PUBLIC_TABLES = [PATHS.source("sources")] + ([PATHS.source("standins")] if CONFIG.public.standins else [])
TARGETS["sources"] = files_of(PUBLIC_TABLES, "records.parquet")


rule fetch:
    input:
        code=code_of("fetch"),
    output:
        PATHS.fetched(),
    log:
        PATHS.log("fetch"),
    conda:
        "../../envs/cpu.yaml"
    params:
        settings=subtree("fetch"),
    message:
        "Fetching the data that the config names (once; kept in the data cache)."
    shell:
        "python -m dpmixmin fetch 2>&1 | tee {log}"


rule prepare_sources:
    input:
        PATHS.fetched(),
        local_files(CONFIG.public.sources, CONFIG.public.standins),
        code=code_of("sources"),
    output:
        TARGETS["sources"],
    log:
        PATHS.log("prepare_sources"),
    conda:
        "../../envs/cpu.yaml"
    params:
        settings=subtree("sources"),
    message:
        "Preparing the public sources and stand-ins."
    shell:
        "python -m dpmixmin sources 2>&1 | tee {log}"
