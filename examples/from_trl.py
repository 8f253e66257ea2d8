"""Train on sums with TRL's GRPOTrainer; from_trl.toml does the same with this package."""

from datasets import load_dataset
from sum_rewards import right
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import get_soft_overlong_punishment

trainer = GRPOTrainer(
    model="tba/models/arithmetic",
    reward_funcs=[right, get_soft_overlong_punishment(max_completion_len=8, soft_punish_cache=3)],
    train_dataset=load_dataset("json", data_files="examples/sums.jsonl", split="train"),
    args=GRPOConfig(
        output_dir="runs/from_trl_by_trl",
        max_steps=100,
        reward_weights=[1.0, 0.5],
        num_generations=16,
        max_completion_length=8,
        temperature=1.0,
        per_device_train_batch_size=64,
        learning_rate=5e-5,
        lr_scheduler_type="constant",
        loss_type="dr_grpo",
        scale_rewards="none",
        beta=0.0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        logging_steps=1,
    ),
)
trainer.train()
