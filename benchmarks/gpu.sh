#!/usr/bin/env bash
# Measure everything that needs a GPU, in less than ten minutes on one card, without a network.
#
#     bash benchmarks/gpu.sh                        # PYTHON=... names another interpreter
#     bash benchmarks/gpu.sh --parts engine FSDP2   # only the parts whose names have one of these
#     bash benchmarks/gpu.sh --plan 24 40 80 141    # only print what fits cards of so many GB
#
# Each part takes the token budget, and gradient checkpointing if needed, with which it fits the card.
# Parts that need more than the machine has, such as several cards, and parts whose packages cannot be
# imported, are named and skipped. Without a GPU, tiny models show in some minutes that the script works.
set -e
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$(command -v "$python")" ] || python=python3
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_WAIT_POLICY=PASSIVE
exec "$python" benchmarks/_gpu.py "$@"
