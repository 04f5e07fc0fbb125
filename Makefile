# `make run` and `make test` work from a fresh clone: they set up .venv by themselves.
# A laptop with no GPU saves about 4 GB with: make run TORCH_INDEX=https://download.pytorch.org/whl/cpu
PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BROWSER_STAMP := $(VENV)/.installed-browser
COMPAT := .venv-compat
COMPAT_STAMP := $(COMPAT)/.installed
FINAL := notebooks/08_your_submission.ipynb
# Jupyter starts as root only when told to, and a container's user often is.
ALLOW_ROOT = $(if $(filter 0,$(shell id -u)),--allow-root)

export PYTHONUNBUFFERED = 1
export TILELANG_PRINT_ON_COMPILATION ?= 0

.PHONY: help setup run lab test test-browser test-compat lint notebooks bench clean

help: ## say what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

setup: $(STAMP) ## create .venv with the pinned packages

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.10 or newer (Debian, Ubuntu: apt-get install python3 python3-venv)"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed; name one: make run PYTHON=python3.11"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "no virtual environment could be made (Debian, Ubuntu: apt-get install python3-venv)"; rm -rf $(VENV); exit 2; }
	@echo "Installing into $(VENV): the first time takes some minutes."
	$(BIN)/python -m pip install --quiet -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

run: $(STAMP) ## execute the last notebook, export its final cell to submission.py, judge it
	@echo "1/3  Executing $(FINAL) from the first cell"
	@$(BIN)/python -m moe_lab.lesson.notebooks run $(FINAL)
	@echo "2/3  Exporting its final cell"
	@$(BIN)/moe-lab export $(FINAL) -o submission.py
	@echo "3/3  Judging submission.py"
	@$(BIN)/moe-lab judge submission.py

lab: $(STAMP) ## open JupyterLab on the notebooks
	$(BIN)/jupyter lab --ServerApp.root_dir=notebooks $(ALLOW_ROOT)

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(STAMP) lint ## lint, types and all tests that need no GPU, no browser and no second TileLang
	$(BIN)/pytest -n 2 --dist loadfile -m "not gpu and not browser and not compat"

test-browser: $(BROWSER_STAMP) ## drive JupyterLab in the system's Chromium; screenshots in test-output/
	$(BIN)/pytest tests/browser -m browser -rs

# Only playwright's Python part: it drives the Chromium that is installed and downloads none.
$(BROWSER_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[browser]'
	@touch $@

test-compat: $(COMPAT_STAMP) ## do contest files lower under TileLang 0.1.10, the contest's version?
	$(BIN)/pytest -m compat

# torch and the small packages are shared with .venv through a path file; z3 must lie beside the TileLang that loads it.
$(COMPAT_STAMP): $(STAMP)
	@test -x $(COMPAT)/bin/python || $(BIN)/python -m venv --without-pip $(COMPAT)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$($(COMPAT)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	$(COMPAT)/bin/python -m pip install --quiet --ignore-installed --no-deps tilelang==0.1.10 apache-tvm-ffi==0.1.11 z3-solver==4.15.4.0
	@touch $@

notebooks: $(STAMP) ## execute every notebook again, normalise it, and make the README parts anew
	$(BIN)/python -m moe_lab.lesson.notebooks
	$(BIN)/python tests/lesson/readme_parts.py

bench: $(STAMP) ## time every step on this machine's device
	$(BIN)/moe-lab bench

clean: ## remove what make made (not your submission.py)
	rm -rf $(VENV) $(COMPAT) test-output .pytest_cache .mypy_cache .ruff_cache
