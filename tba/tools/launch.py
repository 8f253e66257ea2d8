"""Batch files for Slurm, which start Ray on the machines of a job, and a run on them.

Nothing is submitted. Partition, time, memory and account are options of `sbatch`. Submitting the
file again continues the run from its newest checkpoint. A run that ended before its first
checkpoint is moved aside, and starts over.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tba.config.schema import load

HEAD = """#!/bin/bash
#SBATCH --job-name=tba
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
"""
START = """
set -euo pipefail
cd -- {folder}
export PATH={programs}:"$PATH"

# in a job with a time limit, save and stop 5 minutes before it
left=0
if [ -n "${{SLURM_JOB_END_TIME:-}}" ]; then
    left=$((SLURM_JOB_END_TIME - $(date +%s) - 300))
fi
train=(timeout --signal=TERM "$((left > 0 ? left : 0))" tba train)
run={run}
saved=("$run"/checkpoints/step-*)
if [ -d "${{saved[0]}}" ]; then  # submitted again, or requeued
    train+=(--resume "$run" {settings})
else
    if [ -e "$run/metrics.jsonl" ] || [ -e "$run/checkpoints" ]; then  # it ended before it saved
        # a run that is still training holds the lock: it stays, and tba train says so
        flock --nonblock "$run/.lock" mv -T -- "$run" "$run.lost-$(date +%Y%m%d-%H%M%S)" || true
    fi
    train+=({config} {settings})
fi

"""
ONE = """srun --nodes=1 --ntasks=1 "${train[@]}"
"""
SEVERAL = """# Ray accepts only processes that have the token of this job
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | cut -d' ' -f1)
address=$address:$((20000 + SLURM_JOB_ID % 10000))

srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --kill-on-bad-exit=0 \\
    ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES"{gpus} \\
    -- "${{train[@]}}" runtime.address="$address"
"""


def batch_file(path: Path, settings: Sequence[str], nodes: int, gpus: int | None) -> str:
    """Return an sbatch file that trains with the config at `path` and these settings.

    `gpus` is the number of GPUs per node. With one node, the run starts a private Ray; with more,
    Ray's `symmetric-run` starts a cluster. ValueError if the config is wrong, or cannot use them.
    """
    if nodes < 1 or (gpus is not None and gpus < 0):
        raise ValueError(f"--nodes {nodes} --gpus {gpus}: give 1 or more nodes, 0 or more GPUs")
    config = load(path, settings if nodes == 1 else [*settings, "runtime.address=auto"])
    if config.runtime.use == "local":
        raise ValueError("runtime.use=local is one process; start it with `tba train`")
    if not config.run.folder:
        raise ValueError(
            "run.folder is missing: name a folder that all machines see, such as"
            " run.folder=/shared/runs/first; the job is continued from it"
        )
    run = str(Path(config.run.folder).expanduser())  # the shell does not expand a quoted ~
    of_run = [each for each in settings if each.partition("=")[0].strip() != "run.folder"]
    start = START.format(
        folder=shlex.quote(str(Path.cwd())),
        programs=shlex.quote(str(Path(sys.executable).parent)),
        run=shlex.quote(run),
        config=shlex.join([str(path.absolute()), f"run.folder={run}"]),
        settings=shlex.join(of_run),
    )
    requested = f"#SBATCH --gpus-per-node={gpus}\n" if gpus else ""
    counted = "" if gpus is None else f" --num-gpus {gpus}"
    steps = ONE if nodes == 1 else SEVERAL.format(gpus=counted)
    return HEAD.format(nodes=nodes) + requested + start + steps
