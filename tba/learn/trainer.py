"""A trainer in one process: a batch of groups becomes one optimizer step."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tba.config.plugins import Plugin
from tba.config.schema import Config
from tba.engines import engine_in_bf16
from tba.errors import NotFinite, StepError, WrongReference
from tba.learn import TrainerSizes, publish, state
from tba.learn.checks import check_lengths, warm_up
from tba.learn.host import HostCopy
from tba.learn.micro_batches import (
    MicroBatch,
    filler,
    imbalance,
    split_batch,
)
from tba.learn.optimizer import Sums, build_optimizer, learning_rate
from tba.learn.policy import Policy, PolicyOutput
from tba.models.forward import compile_layers, enable_gradient_checkpointing, packing
from tba.models.lora import load_placed
from tba.models.pretrained import computes_in_bf16
from tba.models.sharding import fill_model, load_for_ranks, reshard, shard
from tba.objectives import Objective, checked_loss, group_metrics
from tba.streams import Use, seed_of
from tba.types import Batch, TokenBatch
from tba.weights import Direct, Publication, Transport, published, trained


@dataclass(frozen=True)
class TrainerSetup:
    """Settings from which a trainer is built, in this process or in a rank's."""

    config: Config
    objective: Plugin
    context: int
    """Maximum number of tokens of a prompt and its response together."""
    extremes: tuple[np.ndarray, np.ndarray]
    """Tokens of the shortest prompt and of the longest one."""
    probe_prompt: int
    """Tokens of a probe's prompt."""
    checks_reference: bool
    """Whether the first step checks that the reference is the policy."""

    def build(
        self,
        device: str,
        rank: int | None = None,
        gather: "Callable[[list[MicroBatchResult]], list[MicroBatchResult]]" = list,
        transport: Transport | None = None,
    ) -> "SingleTrainer":
        """Load the model in dtype `trainer.weights`, or with an adapter; return its trainer.

        One of several ranks keeps its shard of each tensor, and gathers the results of all ranks.
        Without a transport, searchers are in this process.
        """
        torch.manual_seed(seed_of(self.config.run.seed, Use.TORCH))  # a checkpoint keeps its state
        table = self.config.policy
        settings = self.config.trainer
        bf16 = computes_in_bf16(table, device)
        adapter_seed = seed_of(self.config.run.seed, Use.ADAPTER)
        dtype = torch.bfloat16 if settings.weights == "bf16" else torch.float32
        stored = None
        if rank is None:
            model = load_placed(table, device, bf16, dtype, seed=adapter_seed)
        else:
            model, stored = load_for_ranks(table, device, bf16, dtype, adapter_seed)
        if settings.compile:  # before checkpointing, which wraps the compiled layers
            compile_layers(model)
        if table.gradient_checkpointing:
            enable_gradient_checkpointing(model)
        policy = Policy(
            model,
            temperature=self.config.sampling.temperature,
            autocast=bf16,
            share_prompt=table.share_prompt,
            head=self.objective.at(0).head,
        )
        if settings.compile:
            warm_up(policy, self.context)
        if rank is not None:
            after_forward = settings.reshard_after_forward
            shard(policy, model, device, bf16, settings.devices, after_forward)
            if stored is not None:  # after sharding: a rank allocates and reads only its part
                fill_model(policy, model, stored, device)
        samples = self.config.engine.use == "transformers"
        check_lengths(policy, self.extremes, self.config.sampling.max_tokens, samples)
        if rank is None:
            return SingleTrainer(self, policy, gather=gather, transport=transport or Direct())
        reshard(policy)  # the checks have left all layers gathered
        return SingleTrainer(self, policy, rank, settings.devices, gather, transport or Direct())


class MicroBatchResult(NamedTuple):
    """Results of a micro-batch that has run forward and backward."""

    metrics: dict[str, Tensor]
    """Metrics of each group; empty without a group."""
    tokens: int
    padding: int
    """Tokens that the model processed, and how many of them were padding."""


@dataclass
class SingleTrainer:
    """Trainer in this process: master weights, the objective's head, and the optimizer."""

    setup: TrainerSetup
    policy: Policy
    rank: int = 0
    ranks: int = 1
    gather: Callable[[list[MicroBatchResult]], list[MicroBatchResult]] = list
    """Returns the results of all ranks, given this rank's."""
    transport: Transport = field(default_factory=Direct)
    bf16_weights: bool = field(init=False)  # whether searchers get weights in bf16
    optimizer: torch.optim.Optimizer = field(init=False)
    sums: Sums = field(init=False)  # of gradients
    schedule: Any = field(init=False)
    _first_model: str = field(init=False)
    _last: Batch | None = field(default=None, init=False)  # of the last step
    _free: list[publish.Copy] = field(default_factory=list, init=False)
    _free_rows: list[HostCopy] = field(default_factory=list, init=False)
    _free_states: list[HostCopy] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        c = self.setup.config
        self.bf16_weights = engine_in_bf16(c.engine, self.computes_in_bf16)
        self.pass_tokens = c.trainer.pass_tokens
        self.optimizer = build_optimizer(self.policy, c.trainer)
        self.sums = Sums(trained(self.policy.model).values())
        self.schedule = learning_rate(self.optimizer, c.trainer, c.run.steps)
        self._first_model = state.fingerprint(self.policy.model)

    def step(self, batch: Batch, step: int) -> dict[str, float]:
        """Compute this rank's part of a step; return metrics over all ranks."""
        started = time.perf_counter()
        # with several ranks, the others wait for one that fails: nothing can be saved
        with before_weights_change(step) if self.ranks == 1 else nullcontext():
            for name in ("reward", "ref_logp", "behavior_logp"):  # `value` may be NaN: no estimate
                if not batch.tensors()[name].isfinite().all():
                    raise NotFinite(
                        f"step {step + 1}: {name} of the batch is not finite; fix the reward or the"
                        " engine"
                    )
            objective = self.setup.objective.at(step)
            parts = self.micro_batches(batch)
            self.optimizer.zero_grad(set_to_none=True)
            self.sums.parts.clear()
            results = self.gather([self._backward(part, batch, objective) for part in parts])
            found = [each.metrics for each in results if each.metrics]
            # a mean over all groups does not depend on their division into micro-batches
            means = [torch.cat([each[name].double() for each in found]).mean() for name in found[0]]
            # one transfer: each of them waits for the GPU
            metrics = dict(zip(found[0], torch.stack(means).tolist(), strict=True))
            gap = metrics.pop("from_ref")
            most = 0.05 if self.computes_in_bf16 else 0.01
            if step == 0 and self.setup.checks_reference and gap > most:
                raise WrongReference(
                    f"step 1: the policy's log-probs differ from the reference's by {gap:.3g} nats"
                    f" a token on average, more than {most:g}, but both are the initial model."
                    " Likely causes: weights that are missing from the model's files, and are thus"
                    " random; files that changed while the run started"
                )
            tokens = sum(each.tokens for each in results)
            metrics["batch/padding"] = sum(each.padding for each in results) / tokens
            if self.ranks > 1:
                metrics["batch/imbalance"] = imbalance(batch, parts, self.policy.share_prompt)
            max_norm = self.setup.config.trainer.max_grad_norm
            weights = [group["params"] for group in self.optimizer.param_groups]
            norms = [self.sums.clip(each, max_norm) for each in weights]
            if not math.isfinite(metrics["log_ratio"]):
                raise NotFinite(version=step)
            numbers = {**metrics, "gradient norm": sum(norms)}
            wrong = [f"{name} {n}" for name, n in numbers.items() if not math.isfinite(n)]
            if wrong:
                raise NotFinite(
                    f"step {step + 1}: {', '.join(wrong)}, and no weight has changed; lower"
                    " trainer.learning_rate, or change the objective or its options"
                )
            metrics["grad_norm"] = norms[0]  # of the policy, before it was clipped
        metrics["learning_rate"] = self.schedule.get_last_lr()[0]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)  # frees memory for an engine on this device
        self.schedule.step()
        self._last = batch
        metrics["step_time"] = time.perf_counter() - started
        return metrics

    @property
    def probe(self) -> TokenBatch:
        """The tokens of the next publication's probe: from the batch of the last step."""
        s = self.setup
        if self._last is not None:
            sequences = publish.sequences_of(self._last)
            return publish.probe_tokens(sequences, s.context, s.probe_prompt)
        # as long as the longest sequence: positions may depend on that
        longest = len(s.extremes[1]) + s.config.sampling.max_tokens - publish.RESPONSE
        return publish.probe_tokens(s.extremes, s.context, max(longest, s.probe_prompt))

    @property
    def computes_in_bf16(self) -> bool:
        return self.policy.autocast

    @property
    def sizes(self) -> TrainerSizes:
        numbers = sum(p.numel() for p in trained(self.policy.model).values())
        return TrainerSizes(
            parameters=sum(p.numel() for p in self.policy.model.parameters()),
            trained=numbers,
            published_bytes=numbers * (2 if self.bf16_weights else 4),
        )

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """Divide a batch over all ranks; every rank computes the same."""
        return split_batch(
            batch,
            self.pass_tokens,
            self.ranks,
            self.policy.share_prompt,
            packing(self.policy.model),
        )

    def send(self, version: int) -> Publication:
        probe = publish.answer(self.policy, self.probe, version)
        tensors = published(trained(self.policy.model), self.bf16_weights)
        return self.transport.send(version, tensors, probe)

    def copy(self, version: int) -> Callable[[], Publication]:
        copy = self._free.pop() if self._free else publish.Copy(self.policy, self.bf16_weights)
        copy.fill(self.policy)
        return partial(copy.send, version, self.probe, self.transport, self._free)

    def reference(self, version: int) -> Publication:
        tensors = published(trained(self.policy.model), bf16=False)
        return self.transport.send(version, tensors, None)

    def copy_rows(self, version: int, is_reference: bool) -> Callable[[], Publication]:
        """Copy this rank's rows now and return the function that sends them, as `send` does.

        The rows of a reference are in fp32 and have no probe.
        """
        probe = None
        if not is_reference:
            probe = publish.answer(self.policy, self.probe, version)
            reshard(self.policy)  # the probe's pass left the embeddings unsharded
        memory = self._free_rows.pop() if self._free_rows else HostCopy()
        tensors = published(trained(self.policy.model), self.bf16_weights and not is_reference)
        rows = {name: memory.add(tensor) for name, tensor in tensors}
        memory.wait()

        def send() -> Publication:
            sent = self.transport.send(version, rows.items(), probe)
            self._free_rows.append(memory)
            return sent

        return send

    def save(self, folder: Path) -> Callable[[], None]:
        memory = self._free_states.pop() if self._free_states else HostCopy()
        write = state.save_state(
            folder, self.policy, self.optimizer, self.schedule, self._first_model, memory,
            self.rank, self.ranks,
        )  # fmt: skip

        def write_once() -> None:
            write()
            self._free_states.append(memory)

        return write_once

    def load(self, folder: Path) -> None:
        state.load_state(folder, self.policy, self.optimizer, self.schedule, self._first_model)

    def _backward(self, part: MicroBatch, batch: Batch, objective: Objective) -> "MicroBatchResult":
        """Add the gradients of sum(loss) / B for this rank's groups in the micro-batch.

        A group above the token budget runs in pieces of its responses, but a loss needs the whole
        group. So all pieces run once for their log-probs, and once more to backpropagate the loss's
        gradient with respect to these: only one piece has its activations in memory. A rank without
        a group runs a short response along with the other ranks; its gradient is 0.
        """
        groups = part.groups[self.rank]
        chunk = batch.groups(groups) if groups else None
        if chunk is not None and len(part.shapes) == 1:
            return self._loss_of(self.policy(chunk, *part.shapes[0]), chunk, batch, objective)
        pieces: list[Batch] = []
        if chunk is not None:
            pieces += chunk.pieces(self.pass_tokens, self.policy.share_prompt)
        # each pass is a collective of all ranks, so the number of passes must be the same
        fillers = [filler(batch)] * (len(part.shapes) - len(pieces))
        runs = list(zip(pieces + fillers, part.shapes, strict=True))
        result = MicroBatchResult({}, 0, 0)
        leaves: list[list[Tensor]] = [[] for _ in runs]
        if len(runs) > 1:
            with torch.no_grad():
                outputs = [self.policy(piece, *shape) for piece, shape in runs]
            leaves = [[t.requires_grad_() for t in each.differentiable()] for each in outputs]
            if chunk is not None:
                whole = PolicyOutput.concatenate(outputs[: len(pieces)])
                result = self._loss_of(whole, chunk, batch, objective)
        for (piece, shape), own in zip(runs, leaves, strict=True):
            again = self.policy(piece, *shape).differentiable()
            # no gradient: a filler, or a head on the prompt, whose gradient the first piece gets
            slopes = [leaf.grad for leaf in own] or [None] * len(again)
            pairs = zip(again, slopes, strict=True)
            given = [torch.zeros_like(t) if slope is None else slope for t, slope in pairs]
            torch.autograd.backward(again, given)
        return result

    def _loss_of(
        self, output: PolicyOutput, chunk: Batch, batch: Batch, objective: Objective
    ) -> "MicroBatchResult":
        """Compute the loss of whole groups, backpropagate it, and return each group's metrics."""
        moved = chunk.to(output.logp.device)
        tokens = int(batch.mask.sum()) / len(batch)
        # first: an objective may change its arguments in place
        metrics = group_metrics(output.logp.detach(), output.entropy, moved, tokens)
        head = () if output.head is None else (output.head,)
        returned = objective(output.logp, moved, *head)
        loss, extras = checked_loss(type(objective).__name__, returned, len(moved), metrics)
        (loss.sum() / len(batch)).backward()  # not loss.mean(): the last chunk may be smaller
        return MicroBatchResult(
            {"loss": loss.detach(), **extras, **metrics}, output.tokens, output.padding
        )


@contextmanager
def before_weights_change(step: int) -> Iterator[None]:
    """Wrap the part of a step before any weight changes: errors in it become StepError."""
    try:
        yield
    except (StepError, WrongReference):
        raise
    except Exception as error:  # from an objective or a strategy, or out of memory
        line = extract_tb(error.__traceback__)[-1]
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        why = f"{kind}{str(error).strip().partition(chr(10))[0]}"
        if "allocate" in why:
            why += "; lower trainer.token_budget, or set policy.gradient_checkpointing=true"
        raise StepError(f"step {step + 1}: {why} ({line.filename}, line {line.lineno})") from error
