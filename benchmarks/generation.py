"""Measure generation by the `transformers` engine beside plain `model.generate`.

    python benchmarks/generation.py --model FOLDER

The peer is what one writes without an engine: `generate` on a batch in which each prompt is
repeated for its samples, and `compute_transition_scores` for the log-probs of their tokens, which
the engine returns as well. Both sides use the same model. A further row compares the engine with
itself, given a stop string that never appears.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from _measure import Row, alternate, arguments, in_bf16, need_model, record, row
from transformers import GenerationConfig

from tba.config.tables import PolicyTable
from tba.engines.transformers import Transformers
from tba.models.pretrained import load_text
from tba.runtime.placement import reuse_memory
from tba.types import Sampling

PROMPTS = 8
SAMPLES = 16
TOKENS = 8
GOALS = {132: "ratio >= 5", 18: "ratio >= 2"}
"""By the tokens of a prompt."""
NEVER = "\u2042:"
"""Stop string that a model does not write, with a last character that many tokens have."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--fp32", action="store_true", help="compute in fp32 instead of bf16")
    options = parser.parse_args()
    reuse_memory()  # as a run does
    policy = PolicyTable(model=need_model(options))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bf16 = in_bf16() and not options.fp32
    engine = Transformers(policy, load_text(policy), device, bf16, Sampling(SAMPLES, 1.0, TOKENS))
    rows = []
    for length, goal in GOALS.items():
        rows.append(beside_generate(engine, 2 if options.tiny else length, goal, options.repeats))
    rows.append(with_stop(engine, options.repeats))
    record(__file__, rows, options)


def beside_generate(engine: Transformers, length: int, goal: str, repeats: int) -> Row:
    ids = prompts(engine, length)
    sides = {"engine": partial(ours, engine, ids), "generate": partial(peers, engine, ids)}
    seconds = alternate(sides, repeats)
    name = f"transformers engine, {PROMPTS} x {SAMPLES} x {TOKENS} tokens, prompts of {length}"
    peer = seconds["generate"]
    return row(name, seconds["engine"], "s", peer, peer_is="transformers generate", goal=goal)


def with_stop(engine: Transformers, repeats: int) -> Row:
    ids = prompts(engine, 2)
    sides = {
        "with a stop string": partial(ours, engine, ids, stop=(NEVER,)),
        "without": partial(ours, engine, ids),
    }
    seconds = alternate(sides, repeats)
    own = seconds["with a stop string"]
    other = seconds["without"]
    return row(
        "transformers engine with a stop string",
        own,
        "s",
        other,
        peer_is="without",
        goal="ratio >= 0.95",
    )


def prompts(engine: Transformers, length: int) -> np.ndarray:
    """Return random prompts of the same length."""
    rng = np.random.default_rng(0)
    return rng.integers(0, len(engine.text.tokenizer), (PROMPTS, length)).astype(np.int32)


def ours(engine: Transformers, ids: np.ndarray, stop: tuple[str, ...] = ()) -> None:
    engine.generate(list(ids), Sampling(SAMPLES, 1.0, TOKENS, stop=stop), seed=0)


@torch.inference_mode()
def peers(engine: Transformers, ids: np.ndarray) -> None:
    repeated = torch.from_numpy(ids).long().repeat_interleave(SAMPLES, 0).to(engine.device)
    config = GenerationConfig(
        max_new_tokens=TOKENS, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        eos_token_id=sorted(engine.text.eos_ids), pad_token_id=engine.text.pad_id,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    model = engine.model
    mask = torch.ones_like(repeated)
    out = model.generate(input_ids=repeated, attention_mask=mask, generation_config=config)
    model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)


if __name__ == "__main__":
    main()
