"""Keys of TRL, axolotl and LLaMA-Factory, and what stands for them here.

docs/start.md shows the same table.
"""

from __future__ import annotations

ANSWERS: dict[tuple[str, ...], str] = {
    ("model_name_or_path", "base_model", "model_id", "tokenizer_name"): "write model.name",
    ("model_type", "tokenizer_type", "use_fast_tokenizer"):
        "remove it: the model's own config says it",
    ("model_revision", "revision"): "has none: name the folder of the downloaded revision",
    ("special_tokens", "add_tokens", "new_special_tokens", "resize_vocab"):
        "has none: write new tokens into the model's folder first",
    ("output_dir",): "write out",
    ("overwrite_output_dir",): "remove it: a run's folder is new or empty",
    ("dataset", "datasets", "dataset_name", "train_file", "train_dataset"): "write data.train",
    ("eval_dataset", "test_datasets", "validation_file"): "write data.eval",
    ("max_samples",): "has none: a weight below 1 in data.train draws a share of a source",
    ("dataset_text_field",): "has none: rename the field of the records to text",
    ("val_set_size", "eval_split"): "name held-out files in data.eval: nothing is split off",
    ("chat_template", "template", "chat_template_path"):
        "put chat_template.jinja beside the tokenizer in the model's folder",
    ("train_on_inputs", "assistant_only_loss", "completion_only_loss", "train_on_prompt",
     "roles_to_train", "mask_history"):
        "remove it: answers and completions are learnt, questions are not",
    ("max_length", "max_seq_length", "cutoff_len", "sequence_len", "model_max_length"):
        "write data.max_seq_len",
    ("packing", "sample_packing", "padding_free", "group_by_length", "pad_to_sequence_len",
     "eval_sample_packing"):
        "remove it: sequences are always packed, isolated from each other and never padded",
    ("num_train_epochs", "num_epochs"): "write train.epochs",
    ("max_steps",): "write train.steps",
    ("learning_rate",): "write train.lr",
    ("per_device_train_batch_size", "gradient_accumulation_steps", "micro_batch_size",
     "batch_size", "train_batch_size"):
        "write train.sequences_per_step, the product of both: the whole batch of one update",
    ("per_device_eval_batch_size", "eval_batch_size"):
        "remove it: evaluation is computed in chunks too",
    ("warmup_steps",): "write train.warmup_ratio, their share of all steps",
    ("lr_scheduler_type", "lr_scheduler"): "write train.schedule: cosine, linear or constant",
    ("min_lr", "min_lr_ratio", "cosine_min_lr_ratio", "lr_scheduler_kwargs"):
        "has none: train.schedule ends at 0, or is constant",
    ("optim", "optimizer"): "remove it: the optimizer is AdamW",
    ("adam_beta1", "adam_beta2"): "write train.betas, a list of both",
    ("adam_epsilon",): "write train.eps",
    ("gradient_clipping",): "write train.max_grad_norm",
    ("logging_steps",): "remove it: every step is logged",
    ("save_steps", "saves_per_epoch", "save_strategy"): "write train.save_every_steps",
    ("eval_steps", "evals_per_epoch", "eval_strategy", "evaluation_strategy"):
        "write train.eval_every_steps",
    ("save_total_limit",): "remove it: the newest 3 checkpoints are kept",
    ("load_best_model_at_end", "metric_for_best_model", "early_stopping_patience"):
        "has none: furlong export writes a model of any checkpoint that is kept",
    ("resume_from_checkpoint",): "call furlong train with --resume",
    ("report_to", "wandb_project", "use_wandb"): "write log.wandb or log.tensorboard",
    ("run_name", "wandb_name", "wandb_entity", "wandb_watch", "wandb_log_model"):
        "has none: log.wandb is the project, wandb's own environment variables say the rest",
    ("push_to_hub", "hub_model_id"): "has none: upload what a run exports into its folder model",
    ("bf16", "fp16", "torch_dtype", "tf32"): "write model.dtype: bfloat16, float32 or float64",
    ("lora_r", "lora_rank"): "write model.lora.rank",
    ("lora_alpha",): "write model.lora.alpha",
    ("lora_dropout",): "write model.lora.dropout",
    ("lora_target", "lora_target_modules", "lora_target_linear"):
        "write model.lora.target_modules",
    ("adapter", "finetuning_type", "use_peft", "peft_config"):
        "write model.lora to train adapters, or leave it out to train every weight",
    ("lora_modules_to_save", "modules_to_save", "additional_target"):
        "has none: with adapters all other weights are frozen",
    ("use_rslora", "peft_use_rslora", "use_dora", "peft_use_dora", "loraplus_lr_ratio"):
        "has none: adapters are plain LoRA",
    ("lora_model_dir", "adapter_name_or_path"):
        "has none: merge these adapters into the model first, and name that in model.name",
    ("rope_scaling",): "write model.rope",
    ("gradient_checkpointing", "activation_offloading"):
        "write chunks.keep, or leave it to the search: auto keeps what memory allows",
    ("deepspeed", "fsdp", "fsdp_config", "tensor_parallel_size", "context_parallel_size"):
        "remove it: write parallel.dp, sp and pp, and start by torchrun",
    ("load_in_4bit", "load_in_8bit", "quantization_bit", "bnb_4bit_quant_type"):
        "remove it: quantised weights are not trained",
    ("flash_attn", "flash_attention", "xformers_attention", "attn_implementation"):
        "remove it: furlong computes attention itself",
    ("use_liger_kernel",): "write model.kernels: liger",
    ("use_kernels",): "write model.kernels: hub",
    ("torch_compile",): "write model.compile: true",
    ("neftune_noise_alpha", "label_smoothing_factor"): "remove it: the loss is plain cross-entropy",
    ("rl", "stage"): "write train.loss: dpo, or leave it out for sft",
    ("dpo_beta", "rl_beta", "pref_beta"): "write train.beta",
    ("pref_loss", "dpo_loss_type"): "write train.loss_type: sigmoid, sigmoid_norm, robust or ipo",
    ("pref_ftx", "rpo_alpha"): "has none: the loss of a pair has no second part",
    ("dpo_label_smoothing",): "write train.label_smoothing",
    ("ref_model", "ref_model_name_or_path", "precompute_ref_log_probs"):
        "remove it: the reference is the model that a run begins with, computed once",
    ("streaming", "preprocessing_num_workers", "dataset_num_proc", "dataloader_num_workers"):
        "remove it: tokens are written to a cache and memory-mapped",
    ("trust_remote_code",): "remove it: no code of a model is run",
}  # fmt: skip


def answer(key: str) -> str | None:
    """Advice for a key that another trainer knows, whatever section stands before it; else None."""
    name = key.rpartition(".")[2].lower().replace("-", "_")
    return next((text for names, text in ANSWERS.items() if name in names), None)
