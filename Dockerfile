# The package in a container.
#   docker build -t tba .                                         # CPU
#   docker run --rm -v "$PWD/runs:/work/runs" tba tba train
# For GPUs, with vLLM, whose kernels Triton compiles with gcc and python3-dev, and with what KubeRay asks of Ray; not yet run on
# a GPU:
#   docker build -t tba-cuda --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 \
#       --build-arg CONSTRAINTS=constraints-gpu.txt --build-arg EXTRAS=lora,math,vllm --build-arg PACKAGES='ray[default]' .
#   docker run --rm --gpus all --shm-size=16g -v "$PWD/runs:/work/runs" tba-cuda tba check --machine
ARG BASE=python:3.12-slim

FROM ${BASE} AS system
RUN apt-get update && apt-get install -y --no-install-recommends make wget python3 python3-venv python3-dev gcc && rm -rf /var/lib/apt/lists/*
WORKDIR /work
COPY . .
# pip's options, such as an index with PyTorch for the CPU only
ARG PIP_EXTRA_INDEX_URL=

FROM system AS test
RUN make test

FROM system AS run
ARG EXTRAS=lora,math
ARG PACKAGES=
ARG CONSTRAINTS=constraints.txt
RUN python3 -m venv .venv && .venv/bin/pip install --no-cache-dir -c ${CONSTRAINTS} -e ".[${EXTRAS}]" ${PACKAGES}
ENV PATH=/work/.venv/bin:$PATH
CMD ["tba", "--help"]
