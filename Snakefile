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
include: "workflow/rules/mix.smk"
include: "workflow/rules/pretrain.smk"
include: "workflow/rules/finetune.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/report.smk"


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
    metrics,
    report,
    fetch,
    make_report,


rule all:
    default_target: True
    input:
        TARGETS["mixtures"],
        TARGETS["pretrained"],
        TARGETS["finetuned"],
        TARGETS["report"],


rule sources:
    input:
        TARGETS["sources"],


rule splits:
    input:
        TARGETS["splits"],


rule proxies:
    input:
        TARGETS["proxies"],


rule settings:
    input:
        TARGETS["settings"],


rule predictions:
    input:
        TARGETS["predictions"],


rule mixtures:
    input:
        TARGETS["mixtures"],


rule pretrained:
    input:
        TARGETS["pretrained"],


rule finetuned:
    input:
        TARGETS["finetuned"],


rule metrics:
    input:
        TARGETS["metrics"],


rule report:
    input:
        TARGETS["report"],
