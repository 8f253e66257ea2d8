"""Names of settings in TRL, verl, prime-rl and OpenRLHF, with what they are called in this package.

A test compares them with the table of docs/from_trl.md and with the fields of TRL's configs.
"""

NONE = "none"
"""Beginning of the place of a name without counterpart, before the reason if there is one."""
STRATEGY = "[strategy], [replay]"

PLACES = {
    "policy.model": "model model_name model_name_or_path base_model pretrain",
    "[policy.lora]": "peft_config lora use_peft",
    "policy.lora.r": "lora_r lora_rank",
    "policy.lora.alpha": "lora_alpha",
    "policy.lora.modules_to_save": "modules_to_save",
    "policy.lora.use_rslora": "use_rslora",
    "policy.chat_template_kwargs": "chat_template_kwargs",
    "policy.autocast": "bf16 dtype torch_dtype model_dtype",
    "policy.gradient_checkpointing": "gradient_checkpointing activation_checkpointing"
    " enable_gradient_checkpointing",
    "policy.attention": "attn_implementation flash_attn",
    "policy.reset_reference_every": "sync_ref_model ref_model_sync_steps",
    "task.data": "train_dataset dataset dataset_name data train_files prompt_data",
    "task.held_out_data": "eval_dataset val_files",
    "task.reward": "reward_funcs reward reward_fn reward_function reward_model"
    " custom_reward_function judge",
    "task.reward_weights": "reward_weights",
    "task.environment": "environment_factory",
    "task.max_turns": "max_tool_calling_iterations max_assistant_turns",
    "task.chat": "chat apply_chat_template",
    "task.system_prompt": "system_prompt",
    "run.folder": "output_dir run_name experiment_name default_local_dir",
    "run.steps": "max_steps train_steps total_steps total_training_steps",
    "run.epochs": "num_train_epochs epochs num_epochs total_epochs num_episodes",
    "run.seed": "seed data_seed",
    "selection.use": "shuffle_dataset",
    "sampling.samples and trainer.group_size": "num_generations",
    "sampling.samples": "n num_samples rollouts rollouts_per_example n_samples_per_prompt",
    "sampling.max_tokens": "max_completion_length max_new_tokens max_length max_response_length"
    " generate_max_len response_length",
    "sampling.temperature": "temperature",
    "sampling.top_p": "top_p",
    "sampling.top_k": "top_k",
    "sampling.stop": "stop_strings",
    'sampling.truncated = "reject"': "mask_truncated_completions",
    "[sampling]": "generation_kwargs",
    "objective.use": "loss_type adv_estimator advantage_estimator algorithm",
    "objective.beta": "beta kl_coef kl_loss_coef init_kl_coef kl_penalty",
    "objective.clip": "epsilon clip_ratio clip_ratio_low eps_clip cliprange",
    "objective.clip_high": "epsilon_high clip_ratio_high",
    'objective = "proximal_rloo"': "importance_sampling_level",
    STRATEGY: "num_iterations steps_per_generation ppo_epochs num_ppo_epochs",
    "trainer.batch_size": "per_device_train_batch_size gradient_accumulation_steps"
    " train_batch_size ppo_mini_batch_size rollout_batch_size",
    "trainer.token_budget": "mini_batch_size micro_batch_size micro_train_batch_size"
    " ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu",
    "trainer.learning_rate": "learning_rate lr actor_learning_rate",
    "trainer.schedule": "lr_scheduler_type lr_scheduler",
    "trainer.warmup_steps": "warmup_steps warmup warmup_ratio lr_warmup_steps",
    "trainer.betas": "adam_beta1 adam_beta2",
    "trainer.weight_decay": "weight_decay",
    "trainer.max_grad_norm": "max_grad_norm grad_clip max_norm",
    "trainer.compile": "torch_compile",
    "replay.capacity": "buffer_size",
    "runtime.searchers": "workers num_workers num_engines",
    "runtime.lag": "async_level max_async_level max_off_policy_steps",
    'engine.use = "vllm"': "use_vllm",
    "engine.gpu_memory_utilization": "vllm_gpu_memory_utilization gpu_memory_utilization",
    "engine.max_model_len": "vllm_max_model_length",
    "engine.tensor_parallel_size": "vllm_tensor_parallel_size tensor_model_parallel_size",
    "engine.max_logp_gap": "vllm_importance_sampling_correction",
    "eval.every": "eval_strategy eval_steps test_freq",
    "eval.samples": "num_generations_eval",
    "eval.patience": "early_stopping_patience",
    "checkpoint.every": "save_strategy save_steps save_freq",
    "checkpoint.keep": "save_total_limit",
    "checkpoint.keep_best": "load_best_model_at_end",
    "tba export RUN --push-to-hub NAME": "push_to_hub hub_model_id hub_token hub_private_repo",
    "tba train --resume RUN": "resume_from_checkpoint resume",
    "log.sample_every": "log_completions num_completions_to_print",
    "log.tensorboard, log.wandb, log.trackio": "report_to logger",
    "log.wandb_project": "project project_name",
    f"{NONE}, because engine and trainer must agree on every log-prob": "lora_dropout"
    " disable_dropout min_p repetition_penalty cache_implementation use_transformers_paged",
    f"{NONE}, because there is one trainer process": "deepspeed fsdp fsdp_config nnodes local_rank"
    " n_gpus_per_node num_gpus parallelism_config accelerator_config ds3_gather_for_generation",
    NONE: "scale_rewards use_liger_kernel logging_steps logging_strategy logging_first_step optim"
    " multi_objective_aggregation entropy_coef entropy_coeff top_entropy_quantile tools"
    " delta off_policy_mask_threshold quantization_config callbacks rollout_func"
    " model_init_kwargs vllm_mode use_bias_correction_kl fp16 tf32 use_cpu do_train do_eval"
    " do_predict debug normalize_advantages reward_clip_range ref_model_mixup_alpha"
    " missing_eos_penalty use_cache cast_lm_head_to_fp32 remove_unused_columns"
    " generation_batch_size log_unique_prompts adam_epsilon eval_on_start eval_delay"
    " lr_scheduler_kwargs save_only_model auto_find_batch_size bias"
    " average_tokens_across_devices full_determinism prediction_loss_only ignore_data_skip"
    " critic_learning_rate gae_lambda disable_tqdm greater_is_better enable_jit_checkpoint"
    " use_dora save_on_each_node batch_eval_metrics"
    " train_sampling_strategy dataloader_* ddp_* eval_do_* eval_use_* eval_acc* fsdp_*"
    " hub_* include_* label_* liger_* load_in_* log_level* log_on_* logging_* metric_*"
    " neftune_* optim_* per_device_* sapo_* torch_* trackio_* vllm_* bf16_* fp16_* skip_*"
    " gradient_checkpointing_* activation_checkpointing_* length_column_*"
    " restore_callback_* init_lora_* layers_* rank_pattern* alpha_pattern* megatron_*"
    " lora_* alora_* use_qalora use_bdlora",
}
"""Names of other packages, by what is there for them. A `*` stands for the rest of a name."""

NEAREST = {
    "dapo": "objective=grpo objective.clip_high=0.28 strategy.filter_equal=true",
    "bnpo": "objective=grpo",
    "gspo": "objective=proximal_rloo",
    "cispo": "objective=tba_prime",
    "reinforce": "objective=rloo",
    "reinforce_plus_plus": "objective=rloo",
    "reinforce++": "objective=rloo",
    "dpo": "objective=online_dpo",
    "gflownet": "objective=tb",
    "vargrad": "objective=tb",
    "tba": "objective=tb",
}
"""What to type for objectives of other packages."""
_PLACE = {name: place for place, names in PLACES.items() for name in names.split()}

_GROUPS = tuple(name[:-1] for name in PLACES[NONE].split() if name.endswith("*"))


def counterpart(name: str) -> str | None:
    """Return what a name of other packages is called here; None if the name is unknown."""
    return _PLACE.get(name, NONE if name.startswith(_GROUPS) else None)
