#!/usr/bin/env bash
# Measure everything that needs a GPU, in less than ten minutes on one card, without a network.
#
#     bash benchmarks/gpu.sh                        # PYTHON=... names another interpreter
#     bash benchmarks/gpu.sh --device cpu --tiny    # shows in a minute that the script works
#
# Parts whose packages cannot be imported are named and skipped.
set -e
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$(command -v "$python")" ] || python=python3
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_WAIT_POLICY=PASSIVE
exec "$python" benchmarks/_gpu.py "$@"
