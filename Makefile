# make demo   install, train the debug recipe in eager and in compile mode, compare them in one table
# make test   install, run the whole suite
# make crash-campaign   kill runs 200 times at random moments; a quarter of an hour on two cores
# make check  lint, format check and types

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed

.PHONY: demo test crash-campaign check clean

demo: $(INSTALLED)
	$(VENV)/bin/python -m scripts.demo

test: $(INSTALLED)
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal

crash-campaign: $(INSTALLED)
	$(VENV)/bin/python -m tests.crash_campaign --kills 200

check: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright

# Made again when what is installed changes; the stamp comes last, so that an interrupted install is not taken for one.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt ".[dev]"
	touch $(INSTALLED)

clean:
	rm -rf $(VENV) build *.egg-info
