# Everything runs in .venv, which these targets make and fill themselves.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Files of tests side by side, in the order of their folders: the longest are among the first.
PYTEST := $(PY) -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
OUT ?= runs/quickstart
SEED ?= 0

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: install quickstart test test-all lint format bench report clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet -e ".[dev,metrics,speech,serve,scale,rollout-cpu]"
# It pins a tqdm older than datasets can use and works with ours; what its agents import is in the dev extra.
	$(PY) -m pip install --quiet --no-deps simuleval==1.1.4
# vLLM asks for wheels that are built for CUDA. Beside a torch that is not they cannot be loaded, and take what finds
# them installed down with them; nothing here needs them.
	$(PY) -c "import sys, torch; sys.exit(torch.version.cuda is None)" \
		|| $(PY) -m pip uninstall --quiet --yes torchaudio torchvision torchcodec
	touch $@

quickstart: install
	$(VENV)/bin/audiorl train recipes/quickstart.py --seed $(SEED) --out $(OUT)

test: install lint
	$(PYTEST)

test-all: install lint
	HYPOTHESIS_PROFILE=explore $(PYTEST) -m "slow or not slow"

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: install
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

bench: install
	for script in bench/*.py; do echo "== $$script"; $(PY) $$script || exit 1; done

report: install
	$(VENV)/bin/audiorl report $(OUT)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
