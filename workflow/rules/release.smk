"""What was spent, and what a deployment hands out: the bundle of one chain, with a statement that anybody can verify.

Inputs: the ledger (budget); the chain's released artefacts and public settings (bundle). Outputs: `released/bundle`.
Reads no sensitive record and spends nothing; it refuses what was not charged in full.
"""

BUNDLE = [f"{PATHS.bundle()}/{name}" for name in ("statement.json", "statement.md", "SHA256SUMS")]
TARGETS["bundle"] = BUNDLE if CONFIG.mode == "deploy" else []


rule budget:
    log:
        PATHS.log("budget"),
    conda:
        "../../envs/cpu.yaml"
    message:
        "What was spent on this dataset, and what is left."
    shell:
        "python -m dpmixmin budget 2>&1 | tee -i {log}"


if CONFIG.mode == "deploy":

    rule write_bundle:
        input:
            [
                path
                for stage in ("mixtures", "finetuned", "evaluation", "settings")
                for path in TARGETS[stage]
                if not path.endswith("manifest.json")
            ],
            GATE,
            code=code_of("release"),
        output:
            TARGETS["bundle"],
        log:
            PATHS.log("write_bundle"),
        benchmark:
            PATHS.benchmark("write_bundle")
        localrule: True
        conda:
            "../../envs/cpu.yaml"
        params:
            settings=subtree("release"),
            charge_aborted=CONFIG.privacy.charge_aborted,
        message:
            "Writing the release bundle and its statement."
        shell:
            "python -m dpmixmin release 2>&1 | tee -i {log}"

    rule release:
        input:
            TARGETS["bundle"],
        message:
            "Done: the bundle. Check it with: python -m dpmixmin verify {input[0]}"

else:

    rule release:
        log:
            PATHS.log("release"),
        conda:
            "../../envs/cpu.yaml"
        message:
            "A study cannot be released: this says why."
        shell:
            "python -m dpmixmin release 2>&1 | tee -i {log}"
