# The README's commands in a container.
#   docker build -t tba .                                         # CPU
#   docker build -t tba-cuda --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 .
#   docker run --rm -v "$PWD/runs:/work/runs" tba tba train
ARG BASE=python:3.12-slim

FROM ${BASE} AS system
RUN apt-get update && apt-get install -y --no-install-recommends make python3 python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /work
COPY . .
# pip's options, such as an index with PyTorch for the CPU only
ARG PIP_EXTRA_INDEX_URL=

FROM system AS test
RUN make test

FROM system AS run
ARG EXTRAS=lora,math
RUN python3 -m venv .venv && .venv/bin/pip install --no-cache-dir -c constraints.txt -e ".[${EXTRAS}]"
ENV PATH=/work/.venv/bin:$PATH
CMD ["tba", "--help"]
