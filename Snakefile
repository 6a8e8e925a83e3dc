"""DP-MixMin: from public data and one sensitive dataset to a private model with a stated guarantee.

    snakemake -n                       # what would be done, and why
    snakemake -c2 all                  # everything, on two cores
    snakemake -c2 mixtures             # one stage with what it needs
    snakemake --profile slurm all      # everything, on a cluster

Run it from the repository root. The config is `config/config.yaml`, or `--configfile FILE`.
"""

from snakemake.utils import min_version

min_version("9.27")

if not workflow.overwrite_configfiles:

    configfile: "config/config.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/sources.smk"
include: "workflow/rules/private.smk"
include: "workflow/rules/proxy.smk"
include: "workflow/rules/tune.smk"
include: "workflow/rules/audit.smk"
include: "workflow/rules/mix.smk"
include: "workflow/rules/pretrain.smk"
include: "workflow/rules/finetune.smk"


# A deployment measures for a price and hands out a bundle; a study measures everything and hands out nothing.
if CONFIG.mode == "deploy":

    include: "workflow/rules/evaluate_private.smk"

else:

    include: "workflow/rules/evaluate.smk"
    include: "workflow/rules/report.smk"


include: "workflow/rules/release.smk"


localrules:
    all,
    sources,
    splits,
    proxies,
    settings,
    predictions,
    mixtures,
    pretrained,
    finetuned,
    audits,
    fetch,
    budget,
    release,


rule all:
    default_target: True
    input:
        TARGETS["mixtures"],
        TARGETS["pretrained"],
        TARGETS["finetuned"],
        TARGETS["audits"],
        TARGETS["evaluation"] if CONFIG.mode == "deploy" else TARGETS["report"],
        TARGETS["bundle"],
    message:
        "Done: everything."


rule sources:
    input:
        TARGETS["sources"],
    message:
        "Done: sources."


rule splits:
    input:
        TARGETS["splits"],
    message:
        "Done: splits."


rule proxies:
    input:
        TARGETS["proxies"],
    message:
        "Done: proxies."


rule settings:
    input:
        TARGETS["settings"],
    message:
        "Done: settings."


rule predictions:
    input:
        TARGETS["predictions"],
    message:
        "Done: predictions."


rule mixtures:
    input:
        TARGETS["mixtures"],
    message:
        "Done: mixtures."


rule pretrained:
    input:
        TARGETS["pretrained"],
    message:
        "Done: pretrained."


rule finetuned:
    input:
        TARGETS["finetuned"],
    message:
        "Done: finetuned."


rule audits:
    input:
        TARGETS["audits"],
    message:
        "Done: audits."


if CONFIG.mode == "deploy":

    rule evaluation:
        input:
            TARGETS["evaluation"],
        message:
            "Done: the charged evaluation."

else:

    localrules:
        metrics,
        report,
        make_report,

    rule metrics:
        input:
            TARGETS["metrics"],
        message:
            "Done: metrics."

    rule report:
        input:
            TARGETS["report"],
        message:
            "Done: report."
