# make quickstart   install, then train an octic ViT on handwritten digits (CPU, about three minutes with installing)
# make test         install what tests need, then run the quick ones: the first case of each (tests/README.md)
# make test-rest    run all others
# make coverage     the quick tests, and the share of lines of equivit and kernels that they run
# make test-all     both, with every reference file under $EQUIVIT_PARITY
# make install-export   also what export and profile need (jax2onnx, onnx, onnxruntime)
# make docs         build the site of docs/ in build/site; a warning is an error
# make notebooks    run the notebooks and store their outputs: NOTEBOOKS="segmentation depthwise" for some
# make package-test   install the wheel beside Hugging Face's `kernels`, and train outside of the clone (needs the network)
# make fuzz         attack everything that reads files with inputs of its own: make fuzz MINUTES=60
# make soak         kill runs and commands at random moments, and look for what is lost: about 40 minutes

# The suite is planned for two cores; each of its processes waits for an eighth of its time.
PROCESSES ?= 3
VENV ?= .venv
PYTHON ?= $(firstword $(foreach p,python3.12 python3.11 python3.13 python3,$(shell $(p) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $(p))))
RUN = $(VENV)/bin/python
# .ci/run installs by uv.
PIP ?= $(RUN) -m pip
TESTS ?= tests
PYTEST = $(RUN) -m pytest -n $(PROCESSES)
WORKDIR ?= runs/quickstart
MINUTES ?= 10
JAX2ONNX = jax2onnx>=0.17.1,<0.18

.PHONY: quickstart install-export test run-tests test-rest test-recipes test-others test-all coverage docs notebooks package-test fuzz soak lint clean

# On Linux: large arrays in large pages, and memory stays with the process.  Otherwise each training step on a CPU gets
# its memory anew from the kernel, page by page.  (Not arena_max=1: octic steps are slower with it.)
quickstart: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=68719476736
quickstart: $(VENV)/.installed
	$(RUN) -m equivit.train --config=configs/quickstart.py --workdir=$(WORKDIR)

install-export: $(VENV)/.installed-export

test: lint run-tests

run-tests: $(VENV)/.installed-dev $(VENV)/.installed-export
ifeq ($(TESTS),tests)
	$(PYTEST) --dist loadscope --no-loadscope-reorder --part quick tests
else
	$(PYTEST) --dist loadscope --no-loadscope-reorder $(TESTS)
endif

# Order and budgets of the tests: tests/conftest.py.  Where the recipes fail, the others run too.
test-rest:
	$(MAKE) --keep-going test-recipes test-others

# On one virtual device, for which programs compile faster than for eight.
test-recipes: $(VENV)/.installed-dev $(VENV)/.installed-export
	EQUIVIT_DEVICES=1 $(PYTEST) --dist load --part rest tests/recipes

test-others: $(VENV)/.installed-dev $(VENV)/.installed-export
	$(PYTEST) --dist loadscope --no-loadscope-reorder --part rest --ignore=tests/recipes tests

test-all: $(VENV)/.installed-dev
	@test -d "$(EQUIVIT_PARITY)" || { echo "test-all: EQUIVIT_PARITY='$(EQUIVIT_PARITY)' is not a directory of reference files; set it, or run make test."; exit 1; }
	@status=0; $(MAKE) test || status=$$?; $(MAKE) test-rest || status=$$?; exit $$status

coverage: $(VENV)/.installed-dev $(VENV)/.installed-export
	$(PYTEST) --dist loadscope --no-loadscope-reorder --part quick --cov=equivit --cov=kernels --cov-report=term:skip-covered tests

docs: $(VENV)/.installed-docs
	$(VENV)/bin/mkdocs build --strict

notebooks: $(VENV)/.installed-dev $(VENV)/.installed-export
	$(RUN) -m tests.colabs.notebook $(NOTEBOOKS)

# In a fresh environment, whose files a second run keeps.  Neither the clone nor its .venv is on the path there.
package-test: PACKAGE = $(abspath build/package)
package-test: $(VENV)/bin/python
	rm -rf build/lib $(PACKAGE)/wheel $(PACKAGE)/work && mkdir -p $(PACKAGE)/work
	$(RUN) -m venv $(PACKAGE)/venv
	$(RUN) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir=$(PACKAGE)/wheel .
	rm -rf build/lib build/bdist.*
	$(PACKAGE)/venv/bin/pip install --quiet --disable-pip-version-check kernels $(PACKAGE)/wheel/*.whl
	cd $(PACKAGE)/work && $(PACKAGE)/venv/bin/python -P $(abspath tests/package_check.py)

fuzz: $(VENV)/.installed-dev
	$(RUN) -m tests.fuzz --minutes=$(MINUTES)

soak: $(VENV)/.installed-dev $(VENV)/.installed-export
	$(RUN) -m tests.soak

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(RUN) -m tests.wording
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(VENV)/bin/pyright --project pyproject.toml --pythonpath $(RUN)

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "equivit needs Python 3.11, 3.12 or 3.13; none was found.  Name one: make PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: requirements.txt | $(VENV)/bin/python
	$(PIP) install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/.installed-dev: requirements.txt requirements-dev.txt | $(VENV)/bin/python
	$(PIP) install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@ $(VENV)/.installed

# In two steps, for the reason that requirements-export.txt gives.
$(VENV)/.installed-export: requirements-export.txt | $(VENV)/.installed
	$(PIP) install --quiet --disable-pip-version-check -r requirements-export.txt
	$(PIP) install --quiet --disable-pip-version-check --no-deps "$(JAX2ONNX)"
	@touch $@

$(VENV)/.installed-docs: requirements-docs.txt | $(VENV)/bin/python
	$(PIP) install --quiet --disable-pip-version-check -r requirements-docs.txt
	@touch $@

clean:
	rm -rf $(VENV) .venv-newest .cache build *.egg-info
