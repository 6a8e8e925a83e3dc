"""The joint proxy of the public sources.

Inputs: `public/sources/sources`. Outputs: `public/proxies/joint`. Touches nothing private. Spends nothing.
"""

TARGETS["proxies"] = files_of([PATHS.proxy()], "model.safetensors", "loss.parquet")


rule train_proxy:
    input:
        f"{PATHS.source('sources')}/records.parquet",
        code=code_of("proxy"),
    output:
        TARGETS["proxies"],
    log:
        PATHS.log("train_proxy"),
    conda:
        "../../envs/cpu.yaml"
    threads: CONFIG.threads
    params:
        settings=subtree("proxy"),
    message:
        "Training one proxy with an output per public source."
    shell:
        "python -m dpmixmin proxy 2>&1 | tee {log}"
