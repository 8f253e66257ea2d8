"""Errors that several parts of the package raise and handle."""


class StepError(RuntimeError):
    """A training step failed before it changed any weight: the run is saved and ends."""


class NotFinite(StepError):
    """Numbers of a step, or the policy's logits with weights of `version`, are not finite."""

    def __init__(self, problem: str = "", version: int | None = None) -> None:
        advice = "lower trainer.learning_rate" if version else "use another model, or fp32"
        policy = f"the policy of version {version} gives logits that are not finite; {advice}"
        super().__init__(problem or policy)
        self.version = version


class WrongReference(ValueError):
    """Policy and reference differ in the first step; no weight has changed."""


class TrainerLost(RuntimeError):
    """A rank of the trainer has died, failed or timed out; all ranks have ended.

    Nothing can be saved: the run continues from its newest checkpoint.
    """


class SearchError(RuntimeError):
    """Search cannot continue. The run is saved before it ends."""


class RewardError(SearchError):
    """Fault of the reward function; the message contains its traceback."""


class EngineError(SearchError):
    """Fault of an engine, not of the user's code or settings: its searcher is restarted."""


class NoAnswerError(TimeoutError):
    """Searchers do not answer. The run saves without them and stops."""


class ClusterLostError(NoAnswerError):
    """Ray has died or does not answer."""


class Interruption(KeyboardInterrupt):
    """A signal has ended a search or an evaluation. The run saves, and a resumed run repeats it."""
