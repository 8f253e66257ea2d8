"""A profile of one call on a GPU, as text: the operators with most time, and when it was idle."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS = 15


def write_profile(path: Path, call: Callable[[], Any], name: str) -> None:
    """Call once, and write where the time of the GPU went."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds) as profiled:
        started = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    table = profiled.key_averages().table(
        sort_by=by, row_limit=ROWS, max_name_column_width=70, max_src_column_width=40
    )
    lines = [f"{name}: {seconds:.3f} s with the profiler", table]
    if on_gpu:
        busy, kernels = busy_time(profiled.events())
        lines.insert(1, f"GPU idle {1 - busy / seconds:.1%} of the time, {kernels} kernels")
    path.write_text("\n".join(lines) + "\n")
    print("\n".join(lines[:-1]), flush=True)


def busy_time(events: Any) -> tuple[float, int]:
    """Return the seconds in which at least one kernel or copy ran, and their number."""
    from torch.autograd import DeviceType

    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    )
    busy, end = 0.0, 0.0
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return busy / 1e6, len(spans)
