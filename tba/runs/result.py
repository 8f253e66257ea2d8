"""The result of a run that was started from Python."""

from dataclasses import dataclass
from pathlib import Path

from pandas import DataFrame

from tba.runs.log import METRICS, read
from tba.runs.summary import Summary


@dataclass(frozen=True)
class Result:
    """The summary of a run, and the folder with everything that it wrote."""

    summary: Summary
    folder: Path

    def metrics(self) -> DataFrame:
        """Return the metrics of each training step, in order, with a column `step`."""
        return self._table(evaluations=False)

    def evaluations(self) -> DataFrame:
        """Return the scores of each evaluation as it ended; `step` is the version evaluated."""
        return self._table(evaluations=True)

    def _table(self, evaluations: bool) -> DataFrame:
        rows = read(self.folder / METRICS)
        return DataFrame([row for row in rows if ("eval/sampled_reward" in row) == evaluations])
