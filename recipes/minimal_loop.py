"""Synchronous trajectory balance with a replay buffer in one file, on the bundled model.

    python recipes/minimal_loop.py

Each step generates, scores, stores, draws and trains, in plain PyTorch and transformers; the loss
and the buffer are the package's. The share of right greedy answers to 256 held-out sums rises from
.324 to .980 in 100 steps, which take half a minute on one core. The package's own loop, in
`tba/run.py`, adds searchers that do not wait for the trainer, shared prompts, micro-batches, weight
checks, checkpoints, rewards in separate processes, and sampled evaluations.
"""

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.models import model_path
from tba.objectives.tb import TrajectoryBalance
from tba.prompt import Prompt
from tba.replay.buffer import ReplayBuffer
from tba.strategies.mixture import Mixture
from tba.tasks.arithmetic import Arithmetic
from tba.types import Completion, Group, TokenBatch, collate, collate_tokens

PROMPTS = 16  # per step
SAMPLES = 8  # responses per prompt: S = K
MAX_TOKENS = 6
BETA = 0.1
LEARNING_RATE = 1e-4
WARMUP_STEPS = 10


@torch.no_grad()
def generate(model, tokenizer, prompts: Sequence[str], samples: int) -> list[list[np.ndarray]]:
    """Return sampled responses to each prompt, including EOS; a single response is greedy."""
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left")
    drawn = {"do_sample": True, "top_k": 0, "num_return_sequences": samples}
    output = model.generate(
        **inputs, max_new_tokens=MAX_TOKENS, **(drawn if samples > 1 else {"do_sample": False})
    )
    responses = []
    for row in output[:, inputs["input_ids"].shape[1] :].numpy():
        (ends,) = np.nonzero(row == tokenizer.eos_token_id)
        responses.append(row[: ends[0] + 1 if len(ends) else None].astype(np.int32))
    return [responses[i : i + samples] for i in range(0, len(responses), samples)]


def logp(model, batch: TokenBatch) -> Tensor:
    """Return the log-probability of each token of the responses [B K T]; 0 for padding."""
    k = batch.samples
    prompt = batch.prompt_tokens.repeat_interleave(k, 0)
    mask = torch.cat([batch.prompt_mask.repeat_interleave(k, 0), batch.mask.flatten(0, 1)], 1)
    ids = torch.cat([prompt, batch.tokens.flatten(0, 1)], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # prompts are padded on the left
    logits = model(input_ids=ids, attention_mask=mask.long(), position_ids=positions).logits
    # the logits at a token predict the next one
    every = logits[:, prompt.shape[1] - 1 : -1].log_softmax(-1)
    tokens = batch.tokens.flatten(0, 1)[..., None]
    return every.gather(2, tokens).view(batch.mask.shape) * batch.mask


def search(model, reference, tokenizer, prompts: Sequence[Prompt], version: int) -> list[Group]:
    """Return a group per prompt: responses, rewards, and log-probs of policy and reference."""
    responses = generate(model, tokenizer, [prompt.text for prompt in prompts], SAMPLES)
    tokens = [tokenizer(prompt.text)["input_ids"] for prompt in prompts]
    batch = collate_tokens([np.asarray(ids, np.int32) for ids in tokens], responses)
    with torch.no_grad():
        own, ref = logp(model, batch).numpy(), logp(reference, batch).numpy()
    groups = []
    for b, prompt in enumerate(prompts):
        trajectories = []
        for k, ids in enumerate(responses[b]):
            finished = bool(ids[-1] == tokenizer.eos_token_id)
            completion = Completion(ids, own[b, k, : len(ids)], finished, version)
            reward = float(finished and is_right(tokenizer, ids, prompt))
            trajectories.append(completion.rewarded(reward, ref[b, k, : len(ids)]))
        groups.append(Group(prompt, np.asarray(tokens[b], np.int32), tuple(trajectories)))
    return groups


def is_right(tokenizer, ids: np.ndarray, prompt: Prompt) -> bool:
    return tokenizer.decode(ids, skip_special_tokens=True) == prompt.columns["answer"]


def evaluate(model, tokenizer, prompts: Sequence[Prompt]) -> float:
    """Return the share of right greedy answers."""
    responses = generate(model, tokenizer, [prompt.text for prompt in prompts], 1)
    pairs = zip(responses, prompts, strict=True)
    return float(np.mean([is_right(tokenizer, ids, prompt) for (ids,), prompt in pairs]))


def main(steps: int = 100) -> float:
    """Train, and return the share of right greedy answers to held-out sums."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    folder = model_path("bundled:arithmetic")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()  # no dropout
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    task = Arithmetic(held_out_size=256)
    questions, held_out = task.prompts(), task.held_out()
    objective = TrajectoryBalance(beta=BETA)
    buffer = ReplayBuffer()
    strategy = Mixture(recent=0.5)  # half of the groups are from this step
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=WARMUP_STEPS)
    print(f"before: {evaluate(model, tokenizer, held_out):.3f}")
    for step in range(steps):
        asked = questions[step * PROMPTS : (step + 1) * PROMPTS]
        groups = search(model, reference, tokenizer, asked, step)
        buffer.add(groups, step)
        batch = collate(buffer.sample(PROMPTS, SAMPLES, strategy, step, rng))
        loss, _ = objective(logp(model, batch), batch)  # one loss for each group
        loss.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
        if step % 10 == 9:
            rewards = [t.reward for group in groups for t in group.trajectories]
            print(f"step {step + 1}: loss {loss.mean():.4f}  reward {np.mean(rewards):.3f}")
    score = evaluate(model, tokenizer, held_out)
    print(f"after: {score:.3f}")
    return score


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
