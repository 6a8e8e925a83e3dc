# Two commands for a fresh machine: `make demo` and `make test`. Each does all its own set-up.
SHELL := /bin/bash
PYTHON ?= python3
CORES ?= $(shell $(PYTHON) -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
REPORT := results/digits/study/report

.DEFAULT_GOAL := help
.PHONY: help install demo full deploy mail mail-full test test-ci test-slurm test-slow bench lint schema clean

help: ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

install: $(STAMP) ## Create .venv and install the pinned packages

$(STAMP): pyproject.toml envs/cpu.txt envs/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info[:2] >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	@echo "Installing into $(VENV) (about 5.5 GB, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r envs/cpu.txt -r envs/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# The lock file is the jobs' standard input, so every job of a run holds the lock: after a SIGKILL the next `make demo`
# waits for jobs that are still writing, and only then unlocks Snakemake's folder and goes on.
define run-experiment
	@touch .demo.lock
	@( $(BIN)/python -m dpmixmin.lock && $(BIN)/snakemake --unlock --quiet --configfile $(1) && \
	   $(BIN)/snakemake --cores $(CORES) --rerun-incomplete --quiet reason host progress --configfile $(1) -- all ) < .demo.lock
endef

demo: install ## Run the default experiment on real data and show what it found
	$(call run-experiment,config/config.yaml)
	@echo && cat $(REPORT)/summary.txt

full: install ## Run the whole grid of the demo, with the twice-the-steps check (about 15 minutes)
	$(call run-experiment,config/examples/digits_full.yaml)
	@echo && cat results/digits_full/study/report/summary.txt

deploy: install ## Run the demo's chain as its owner would: a cap, a charged evaluation, a verified bundle (about 3 minutes)
	$(call run-experiment,config/examples/digits_deploy.yaml)
	@echo && $(BIN)/python -m dpmixmin budget --config config/examples/digits_deploy.yaml
	@echo && $(BIN)/python -m dpmixmin verify results/digits_deploy/released/bundle

mail: install ## Language models on real mail: mixture, pretraining, user-level DP fine-tuning (about 21 minutes)
	$(call run-experiment,config/examples/mail.yaml)
	@echo && cat results/mail/study/report/summary.txt

mail-full: install ## The same with three seeds and every cell (hours)
	$(call run-experiment,config/examples/mail_full.yaml)
	@echo && cat results/mail_full/study/report/summary.txt

test: install lint ## Pass the tests
	$(BIN)/python -m pytest

# Debian's packages that only tests need: installed where they are missing and may be. Root must be able to have them, or
# the tests fail; for others they are skipped. Either way they name what is missing.
define install-missing
	@missing=; for program in $(1); do PATH="$$PATH:/usr/sbin" command -v $$program > /dev/null || missing=1; done; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then apt-get -qq update && \
	  DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends $(2); fi
endef
MUST := $$([ "$$(id -u)" = 0 ] && echo 1)

test-ci: install ## Run language models in miniature, slow workflow tests, a browser on the pages, and test-slurm (30 minutes)
	$(call install-missing,chromium chromedriver,chromium chromium-driver)
	DPMIXMIN_NEEDS_BROWSER=$(MUST) $(BIN)/python -m pytest -m ci
	$(MAKE) test-slurm

test-slurm: install ## Run `snakemake --profile slurm` on a real Slurm on this machine, and break it (root, Debian; 20 minutes)
	$(call install-missing,munged slurmctld slurmd srun,slurmctld slurmd slurm-client munge)
	DPMIXMIN_NEEDS_SLURM=$(MUST) $(BIN)/python -m pytest -m slurm

test-slow: install ## Break every privacy rule on purpose, and pass the slow statistics (about 15 minutes)
	$(BIN)/python -m pytest -m slow
	$(BIN)/python tests/mutations/run.py

bench: install ## Print speed ratios against the peers, the accounting table, and how busy the demo keeps the cores
	$(BIN)/python benchmarks/steps.py
	$(BIN)/python benchmarks/noise.py
	$(BIN)/python benchmarks/accounting.py
	$(BIN)/python benchmarks/audit.py
	$(BIN)/python benchmarks/wall.py

lint: install ## Check style and the workflow's form
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/snakemake --lint --quiet

schema: install ## Rewrite config/schema.json after a change of config.py
	$(BIN)/python -m dpmixmin schema > config/schema.json
	$(BIN)/python -c 'from dpmixmin.release.schema import write; write("docs/statement.schema.json")'

clean: ## Delete results and logs (never the ledger: the budget that was spent stays spent)
	rm -rf results logs .snakemake
