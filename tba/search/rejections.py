"""End of a run that has too many rejected samples."""

from collections import deque

from tba.engines import RewardError, SearchError
from tba.search.result import SearchStats
from tba.search.verdicts import ON_PURPOSE, TRUNCATED

WINDOW = 64
"""Samples that must have been scored before their rejections count."""
TRUNCATED_AT_MOST = 256
"""Samples in a row that may be rejected because they are cut off, before the run stops."""


class RejectionMonitor:
    """Stops the run when more than `max_share` of the last 64 or more samples were rejected.

    Samples that are left out on purpose do not count, neither as rejected nor as samples.
    """

    def __init__(self, max_share: float):
        self._max_share = max_share
        self._recent = deque[SearchStats]()
        self._truncated = 0

    def add(self, stats: SearchStats) -> None:
        """Add the statistics of one search; RewardError if too many samples were rejected."""
        self._count_truncated(stats)
        if not stats.scored:
            return
        self._recent.append(stats)
        total = sum(one.scored for one in self._recent)
        while total - self._recent[0].scored >= WINDOW:
            total -= self._recent.popleft().scored
        recent = SearchStats()
        for one in self._recent:
            recent.add(one)
        for reason in ON_PURPOSE:
            del recent.rejected[reason]
        rejected = recent.rejected.total()
        if total >= WINDOW and rejected > self._max_share * total:
            reasons = ", ".join(f"{reason}: {n}" for reason, n in recent.rejected.items())
            raise RewardError(
                f"{rejected} of the last {total} samples were rejected ({reasons}), more than"
                f" reward.max_rejected = {self._max_share}; fix the scoring function. The last"
                f" error was:\n{recent.last_rejection}"
            )

    def _count_truncated(self, stats: SearchStats) -> None:
        """Count the samples in a row that were cut off; SearchError if nothing else is left."""
        count = stats.counts["samples_generated"] + stats.counts["rollouts_generated"]
        cut_off = 0 < count == stats.rejected[TRUNCATED.reason]
        self._truncated = self._truncated + count if cut_off else 0
        if self._truncated >= TRUNCATED_AT_MOST:
            raise SearchError(
                f"the last {self._truncated} samples were all cut off by sampling.max_tokens, and"
                " rejected (sampling.truncated = reject), so that nothing is left to train on;"
                " raise sampling.max_tokens, or set sampling.truncated=keep"
            )
