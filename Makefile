# Everything runs in .venv, which these targets make and fill. quickstart installs the base package only; test what the fast
# tests need; test-slow and docs everything: vLLM, Ray, DeepSpeed, a browser. Tests that need one of these are skipped
# without it and say so.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Without an NVIDIA GPU: a CPU build of torch, and vLLM for the CPU.
GPU := $(shell command -v nvidia-smi)
CONSTRAINTS := $(if $(GPU),,--constraint constraints-cpu.txt)
VLLM := $(if $(GPU),gpu,rollout-cpu)
PIP := $(PY) -m pip install --quiet $(CONSTRAINTS)
# Test files run in parallel, the longest first (tests/conftest.py). A worker that dies ends the run: with another in its
# place the run would wait for the dead one's tests forever.
PYTEST := $(PY) -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
OUT ?= runs/quickstart
SEED ?= 0

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: quickstart install install-all test test-slow test-all lint format docs audit check-base report clean

quickstart: $(VENV)/.base
	$(VENV)/bin/audiorl train quickstart --seed $(SEED) --unseen unseen_speakers --out $(OUT)

install: $(VENV)/.installed

install-all: $(VENV)/.installed-all

$(PY):
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip

$(VENV)/.base: pyproject.toml constraints-cpu.txt | $(PY)
	$(PIP) -e .
	touch $@

$(VENV)/.installed: $(VENV)/.base
	$(PIP) -e ".[dev,metrics,speech,serve,loggers,simuleval]"
# It pins an older tqdm than datasets needs; see the extra simuleval in pyproject.toml.
	$(PY) -m pip install --quiet --no-deps simuleval==1.1.4
	touch $@

$(VENV)/.installed-all: $(VENV)/.installed
	$(PIP) -e ".[scale,docs,$(VLLM)]"
# vLLM brings builds of these for CUDA. With a CPU build of torch they cannot be loaded, and packages that find them
# installed fail with them. Nothing here needs them.
	$(PY) -c "import sys, torch; sys.exit(torch.version.cuda is None)" \
		|| $(PY) -m pip uninstall --quiet --yes torchaudio torchvision torchcodec
# The tests of audiorl view drive this browser. Without it, and without the rights to install it, they are skipped.
	command -v chromium >/dev/null || ! command -v apt-get >/dev/null || [ "$$(id -u)" != 0 ] \
		|| { apt-get update --quiet && apt-get install --yes --quiet --no-install-recommends chromium; } \
		|| echo "no chromium: the browser tests of audiorl view are skipped"
	touch $@

test: lint
	$(PYTEST)

test-slow: install-all
	$(PY) -m pytest -m large
	HYPOTHESIS_PROFILE=explore $(PYTEST) -m slow --durations 30

test-all: install-all lint
	$(PY) -m pytest -m large
	HYPOTHESIS_PROFILE=explore $(PYTEST) -m "not large"

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: install
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

docs: install-all
	$(VENV)/bin/mkdocs build --strict

# Licences of the installed packages, and published vulnerabilities where there is a network.
audit: install-all
	$(PY) tools/audit.py

# The base package in an environment of its own: no conflict between its dependencies, and the commands start.
check-base:
	rm -rf build/base
	$(PYTHON) -m venv build/base
	build/base/bin/python -m pip install --quiet $(CONSTRAINTS) .
	build/base/bin/python -m pip check
	cd build/base && bin/audiorl train quickstart --tiny --out run && bin/audiorl eval mmau --help && bin/audiorl doctor

report: install
	$(VENV)/bin/audiorl report $(OUT)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
