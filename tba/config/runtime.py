"""The table of a config that says where searchers run, and how many there are."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from tba.config.tables import Count, Finite, Positive, Table, key


class SearcherRange(Table):
    min: Positive = key(1, "searchers without which the run is saved and ends")
    max: Positive = key(1, "searchers that there are at most")


class RuntimeTable(Table):
    use: Literal["local", "ray"] = key(
        "ray",
        "local: search and training alternate in this process, bit-reproducible;"
        " ray: searchers run in processes of their own",
    )
    searchers: int | SearcherRange = key(
        1,
        "number of searcher processes (ray); { min = 2, max = 8 }: as many as the cluster has room"
        " for, while machines join and leave it: docs/scaling.md; 0: train on replay.rollouts alone"
        " (local)",
    )
    publish_every: Positive = key(1, "k: send new weights to the searchers every k steps")
    fresh: Count | None = key(
        None,
        "new groups to wait for at each step; default: 0 on ray, a batch of groups on local",
    )
    max_reuse: Annotated[float, Field(ge=0.01, allow_inf_nan=True)] = key(
        4.0,
        "most times that a sample is trained on, on average over the last 8 to 50 steps: before a"
        " step, the trainer waits for samples (ray), or searches for them (local); inf: no limit",
    )
    lag: Count | None = key(
        None,
        "train new groups exactly this many versions after they were sampled, with search and"
        " training in lockstep; 0, with strategy=recent: on-policy; default: no lockstep",
    )
    prompts_per_task: Positive = key(8, "prompts per search task; default with vllm on ray: 1")
    concurrent_searches: Positive = key(
        2, "tasks a searcher runs at once (ray); default with vllm: 16"
    )
    colocate: Literal["share", "sleep"] = key(
        "share",
        "sleep: the engine gives its memory up while the trainer trains (local, engine=vllm)",
    )
    address: str | None = key(None, "Ray cluster to join; default: start a private one on loopback")
    task_deadline: Finite = key(600.0, "seconds for a task before its searcher is restarted")
    start_deadline: Finite = key(300.0, "seconds that Ray or a searcher may take to start")
    cluster_deadline: Finite = key(
        60.0, "seconds in which Ray must answer before the run is saved and ends (ray)"
    )
    gather_deadline: Finite = key(1800.0, "seconds the trainer waits for a batch of groups")
    max_restarts: Count = key(10, "restarts of searchers before the run fails (ray)")
    cores: Literal["divide", "share"] = key(
        "divide", "divide: pin each process to its own CPU cores; share: no pinning"
    )

    @field_validator("searchers", mode="before")
    @classmethod
    def number_or_range(cls, value: Any) -> Any:
        bounds = value if isinstance(value, dict) else {"min": value, "max": value}
        sizes: list[Any] = [bounds.get("min"), bounds.get("max")]
        whole = len(bounds) == 2 and all(type(size) is int for size in sizes)
        if isinstance(value, SearcherRange) or (whole and 1 <= sizes[0] <= sizes[1]):
            return value
        if value == 0 and type(value) is int:
            return value
        raise ValueError(
            f"runtime.searchers = {value!r}: write a number of 1 or more, or {{min=2,max=8}}"
        )

    @property
    def most_searchers(self) -> int:
        if isinstance(self.searchers, int):
            return max(1, self.searchers)  # without any, this process evaluates
        return self.searchers.max
