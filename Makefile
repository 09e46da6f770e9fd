# Each target sets up what it needs: a virtual environment in .venv, made once. No step by hand before it.
#
#   make demo    compile, prove, draw and run a plan for 2 x 2 x 2 ranks, and compare it with one process
#   make test    the tests, in minutes            make test-all    the long proofs as well
#   make lint    formatting, lint and types       make bench       the benchmarks, if there are any
#   make reference    docs/reference, generated from the code
#   make docs    the site of the documentation, in out/site; first its pictures whose contents have changed
#   make release      the archives in dist/, checked, and the wheel installed on each Python of PYTHONS
#   make coverage     statements that the tests reach, in out/coverage
#   make page    the program of interactive pages, viz/page/built.js, from its sources beside it, linted; needs node
#   make gpu     what only a GPU can show: its tests, then its benchmarks; docs/gpu.md says more

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
INSTALLED := .venv/.installed
BENCHMARKS := $(sort $(shell grep -l __main__ benchmarks/*.py))

# Commands come from .venv, also in what is printed. Ranks and test workers share the cores: one thread each.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export OMP_NUM_THREADS := 1
# The ranks that tests start find the package compiled.
unexport PYTHONDONTWRITEBYTECODE

# A file is run by one worker, which has its fixtures and caches once; files in their order: the last ones are short.
# Three workers keep two cores busy: much of a test's time is waiting. The long proofs of one file are shared.
PYTEST := python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
BUNDLE := --bundle --minify --format=iife --target=es2022 --charset=utf8 --loader:.css=text
DEMO := --set train.epochs=2 --set log.every=5
SHOW := @show() { printf '\n$$ %s\n' "$$*"; "$$@"; }; show

.PHONY: demo test test-all lint bench reference docs page release coverage gpu gpu-tests gpu-bench

demo: $(INSTALLED)
	@mkdir -p out && rm -f out/eight.jsonl out/one.jsonl
	@printf '\n\n== A plan for 2 x 2 x 2 ranks: compile it, prove it, read it, time it, draw it\n'
	$(SHOW) quintsched compile --schedule 1f1b --mesh dp=2,pp=2,tp=2 --microbatches 8 -o out/plan.json
	$(SHOW) quintsched check out/plan.json
	$(SHOW) quintsched show out/plan.json
	$(SHOW) quintsched simulate out/plan.json
	$(SHOW) quintsched render out/plan.json -o out/timeline.png
	@printf '\n\n== A Vision Transformer learns handwritten digits on 8 processes, by this plan\n'
	$(SHOW) quintsched run out/plan.json examples/full_3d.yaml $(DEMO) --set log.path=out/eight.jsonl
	@printf '\n\n== The same in one process\n'
	$(SHOW) quintsched run examples/baseline.yaml $(DEMO) --set log.path=out/one.jsonl
	@printf '\n\n== Their losses side by side\n'
	$(SHOW) python examples/compare_curves.py out/eight.jsonl out/one.jsonl

test: $(INSTALLED)
	$(PYTEST)

test-all: $(INSTALLED)
	$(PYTEST) -m "" --timeout 1800 --dist worksteal

lint: $(INSTALLED)
	ruff format --check .
	ruff check .
	mypy

bench: $(INSTALLED)
	@for file in $(BENCHMARKS); do printf '\n== %s\n' "$$file"; python "$$file"; done
	@test -n "$(BENCHMARKS)" || echo "benchmarks/ is empty"

reference: $(INSTALLED)
	python -m docs.reference.generate

docs: $(INSTALLED)
	python -m docs.site.pictures
	rm -rf out/pages out/site
	python -m docs.site.prepare out/pages
	python -m pip install -q -e '.[docs]' -c constraints.txt
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet
	@echo 'the site begins at out/site/index.html'

# Pythons that a wheel is installed on: all from 3.11 whose command works here. Tools are in an environment of their own.
# With pyenv, further ones work by: PYENV_VERSION=3.11.7:3.12.1 make release
PYTHONS ?= $(foreach version,3.11 3.12 3.13 3.14,$(shell python$(version) -c 'import sys; print(sys.executable)' 2>/dev/null))
TOOLS := out/release/tools

release: $(INSTALLED)
	rm -rf dist out/release && mkdir -p out/release && $(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check '.[release]'
	$(TOOLS)/bin/validate-pyproject pyproject.toml
	$(TOOLS)/bin/python -m build --outdir dist
	$(TOOLS)/bin/twine check --strict dist/*
	$(TOOLS)/bin/check-wheel-contents dist/*.whl
	python -m tests.release dist/*.whl out/release $(PYTHONS)

coverage: $(INSTALLED)
	python -m pip install --quiet --disable-pip-version-check 'pytest-cov>=5'
	$(PYTEST) --cov=quintsched --cov=runtime --cov=viz --cov-report=term:skip-covered --cov-report=html:out/coverage

page:
	npx --yes eslint@9.39.2 --config tests/viz/page/eslint.config.mjs viz/page/*.js
	npx --yes esbuild@0.28.2 viz/page/main.js $(BUNDLE) --outfile=viz/page/built.js

gpu:
	@$(MAKE) --no-print-directory -k gpu-tests gpu-bench

# NCCL=…/libnccl.so.2 takes the place of torch's, GPU_TESTS and GPU_BENCH are further arguments.
gpu-tests gpu-bench: export PATH := $(subst $(CURDIR)/.venv/bin:,,$(PATH))
gpu-tests gpu-bench: export PYTHON := $(PYTHON)
gpu-tests gpu-bench: export MAKE := $(MAKE)
gpu-tests gpu-bench: WITH_NCCL = $(if $(NCCL),env LD_PRELOAD=$(abspath $(NCCL)))

gpu-tests:
	@source benchmarks/gpu_parts/python.sh; $(WITH_NCCL) "$$python" -m pytest tests/gpu -p no:benchmark -rs --durations 10 $(GPU_TESTS)

gpu-bench:
	@source benchmarks/gpu_parts/python.sh; $(WITH_NCCL) "$$python" benchmarks/gpu.py $(GPU_BENCH)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "quintsched needs Python 3.11 or newer; name one: make PYTHON=python3.12" >&2; exit 1; }
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@
