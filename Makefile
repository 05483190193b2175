# make demo                 compile, verify, run and measure SmolLM2-135M-Instruct
# make demo MODEL=DIR       the same with any Hugging Face directory
# make test                 every check that a change must pass
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
OUT    := out
PROMPT ?= What is the capital of France?

SMOLLM2 := .cache/smollm2-135m
MODEL   ?= $(SMOLLM2)
NAME    := $(notdir $(patsubst %/,%,$(MODEL)))
CALBIN  := $(OUT)/$(NAME).calbin
# All of the model's files count: new weights under an old config must be compiled again. A hub's name has none.
SOURCES := $(if $(filter $(SMOLLM2),$(MODEL)),$(SMOLLM2)/config.json,$(wildcard $(MODEL)/*.json $(MODEL)/*.safetensors))
export PROMPT

.PHONY: help setup demo lint test portability bench fuzz sweep clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY) ## create .venv and install the project into it

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[hf,dev]' -c constraints.txt
	touch $@

# The directory appears by rename, so the file's presence says that all of it is there.
$(SMOLLM2)/config.json: | $(READY)
	$(BIN)/python scripts/fetch_smollm2.py $(@D)

$(CALBIN): $(SOURCES) | $(READY)
	mkdir -p $(@D)
	$(BIN)/calc compile '$(MODEL)' -o $@

demo: $(CALBIN) ## compile MODEL, verify the artefact, answer PROMPT and measure
	$(BIN)/calc verify $(CALBIN)
	$(BIN)/calc run $(CALBIN) -p "$$PROMPT" --stats
	$(BIN)/calc bench $(CALBIN)

lint: $(READY) ## style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint ## all checks
	$(BIN)/pytest -n 2

portability: $(READY) ## all tests as on other machines: lower instruction sets; 1, 2 and 4 threads. QUICK=1: a fixed part
	$(BIN)/python scripts/portability.py $(if $(QUICK),--quick)

bench: $(CALBIN) ## measure MODEL's artefact
	$(BIN)/calc bench $(CALBIN)

fuzz: $(READY) ## damage artefacts at random for a while; HYPOTHESIS_PROFILE=fuzz raises the number of examples
	HYPOTHESIS_PROFILE=fuzz $(BIN)/pytest -n 2 -k fuzz

sweep: $(READY) ## the cases that tests leave out: every cut on every board, every scheme on every partition
	$(BIN)/pytest -n 2 -m sweep

clean: ## remove what was built; downloads in .cache stay
	rm -rf $(OUT) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache $(VENV)
