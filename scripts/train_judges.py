"""Divide posts with comparisons, and train the two judges of experiments/tldr_small.toml.

    python scripts/train_judges.py COMPARISONS.jsonl runs/tldr_small --proxy FOLDER --gold FOLDER

Needs TRL: `pip install -e '.[bench]'`. FOLDER is a causal LM with its tokenizer, or a name on the
hub. A row of the file has `id`, `subreddit`, `title` and `post`, the summaries `reference` and
`response`, and `winner`: one of these two names, or `tie`. The posts are divided in four: 150 for
each judge, 150 for the policy to learn from, and 50 for evaluation, also of the judges. What is
written: `posts/train.jsonl`, `posts/validation.jsonl`, `proxy/`, `gold/`, and `judges.json` with
their accuracies.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

from tba.config.tables import PolicyTable
from tba.models.pretrained import computes_in_bf16
from tba.tasks.tldr import query_of

Row = dict[str, Any]
PARTS = {"proxy": 150, "gold": 150, "train": 150, "validation": 50}
"""Posts in each part."""


def divide(rows: list[Row], seed: int) -> dict[str, list[Row]]:
    """Return the rows of each part. All rows of a post are in the same one."""
    posts = sorted({row["id"] for row in rows})
    if len(posts) < sum(PARTS.values()):
        raise ValueError(f"{len(posts)} posts are too few: {sum(PARTS.values())} are needed")
    random.Random(seed).shuffle(posts)
    parts = {}
    for name, size in PARTS.items():
        own = set(posts[:size])
        posts = posts[size:]
        parts[name] = [row for row in rows if row["id"] in own]
    return parts


def posts_of(rows: list[Row]) -> list[Row]:
    """Return each post once, in the columns that `task = tldr` reads."""
    posts = {}
    for row in rows:
        kept = {name: row[name] for name in ("subreddit", "title", "post")}
        posts[row["id"]] = {**kept, "summary": row["reference"]}
    return list(posts.values())


def pairs(rows: list[Row]) -> list[Row]:
    """Return the better and the worse text of each comparison, as the task shows them to judges.

    Ties are left out.
    """
    found = []
    for row in rows:
        if row["winner"] != "tie":
            loser = "reference" if row["winner"] == "response" else "response"
            better, worse = (
                f"{query_of(row)} {row[name].strip()}" for name in (row["winner"], loser)
            )
            found.append({"chosen": better, "rejected": worse})
    return found


def train(
    model: str, layers: int | None, rows: list[Row], test: list[Row], out: Path, options: Row
) -> Row:
    """Train a reward model with its first `layers` layers, and return its accuracy on `test`."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    started = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = {} if layers is None else {"num_hidden_layers": layers}
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = None  # the judge reads plain text
    # TRL appends EOS; as padding, it is not where the score is read, as in a text without it
    tokenizer.pad_token = tokenizer.eos_token
    judge = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=1, dtype="float32", **config
    )
    settings = RewardConfig(
        output_dir=str(out),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=1,  # accuracies are means over batches
        use_cpu=device == "cpu",
        bf16=computes_in_bf16(PolicyTable(model=model), device),
        gradient_checkpointing=False,
        max_length=None,  # longer pairs would be dropped
        center_rewards_coefficient=0.1,  # so that a missing EOS, -1, is worse than most summaries
        lr_scheduler_type="cosine",
        warmup_steps=3,
        save_strategy="no",
        report_to="none",
        logging_steps=5,
        **options,
    )
    trainer = RewardTrainer(
        model=judge,
        args=settings,
        train_dataset=Dataset.from_list(pairs(rows)),
        eval_dataset=Dataset.from_list(pairs(test)),
        processing_class=tokenizer,
    )
    trainer.train()
    accuracy = trainer.evaluate()["eval_accuracy"]
    n = len(pairs(test))
    trainer.save_model(str(out))
    return {
        "model": model,
        "layers": layers,
        "pairs": len(pairs(rows)),
        "accuracy": accuracy,
        "accuracy_stderr": math.sqrt(accuracy * (1 - accuracy) / n),
        "test_pairs": n,
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("comparisons", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--proxy", required=True, help="causal LM that the proxy judge starts from")
    parser.add_argument("--gold", required=True, help="causal LM that the gold judge starts from")
    parser.add_argument("--proxy-layers", type=int, default=12, help="its first layers; 0: all")
    parser.add_argument("--gold-layers", type=int, default=16, help="its first layers; 0: all")
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--seed", type=int, default=0)
    o = parser.parse_args()

    lines = o.comparisons.read_text(encoding="utf-8").split("\n")
    parts = divide([json.loads(line) for line in lines if line.strip()], o.seed)
    folder = o.out / "posts"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "validation"):
        text = "".join(json.dumps(row) + "\n" for row in posts_of(parts[name]))
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    options = {"num_train_epochs": o.epochs, "learning_rate": o.learning_rate, "seed": o.seed}
    judges = {}
    for name, model, layers in (
        ("proxy", o.proxy, o.proxy_layers),
        ("gold", o.gold, o.gold_layers),
    ):
        test = parts["validation"]
        out = o.out / name
        judges[name] = train(model, layers or None, parts[name], test, out, options)
        print(name, judges[name], flush=True)
    (o.out / "judges.json").write_text(json.dumps(judges, indent=1) + "\n")


if __name__ == "__main__":
    main()
