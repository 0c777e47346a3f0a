# Every target does its own set-up: a virtual environment in .venv with what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip's own notices are not ours to print; of torch and the like few modules are ever imported, and compiled then
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check
# a notebook that waits for ever must not hold up whoever waits for the site
DOCS_LIMIT_S ?= 2400
DATA ?= $(if $(PERFMODEL_DATA),$(PERFMODEL_DATA),../shared/data)

# tests and notebooks start the package in dozens of processes: compiled once, even where that is switched off
export PYTHONDONTWRITEBYTECODE :=

.PHONY: plan test slow smoke-bounds grid mutations reading walk lint format docs notebooks bench validate blind papers gate live distir checksums clean

plan: $(VENV)/.plan ## search GPT-3 175B on 1024 A100s for Megatron-Core with the shipped calibration
	@mkdir -p out
	$(BIN)/perfmodel search --model gpt3-175b --cluster dgx-a100 --devices 1024 --global-batch 1536 \
	  --framework megatron-core --top 2 --script --out out/plan.json --trace out/plan.trace.json.gz --png out/plan.png

test: $(VENV)/.test ## all tests; those that need PERFMODEL_DATA, torch or a browser skip, and say so, where it is absent
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

slow: $(VENV)/.test ## the tests that 'make test' leaves out: more processes of torch, more moments of interrupts, live runs, published servers, code of the pages, whole spaces
	$(BIN)/python -m pytest -n 2 -m slow

smoke-bounds: $(VENV)/.test ## the smoke set at the lowest versions of dependencies and at the newest, on Python 3.11 to 3.13
	$(BIN)/python .ci/bounds.py

grid: $(VENV)/.test ## distributed programs against sequential ones and predictions in every combination of degrees, and gradients of the step time
	PERFMODEL_FULL_GRID=1 $(BIN)/python -m pytest -n 2 tests/ir/distribute/test_equality.py tests/ir/distribute/test_against_prediction.py tests/prediction/test_step_time_function.py

mutations: $(VENV)/.test ## change a hundred formulas, one at a time, and count how many the tests of their rooms notice; an hour
	$(BIN)/python tests/mutants.py --count 100 --seed $(or $(SEED),1)

reading: $(VENV)/.plan ## how hard each room is to read: lines, names, nesting, comments
	$(BIN)/python tests/reading.py

walk: $(VENV)/.plan ## functions and files that one prediction runs, and how often it changes rooms
	$(BIN)/python tests/walk.py

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: $(VENV)/.docs ## run the notebooks and keep their outputs in them, for code hosts to show; minutes
	$(BIN)/python notebooks/run.py

docs: $(VENV)/.docs ## the documentation site in out/docs, notebooks run; a warning is an error
	timeout --kill-after=30 $(DOCS_LIMIT_S) $(BIN)/python -m sphinx --fail-on-warning --keep-going --jobs 2 --quiet \
		-d out/doctrees docs out/docs || { status=$$?; [ $$status -ne 124 ] && [ $$status -ne 137 ] || \
		echo "docs: not built in $(DOCS_LIMIT_S) s and stopped; give DOCS_LIMIT_S=SECONDS for more" >&2; exit $$status; }

bench: $(VENV)/.bench ## ratios within one run, written to out/bench.json
	$(BIN)/python benchmarks/run.py

validate: $(VENV)/.plan ## every measured kernel and published run under PERFMODEL_DATA: validate/report.md and .json, out/report.html
	$(BIN)/python validate/run.py --data $(DATA)
	$(BIN)/python validate/factors.py --data $(DATA)

blind: $(VENV)/.plan ## record the first look at new sources of published runs, then score it beside today's predictions: validate/blind
	$(BIN)/python validate/blind.py --data $(DATA) --record
	$(BIN)/python validate/blind.py --data $(DATA)

papers: $(VENV)/.bench ## the papers' tables and figures beside ours, as pages of docs/systems show them, runs on ranks as measured; 10 minutes
	$(BIN)/python validate/papers.py
	$(BIN)/python validate/schedules.py --data $(DATA)
	$(BIN)/python validate/search.py --data $(DATA) distir
	$(BIN)/python validate/distir.py tables
	$(BIN)/python validate/distsim_profiling.py
	$(BIN)/python validate/emulation.py --out validate --only
	$(BIN)/python validate/emulation_wire.py --only

gate: $(VENV)/.plan ## fails where a source of published runs is less accurate than the committed report says
	$(BIN)/python validate/gate.py --data $(DATA)

live: $(VENV)/.plan ## calibrate on 2 ranks, predict, run on up to 8 in network namespaces (Linux, root), compare; 20 minutes
	$(BIN)/python validate/live.py --out out

distir: $(VENV)/.test ## DistIR's tables through programs and on real ranks, from where it stopped: validate/distir.md; an hour from scratch
	$(BIN)/python validate/distir.py tables ranks

checksums: $(VENV)/.plan ## write the checksums of the package's fitted files anew, after one was changed by hand or merged
	$(BIN)/python validate/checksums.py

clean:
	rm -rf $(VENV) out

# One stamp per set of extras; pyproject.toml alone decides what they hold.
EXTRAS_plan := viz
EXTRAS_test := test
EXTRAS_lint := lint,test
EXTRAS_bench := bench
EXTRAS_docs := docs
EXTRAS_browser := test,browser
EXTRAS_torch := test,zoo
# the version that continuous integration tests with; the package takes older ones and newer ones too
PINS_torch := torch==2.13.0

$(VENV)/.plan $(VENV)/.test $(VENV)/.lint $(VENV)/.bench $(VENV)/.docs $(VENV)/.browser $(VENV)/.torch: $(VENV)/.%: pyproject.toml | $(BIN)/python
	$(PIP) --editable ".[$(EXTRAS_$*)]" $(PINS_$*)
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "perfmodel needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
