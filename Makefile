# make train      set up .venv, then train the embedded toy          make train ARGS="--sampler pos --seed 1"
# make reproduce-toy   the whole way on the toy: prepare hard prompts, train three samplers, evaluate, tables and plots
# make figures    every comparison of docs/claims.md on the toy, figures and tables          make figures ARGS=--quick
# make test       set up .venv, then lint and the fast tests
# make test-all   the slow tests too
# The set-up takes the CUDA requirements where nvidia-smi answers, the CPU ones elsewhere.

PYTHON := $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
REQUIREMENTS := $(if $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes),requirements.txt,requirements-cpu.txt)

train: .venv/ready
	$(BIN)/torchrun --standalone train.py $(ARGS)

TOY := out/reproduce-toy
RUNS := $(TOY)/grpo $(TOY)/pos $(TOY)/balance
reproduce-toy: .venv/ready
	$(BIN)/python scripts/prepare.py --source out/toy-demo/train.jsonl --model out/toy-demo/model --preset hard \
	  --out $(TOY)/hard.jsonl
	for run in $(RUNS); do \
	  $(BIN)/torchrun --standalone train.py --config configs/toy-hard.yaml --train_data $(TOY)/hard.jsonl \
	    --sampler $${run##*/} --eval_every 20 --out $(TOY) --name $${run##*/} || exit 1; \
	done
	$(BIN)/python scripts/evaluate.py --model out/toy-demo/model $(RUNS) --data out/toy-demo/test.jsonl $(TOY)/hard.jsonl \
	  --k 32 --max_response_tokens 32 --out $(TOY)/eval
	$(BIN)/python -m experiments.plot $(RUNS) --out $(TOY)/plots
	$(BIN)/python -m experiments.plot $(TOY)/eval/results.json --out $(TOY)/eval

figures: .venv/ready
	$(BIN)/python -m experiments.figures $(ARGS)

test: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pytest -q -m "not slow"

test-all: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/pytest -q

# The marker is written last: a set-up that was interrupted starts over.
.venv/ready: $(REQUIREMENTS) requirements-dev.txt
	@echo "Setting up .venv with $(REQUIREMENTS): a few minutes, about 4 GB on a CPU machine."
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --upgrade pip
ifeq ($(REQUIREMENTS),requirements-cpu.txt)
	$(BIN)/pip install -q "torch==2.13.0+cpu" || \
	  $(BIN)/pip install -q "torch==2.13.0+cpu" --index-url https://download.pytorch.org/whl/cpu
endif
	$(BIN)/pip install -q -r $(REQUIREMENTS) -r requirements-dev.txt
ifeq ($(REQUIREMENTS),requirements-cpu.txt)
	$(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec  # unused; CUDA builds of them break a CPU torch
endif
	@touch $@

.PHONY: train reproduce-toy figures test test-all
