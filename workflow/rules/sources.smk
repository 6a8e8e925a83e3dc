"""Public data.

Inputs: what the config names. Outputs: `public/data/fetched.json`, `public/sources/{sources,standins}`; of texts,
`public/sources/source=…` and `public/tokenizer`.
Touches nothing private (fetching a file that plays the sensitive dataset does not open it). Spends nothing.
"""

if CONFIG.text:
    TARGETS["sources"] = files_of([PATHS.text(name) for name in CONFIG.sources], "documents.parquet")
    TARGETS["sources"] += files_of([PATHS.tokenizer()], "tokenizer.json", "tokenizer_config.json")
else:
    PUBLIC_TABLES = [PATHS.source("sources")] + ([PATHS.source("standins")] if CONFIG.public.standins else [])
    TARGETS["sources"] = files_of(PUBLIC_TABLES, "records.parquet")


rule fetch:
    input:
        code=code_of("fetch"),
    output:
        PATHS.fetched(),
    log:
        PATHS.log("fetch"),
    benchmark:
        PATHS.benchmark("fetch")
    conda:
        "../../envs/cpu.yaml"
    params:
        settings=subtree("fetch"),
    message:
        "Fetching the data that the config names (once; kept in the data cache)."
    shell:
        "python -m dpmixmin fetch 2>&1 | tee -i {log}"


rule prepare_sources:
    input:
        PATHS.fetched(),
        local_files(CONFIG.public.sources, CONFIG.public.standins),
        text_files(),
        code=code_of(stage_of("sources")),
    output:
        TARGETS["sources"],
    log:
        PATHS.log("prepare_sources"),
    benchmark:
        PATHS.benchmark("prepare_sources")
    conda:
        "../../envs/cpu.yaml"
    resources:
        **asks("sources"),
    params:
        settings=subtree("sources"),
        stage=stage_of("sources"),
    message:
        "Preparing the public sources."
    shell:
        "python -m dpmixmin {params.stage} 2>&1 | tee -i {log}"
