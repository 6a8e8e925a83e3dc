"""Proxies of the public sources: one network with an output per label axis, or one GPT-2 per text.

Inputs: `public/sources`. Outputs: `public/proxies`. Touches nothing private. Spends nothing.
"""

if CONFIG.text:
    # A text that could not be had has a manifest and no model, so only these two are promised.
    TARGETS["proxies"] = files_of([PATHS.proxy(name) for name in CONFIG.sources], "loss.parquet")

    for source_name in CONFIG.sources:

        rule:
            name:
                f"train_proxy_{source_name}"
            input:
                f"{PATHS.text(source_name)}/documents.parquet",
                TOKENIZER,
                code=code_of("text_proxy"),
            output:
                files_of([PATHS.proxy(source_name)], "loss.parquet"),
            log:
                PATHS.log(f"train_proxy_{source_name}"),
            benchmark:
                PATHS.benchmark(f"train_proxy_{source_name}")
            conda:
                "../../envs/cpu.yaml"
            threads: CONFIG.threads
            resources:
                **asks("proxy", gpu=True),
            params:
                settings=subtree("proxy"),
                source=source_name,
            message:
                "Training the proxy of {params.source}."
            shell:
                "python -m dpmixmin text_proxy --source {params.source} 2>&1 | tee -i {log}"

else:
    TARGETS["proxies"] = files_of([PATHS.proxy()], "model.safetensors", "loss.parquet")

    rule train_proxy:
        input:
            SOURCES,
            code=code_of("proxy"),
        output:
            TARGETS["proxies"],
        log:
            PATHS.log("train_proxy"),
        benchmark:
            PATHS.benchmark("train_proxy")
        conda:
            "../../envs/cpu.yaml"
        threads: CONFIG.threads
        resources:
            **asks("proxy", gpu=True),
        params:
            settings=subtree("proxy"),
        message:
            "Training one proxy with an output per public source."
        shell:
            "python -m dpmixmin proxy 2>&1 | tee -i {log}"
