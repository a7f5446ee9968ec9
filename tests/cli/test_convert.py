"""`furlong convert`: what keys of other trainers become, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from furlong.cli.main import main
from furlong.config.conversion import Conversion, convert
from furlong.config.recipes import read_recipe
from furlong.config.sources import load_run
from furlong.errors import ConfigError

BATCH, TOKENS = "train.sequences_per_step", "train.tokens_per_step"
AXOLOTL = "base_model: M\ndatasets: [{path: a/b, type: completion}]\nlearning_rate: 1e-4\n"
TRL = "model_name_or_path: M\ndataset_name: a/b\nlearning_rate: 1e-4\n"
FACTORY = "model_name_or_path: M\nstage: sft\nfinetuning_type: full\ndataset: a/b\ncutoff_len: 99\n"
SWIFT = "NPROC_PER_NODE=8 \\\nswift sft --model M --tuner_type full --dataset a/b "
TUNE = (
    "model: {_component_: torchtune.models.llama3.lora_llama3_8b, lora_rank: 4, lora_alpha: 8,\n"
    " lora_attn_modules: [q_proj, output_proj]}\nbatch_size: 2\n"
    "dataset: {_component_: torchtune.datasets.alpaca_dataset}\n"
    "checkpointer: {_component_: x, checkpoint_dir: M}\n"
    "optimizer: {_component_: torch.AdamW, lr: 1e-4}\n"
)
_HEAD, _LOGS = "model.apply_lora_to_output", "metric_logger.log_dir"
_AWAY = "activation_checkpointing_offload"
WARM = "lr_scheduler: {{_component_: x.get_{}_schedule_with_warmup, num_warmup_steps: 5}}\n"
PRETRAIN = (
    "base_model: M\npretraining_dataset: [{path: d.jsonl, type: pretrain}]\nlearning_rate: 1e-4\n"
)
QLORA = TUNE.replace("lora_llama3_8b", "qlora_llama3_8b")
ADAM = TUNE.replace("torch.AdamW", "torch.optim.Adam")
CHAT = AXOLOTL.replace("completion", "chat_template")
CLM = "--model_name_or_path M --train_file t.json --learning_rate 1e-4"
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 1e-3}
DROPOUT = {"attention_dropout": 0.1}
SLICE = CHAT.replace("a/b", "json, data_files: [d.jsonl], split: 'train[:50%]'")
MIXTURE = TRL.replace("dataset_name: a/b\n", "") + "dataset_mixture: {datasets: [{id: a/b, "
V1 = "model: M\ntemplate: x\ntrain_dataset: a/b\nlearning_rate: 1e-4\n"
INSTRUCT = TRL + "use_slow_tokenizer: true\n"


def made(folder: Path, text: str, *, name: str = "", command: int | None = None) -> Conversion:
    file = folder / (name or ("a.yaml" if ":" in text.split("\n")[0] else "a.sh"))
    file.write_text(text)
    return convert(read_recipe(file, command), None if file.suffix == ".sh" else 8)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        (AXOLOTL + "micro_batch_size: 2\ngradient_accumulation_steps: 4", BATCH, 64),
        (AXOLOTL + "micro_batch_size: 2\ncontext_parallel_size: 4", BATCH, 4),
        (AXOLOTL + "sequence_len: 1000\nsample_packing: true", TOKENS, 8000),
        (AXOLOTL + "cosine_min_lr_ratio: 0.1", "train.min_lr", 1e-5),
        (AXOLOTL + "warmup_steps: 100", "train.warmup_steps", 100),
        (AXOLOTL, "train.warmup_steps", 0.03),
        (AXOLOTL + "max_steps: 5000", "train.warmup_steps", 100),
        (AXOLOTL + "max_steps: 1000", "train.warmup_steps", 30),
        (TRL + "accumulate_grad_batches: 4", BATCH, 256),
        (AXOLOTL + "optimizer: adafactor", "train.optimizer", "adafactor"),
        (AXOLOTL, "data.too_long", "drop"),
        (AXOLOTL + "optimizer: adamw_bnb_8bit", "train.optimizer", "adamw_8bit"),
        (AXOLOTL + "tokenizer_config: c/d", "model.tokenizer", "c/d"),
        (AXOLOTL + "saves_per_epoch: 4", "train.saves_per_epoch", 4),
        (AXOLOTL + "adapter: qlora\nload_in_4bit: true\nlora_r: 16", "model.lora.rank", 16),
        (
            AXOLOTL + "adapter: qlora\nload_in_4bit: true",
            "model.quantize",
            {"type": "nf4", "double": True},
        ),
        (
            AXOLOTL + "adapter: lora\nlora_target_linear: true",
            "model.lora.target_modules",
            "all-linear",
        ),
        (
            AXOLOTL + "adapter: lora\nloraplus_lr_ratio: 16",
            "train.groups",
            [{"match": "lora_B", "lr": 1.6e-3}],
        ),
        (
            AXOLOTL + "special_tokens: {pad_token: <pad>, eos_token: <end>}",
            "data.pad_token",
            "<pad>",
        ),
        (
            TRL + "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}",
            "train.min_lr",
            1e-5,
        ),
        (TRL + "save_steps: 0.05\nnum_train_epochs: 5", "train.saves_per_epoch", 4.0),
        (TRL + "save_steps: 0.1\nmax_steps: 50", "train.save_every_steps", 5),
        (TRL + "save_strategy: 'no'", "train.save_every_steps", 0),
        (
            TRL + "dataset_config: c\ndataset_train_split: s",
            "data.train",
            {"path": "a/b", "name": "c", "split": "s"},
        ),
        (TRL, "data.train_on", "conversations"),
        (TRL + "completion_only_loss: false", "data.train_on", "all"),
        (TRL + "loss_type: [apo_zero]\nbeta: 0.05", "train.loss", "dpo"),
        (TRL + "push_to_hub: true\nhub_model_id: me/m", "hub.repo", "me/m"),
        (TRL + "report_to: [wandb]\nrun_name: r", "log.name", "r"),
        (FACTORY, BATCH, 64),
        (FACTORY.replace("full", "lora"), "model.lora.alpha", 16),
        (FACTORY + "train_on_prompt: true", "data.train_on", "all"),
        (FACTORY + "mask_history: true", "data.train_on", "last"),
        (SWIFT, BATCH, 16),
        (SWIFT + "--sequence_parallel_size 8 --per_device_train_batch_size 1", BATCH, 2),
        (SWIFT, "train.lr", 1e-5),
        (
            SWIFT + "--dataset x#500 y:sub",
            "data.train",
            [{"path": "x", "limit": 500}, {"path": "y", "name": "sub"}],
        ),
        (SWIFT.replace("swift", "megatron") + "--lr 1e-5 --min_lr 1e-6", "train.min_lr", 1e-6),
        ("LR=1e-3\n" + SWIFT + "--learning_rate ${LR}", "train.lr", 1e-3),
        (SWIFT + "--learning_rate ${LR:-1e-3}", "train.lr", 1e-3),
        (TUNE, "model.lora.target_modules", ["q_proj", "o_proj"]),
        (TUNE, BATCH, 16),
        (TUNE, "model.name", "M"),
        (TUNE, "train.max_grad_norm", None),
        (TUNE, "train.schedule", "constant"),
        (AXOLOTL.replace("completion", "alpaca"), "data.chat_template", "alpaca"),
        (TRL + "packing: true\npacking_strategy: wrapped", "data.join", True),
        (FACTORY.replace("sft", "pt"), "data.join", True),
        (TRL + "warmup_steps: 100\nwarmup_ratio: 0.1", "train.warmup_steps", 100),
        (TRL + "lr_scheduler_kwargs: '{\"min_lr\": 1e-6}'", "train.min_lr", 1e-6),
        (
            TRL.replace("dataset_name: a/b", "datasets: [{path: a/b, name: c}]"),
            "data.train",
            {"path": "a/b", "name": "c"},
        ),
        (
            TRL.replace("dataset_name: a/b", "dataset_mixture: {datasets: [{id: a/b}],").replace(
                "learning_rate", " test_split_size: 0.1}\nlearning_rate"
            ),
            "data.eval_share",
            0.1,
        ),
        (
            TRL + "eval_strategy: steps\neval_steps: 9\ndataset_config: c",
            "data.eval",
            {"path": "a/b", "split": "test", "name": "c"},
        ),
        (TRL + "per_device_train_batch_size: '2'", BATCH, 16),
        (TRL + "run_name: '2'", "log.name", "2"),
        (AXOLOTL + "context_parallel_size: 0", BATCH, 8),
        (
            "A='--model_name_or_path M --learning_rate 1e-3'\n"
            "accelerate launch --num_processes 1 trl/sft.py $A --dataset_name a/b; python x.py",
            "train.lr",
            1e-3,
        ),
        (
            "torchrun --nproc_per_node 1 train.py --model_name_or_path M --data_path d.json --a 1",
            "data.train",
            "d.json",
        ),
        (AXOLOTL + "gradient_clipping: auto", "train.max_grad_norm", 1.0),
        (TRL.replace("learning_rate: 1e-4", "loss_type: ipo"), "train.lr", 1e-6),
        (SWIFT.replace("swift", "megatron") + "--max_epochs 2 --save s", "train.epochs", 2),
        (FACTORY.replace("sft", "pt") + "eval_dataset: c/d", "data.eval", "c/d"),
        (TUNE + "tokenizer: {_component_: x, max_seq_len: 99}", "data.max_seq_len", 99),
        (TUNE, "data.train_on", "all"),
        (TUNE + WARM.format("cosine"), "train.warmup_steps", 5),
        (TUNE + WARM.format("cosine"), "train.schedule", "cosine"),
        (TUNE + "output_dir: a\nprofiler: {output_dir: b}", "out", "a"),
        (
            TUNE.replace(
                "torchtune.datasets.alpaca_dataset", "x.text_completion_dataset,\n source: c"
            ),
            "data.train",
            {"path": "c", "format": "text"},
        ),
        (TRL + "lr_scheduler_type: constant_with_warmup\nwarmup_steps: 7", "train.warmup_steps", 7),
        (TRL + "lr_scheduler_type: constant\nwarmup_steps: 7", "train.warmup_steps", 0),
        (
            SWIFT.replace("swift", "megatron") + "--lr_decay_style constant --lr_warmup_iters 9",
            "train.warmup_steps",
            9,
        ),
        (
            TRL + "evaluation_strategy: epoch\ndataset_test_split: t",
            "data.eval",
            {"path": "a/b", "split": "t"},
        ),
        (
            AXOLOTL + "adapter: lora\nlora_target_modules: [q, v]\nlora_target_linear: false",
            "model.lora.target_modules",
            ["q", "v"],
        ),
        (PRETRAIN + "sample_packing: true\nmax_steps: 9", "data.too_long", "split"),
        (PRETRAIN + "sample_packing: true\nmax_steps: 9", "data.streaming", True),
        (PRETRAIN, "data.too_long", "truncate"),
        (AXOLOTL.replace("completion", "llama3.ultra") + "rl: kto", "data.chat_template", "llama3"),
        (
            AXOLOTL.replace("completion", "llama3.ultra") + "rl: kto",
            "data.train",
            {
                "path": "a/b",
                "format": "auto",
                "fields": {"instruction": "prompt", "output": "completion"},
            },
        ),
        (
            AXOLOTL.replace("completion", "chatml.intel") + "rl: dpo",
            "data.train",
            {"path": "a/b", "format": "auto", "fields": {"instruction": "question"}},
        ),
        (FACTORY, "data.too_long", "error"),
        (FACTORY.replace("sft", "pt") + "packing: false", "data.too_long", "truncate"),
        (
            TRL.replace("dataset_name: a/b", "dataset_mixer: {a/b: 1.0, c/d: 0.5, e/f: 9}"),
            "data.train",
            ["a/b", {"path": "c/d", "weight": 0.5}, {"path": "e/f", "limit": 9}],
        ),
        (
            TRL.replace("dataset_name", "dataset_splits: [train_x, test_x]\ndataset_mixer").replace(
                "a/b", "{a/b: 1.0}\neval_strategy: epoch"
            ),
            "data.eval",
            [{"path": "a/b", "split": "test_x"}],
        ),
        (
            "n=4\nNPROC_PER_NODE=2 swift sft --model M --tuner_type full --dataset a/b "
            "--gradient_accumulation_steps $(expr 16 / $n) --per_device_train_batch_size $((2*3))",
            BATCH,
            48,
        ),
        (SWIFT.replace("NPROC_PER_NODE=8", "CUDA_VISIBLE_DEVICES=0,1"), BATCH, 16),
        (
            SWIFT.replace("NPROC_PER_NODE=8", "CUDA_VISIBLE_DEVICES=0,1")
            + "--gradient_accumulation_steps 3",
            BATCH,
            3,
        ),
        (INSTRUCT, "train.epochs", 2),
        (SWIFT.replace("swift sft", "megatron rlhf") + "--rlhf_type kto", "train.loss", "kto"),
        (SWIFT.replace("swift sft", "megatron rlhf"), "train.loss", "dpo"),
        (
            V1 + "peft_config: {name: lora, r: 4, target_modules: all}",
            "model.lora.target_modules",
            "all-linear",
        ),
        (AXOLOTL + "batch_size: 4\nmicro_batch_size: 2", BATCH, 32),
        (INSTRUCT + "dpo_beta: 5", "train.loss", "dpo"),
        ("A='--lr 1'\nA+=' --lr 1e-3'\n" + SWIFT + "$A", "train.lr", 1e-3),
        ("A=' --lr 1e-3'\nA+=' --seed 1'\n" + SWIFT + "$A", "train.lr", 1e-3),
        ("A=(--lr 1)\nA+=(\n# no\n --seed 2 # no\n)\n" + SWIFT + '"${A[@]}"', "train.lr", 1),
        ("A=(--lr 1)\nA+=(\n# no\n --seed 2 # no\n)\n" + SWIFT + '"${A[@]}"', "train.seed", 2),
        ("if x; then\n " + SWIFT + "--lr 2\nfi", "train.lr", 2),
        ("export LR\nLR=1\ncd x && LR=2\n" + SWIFT + "--lr $LR", "train.lr", 2),
        ("torchrun --nproc_per_node 1 run_clm.py --block_size 64 " + CLM, "data.join", True),
        ("torchrun --nproc_per_node 1 run_clm.py --seed 1 " + CLM, "data.max_seq_len", 1024),
        (
            "torchrun --nproc_per_node 1 run_clm.py --do_eval --validation_file e.json " + CLM,
            "data.eval",
            "e.json",
        ),
        (SWIFT + "--model_revision 0012345", "model.revision", "0012345"),
        (TRL + "model_init_kwargs: {attention_dropout: 0.1}", "model.config", DROPOUT),
        (AXOLOTL + "overrides_of_model_config: {attention_dropout: 0.1}", "model.config", DROPOUT),
        (TRL + "model_init_kwargs: {dtype: float32}", "model.dtype", "float32"),
        (
            AXOLOTL + "overrides_of_model_config: {rope_scaling: {type: linear, factor: 2}}",
            "model.rope",
            {"rope_type": "linear", "factor": 2},
        ),
        (
            SLICE,
            "data.train",
            {"path": "d.jsonl", "split": "train[:50%]", "format": "chat"},
        ),
        (
            MIXTURE + "columns: [prompt, completion]}]}",
            "data.train",
            {"path": "a/b", "format": "completion"},
        ),
        (QLORA, "model.quantize", {"type": "nf4", "double": True}),
        (
            TUNE.replace("lora_rank", "quantize_base: true, lora_rank"),
            "model.quantize",
            {"type": "nf4", "double": True},
        ),
        (ADAM, "train.weight_decay", 0.0),
        (TUNE, "train.weight_decay", 0.01),
        (FACTORY + "template: qwen3", "data.chat_template", "qwen3"),
        (FACTORY + 'add_tokens: "<a>,<b>"', "model.new_tokens", ["<a>", "<b>"]),
        (AXOLOTL + 'tokens: ["<a>", "<b>"]', "model.new_tokens", ["<a>", "<b>"]),
        (SWIFT + "--new_special_tokens '<a>' '<b>'", "model.new_tokens", ["<a>", "<b>"]),
        (FACTORY + "moe_aux_loss_coef: 0.001", "model.config", ROUTED),
        (SWIFT + "--router_aux_loss_coef 1e-3", "model.config", ROUTED),
    ],
)
def test_values_are_those_that_the_recipe_comes_to(
    tmp_path: Path, text: str, key: str, value: Any
) -> None:
    assert made(tmp_path, text).run[key] == value


@pytest.mark.parametrize(
    ("text", "key", "kind"),
    [
        (AXOLOTL + "tensor_parallel_size: 2", "tensor_parallel_size", "lost"),
        (AXOLOTL + "tensor_parallel_size: 1", "tensor_parallel_size", "needless"),
        (AXOLOTL + "neftune_noise_alpha: 5", "neftune_noise_alpha", "refused"),
        (AXOLOTL + "wandb_project:", "wandb_project", "needless"),
        (AXOLOTL + "no_such_key: 5", "no_such_key", "refused"),
        (AXOLOTL + "plugins: [axolotl.integrations.liger.LigerPlugin]", "plugins", "needless"),
        (AXOLOTL + "plugins: [some.Plugin]", "plugins", "refused"),
        (AXOLOTL + "optimizer: lion_8bit", "optimizer", "refused"),
        (AXOLOTL + "lr_scheduler: rex", "lr_scheduler", "refused"),
        (AXOLOTL + "adapter: lora\nload_in_8bit: true", "load_in_8bit", "refused"),
        (TRL + "fp16: true", "fp16", "refused"),
        (TRL + "weight_decay: -1", "weight_decay", "refused"),
        (TRL + "output_dir: $(date)", "output_dir", "lost"),
        (TRL + "deepspeed: zero3_offload.json", "deepspeed", "lost"),
        (TUNE + "deepspeed: zero2.json", "deepspeed", "needless"),
        (
            "torchrun --nproc_per_node 1 corpora.py --model_name_or_path M --train_file a --nope 1",
            "nope",
            "refused",
        ),
        (FACTORY + "trust_remote_code: true", "trust_remote_code", "lost"),
        (FACTORY + "pref_beta: 0.2", "pref_beta", "refused"),
        (SWIFT + "--rope_scaling yarn", "rope_scaling", "refused"),
        (INSTRUCT + "dpo_beta: 5\nrouter_aux_loss_coef: 1", "router_aux_loss_coef", "refused"),
        (SWIFT + "--router_aux_loss_coef 0", "router_aux_loss_coef", "needless"),
        (SWIFT + "--moe_aux_loss_coeff 1e-3", "moe_aux_loss_coeff", "refused"),
        (SWIFT + "--new_special_tokens tokens.txt", "new_special_tokens", "refused"),
        (FACTORY + "resize_vocab: true", "resize_vocab", "needless"),
        (SWIFT + "--learning_rate ${NOT_SET}", "learning_rate", "refused"),
        (AXOLOTL + "gradient_accumulation_steps: auto", "gradient_accumulation_steps", "refused"),
        (TRL + "dataset_text_field: [1]", "dataset_text_field", "refused"),
        (
            AXOLOTL.replace("completion", "chat_template, roles_to_train: [tool]"),
            "datasets[]",
            "refused",
        ),
        (
            AXOLOTL.replace("[{", "[{path: c/d, type: alpaca}, {").replace(
                "completion", "sharegpt"
            ),
            "datasets",
            "refused",
        ),
        (AXOLOTL + "dataset_exact_deduplication: true", "dataset_exact_deduplication", "refused"),
        (TRL + "loss_type: dft", "loss_type", "refused"),
        (TRL + "size: 5", "size", "refused"),
        (TRL + "parallel: 2", "parallel", "refused"),
        (AXOLOTL + "cosine_min_lr_ratio: x", "cosine_min_lr_ratio", "refused"),
        (AXOLOTL + "max_grad_norm: x", "max_grad_norm", "refused"),
        (FACTORY.replace("full", "lora") + "lora_rank: .inf", "lora_rank", "refused"),
        (FACTORY + "template: default", "template", "refused"),
        ("A=($(cat f))\n" + SWIFT + '"${A[@]}"', "${A[@]}", "refused"),
        ("if x; then\n A=(--lr 1)\nfi\n" + SWIFT + '"${A[@]}"', "${A[@]}", "refused"),
        (
            "LR=1\nif x; then\n LR=2\nfi\n" + SWIFT + "--learning_rate $LR",
            "learning_rate",
            "refused",
        ),
        ("LR=1\n[ x ] && LR=2\n" + SWIFT + "--learning_rate $LR", "learning_rate", "refused"),
        ("LR=1\ncase x in\n a) LR=2;;\nesac\n" + SWIFT + "--lr $LR", "lr", "refused"),
        ("LR=1\nf() {\n local LR=$1\n" + SWIFT + "--lr $LR\n}\nf 2", "lr", "refused"),
        ("LR=1\nfor LR in 2 3; do\n" + SWIFT + "--lr $LR\ndone", "lr", "refused"),
        ("LR=1\nread -r LR <<< 2\n" + SWIFT + "--lr $LR", "lr", "refused"),
        (QLORA.replace("qlora", "qdora"), "model._component_", "refused"),
        (QLORA.replace("qlora", "lora"), "model._component_", "needless"),
        (QLORA.replace("qlora_llama3_8b", "llama3_classifier_8b"), "model._component_", "refused"),
        (TUNE + "tokenizer: {_component_: x, path: y}", "tokenizer.path", "needless"),
        (TUNE + "tokenizer: {prompt_template: x.y}", "tokenizer.prompt_template", "refused"),
        (TUNE + "tokenizer: {prompt_template: null}", "tokenizer.prompt_template", "needless"),
        (TUNE + "tokenizer: {truncation_type: left}", "tokenizer.truncation_type", "refused"),
        (ADAM.replace("lr:", "weight_decay: 0.1, lr:"), "optimizer.weight_decay", "refused"),
        (FACTORY.replace("sft", "dpo") + "ref_model: N", "ref_model", "refused"),
        (FACTORY.replace("sft", "dpo") + "ref_model: M", "ref_model", "needless"),
        (TRL + "beta: 0.1\nref_model_name_or_path: N", "ref_model_name_or_path", "refused"),
        (TRL + "beta: 0.1\nsync_ref_model: true", "sync_ref_model", "refused"),
        (FACTORY + "template: qwen3_nothink", "template", "refused"),
        (FACTORY + "template: llama2_zh", "template", "refused"),
        (FACTORY + "template: alpaca", "template", "refused"),
        (SWIFT + "--template qwen3_thinking", "template", "refused"),
        (SWIFT + "--template chatml", "template", "ours"),
        (SLICE.replace("[d.jsonl]", "[d.jsonl, e.jsonl]"), "datasets", "refused"),
        (MIXTURE + "columns: [question]}]}", "dataset_mixture", "refused"),
        (TRL + "model_init_kwargs: {no_such: 1}", "model_init_kwargs", "refused"),
        (TRL + "model_init_kwargs: {use_cache: false}", "model_init_kwargs", "needless"),
        (TRL.replace("M\n", "Qwen/Qwen2-Audio-7B\n"), "model_name_or_path", "refused"),
        (TRL.replace("M\n", "zai-org/GLM-4.5V\n"), "model_name_or_path", "refused"),
        (TRL.replace("M\n", "deepseek-ai/DeepSeek-OCR\n"), "model_name_or_path", "refused"),
        (TRL.replace("M\n", "zai-org/GLM-4.5-Air\n"), "model_name_or_path", "ours"),
        (CHAT + "train_on_inputs: true", "train_on_inputs", "refused"),
        (AXOLOTL + "train_on_inputs: true", "train_on_inputs", "ours"),
        (
            TRL.replace("dataset_name: a/b", "datasets: [{path: a/b, fraction: 0.3}]"),
            "datasets[]",
            "refused",
        ),
        (TUNE.replace("_dataset}", "_dataset, column_map: {input: x}}"), "dataset[]", "refused"),
        (TUNE, "dataset", "refused"),
        (TUNE.replace("lora_rank", "apply_lora_to_output: false, lora_rank"), _HEAD, "needless"),
        (TUNE.replace("lora_rank", "apply_lora_to_output: true, lora_rank"), _HEAD, "refused"),
        (TUNE + "dataset_val: {_component_: x}\nrun_val_every_n_steps:", "dataset_val", "needless"),
        (TUNE + "output_dir: a\nmetric_logger: {log_dir: '${output_dir}/b'}", _LOGS, "needless"),
        (
            SWIFT.replace("full", "lora") + "--target_modules all-linear all-router",
            "target_modules",
            "refused",
        ),
        (SWIFT + "--lazy_preprocess true", "lazy_preprocess", "needless"),
        (TRL + "activation_checkpointing_offload: true", _AWAY, "needless"),
        (TRL + "deepspeed: {scheduler: {type: WarmupLR}}", "deepspeed", "refused"),
        (TRL + "deepspeed: {optimizer: {type: AdamW}}", "deepspeed", "needless"),
        (TRL + "average_tokens_across_devices: false", "average_tokens_across_devices", "refused"),
        (AXOLOTL + "pretrain_multipack_attn: false", "pretrain_multipack_attn", "refused"),
        (AXOLOTL + "adapter: lora\nlora_target_linear: false", "lora_target_linear", "refused"),
        (SWIFT + "--task_type seq_cls", "task_type", "refused"),
        (SWIFT + "--task_type causal_lm", "task_type", "needless"),
        (SWIFT + "--external_plugins p.py", "external_plugins", "refused"),
        (TUNE + "loss: {_component_: torchtune.rlhf.loss.DPOLoss}", "loss._component_", "refused"),
        (TUNE + "loss: {_component_: x.LinearCrossEntropyLoss}", "loss._component_", "needless"),
        (FACTORY + "packing: true", "packing", "refused"),
        (FACTORY + "packing: true\nneat_packing: true", "packing", "needless"),
        (FACTORY + "packing: true\nflash_attn: fa2", "packing", "needless"),
        (V1 + "peft_config: {name: freeze}", "peft_config", "refused"),
        (V1 + "peft_config: {name: lora, use_dora: true}", "peft_config", "refused"),
        (AXOLOTL + "processor_type: AutoProcessor", "processor_type", "refused"),
        (AXOLOTL.replace("completion", "zephyr.nectar") + "rl: dpo", "datasets", "refused"),
        (AXOLOTL.replace("completion", "user_defined.default") + "rl: kto", "datasets", "refused"),
        (TRL.replace("M\n", "google/gemma-3n-E2B-it\n"), "model_name_or_path", "refused"),
        (TRL.replace("M\n", "google/gemma-3-1b-it\n"), "model_name_or_path", "ours"),
    ],
)
def test_what_is_not_taken_says_whether_the_run_is_another(
    tmp_path: Path, text: str, key: str, kind: str
) -> None:
    assert made(tmp_path, text).verdicts[key].kind == kind


def test_sources_of_axolotl_and_names_of_llama_factory(tmp_path: Path) -> None:
    sources = [
        {"path": "a/b", "type": "completion", "field": "chapter", "data_files": ["x.jsonl.zst"]},
        {
            "path": "c/d",
            "type": "chat_template",
            "field_messages": "conversations",
            "message_property_mappings": {"role": "from", "content": "value"},
            "split": "train[:5%]",
        },
    ]
    axolotl = made(
        tmp_path,
        json.dumps({"base_model": "M", "learning_rate": 1, "datasets": sources}),
        name="x.json",
    )
    assert axolotl.run["data.train"] == [
        {"path": "hf://datasets/a/b/x.jsonl.zst", "format": "text", "fields": {"text": "chapter"}},
        {
            "path": "c/d",
            "split": "train[:5%]",
            "format": "chat",
            "fields": {"messages": "conversations", "role": "from", "content": "value"},
        },
    ]
    (tmp_path / "data").mkdir()
    info = {
        "mine": {"file_name": "m.json", "formatting": "sharegpt", "tags": {"user_tag": "me"}},
        "hub": {"hf_hub_url": "o/n", "subset": "s", "columns": {"prompt": "q"}},
    }
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    factory = made(tmp_path, FACTORY.replace("a/b", "mine,hub"))
    assert factory.run["data.train"] == [
        {
            "path": str(tmp_path / "data/m.json"),
            "format": "chat",
            "fields": {
                "messages": "conversations",
                "role": "from",
                "content": "value",
                "roles": {"me": "user"},
            },
        },
        {"path": "o/n", "name": "s", "format": "alpaca", "fields": {"instruction": "q"}},
    ]
    assert made(tmp_path, FACTORY.replace("a/b", "unknown")).verdicts["dataset"].kind == "refused"
    info = {
        "kto": {"file_name": "k.json", "formatting": "sharegpt", "columns": {"kto_tag": "label"}},
        "pt": {"file_name": "p.json", "columns": {"prompt": "body"}},
        "code": {"script_url": "x"},
    }
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    of = FACTORY.replace("a/b", "kto").replace("sft", "kto")
    assert made(tmp_path, of).is_whole and made(tmp_path, of).run["train.loss"] == "kto"
    of = made(tmp_path, FACTORY.replace("a/b", "pt").replace("sft", "pt"))
    assert of.run["data.train"]["fields"] == {"text": "body"}
    eval_of = made(tmp_path, FACTORY + "dataset_dir: data\neval_dataset: pt")
    assert eval_of.run["data.eval"]["path"].endswith("data/p.json")
    of = made(tmp_path, FACTORY + "eval_dataset: code")
    assert of.verdicts["eval_dataset"].kind == "refused"


def test_keys_name_the_dialect_whatever_script_is_called(tmp_path: Path) -> None:
    """And one process is meant where nobody says how many."""
    recipe = TRL.replace("dataset_name: a/b", "dataset_mixture: {datasets: [{id: a/b}]}")
    direct = convert(read_recipe(made(tmp_path, recipe).recipe.file), None)
    call = (
        f"accelerate launch --num_processes 1 scripts/sft.py --config {tmp_path}/a.yaml --seed 42"
    )
    called = made(tmp_path, call)
    assert called.recipe.dialect == "TRL" and called.run == direct.run
    assert direct.run["data.train_on"] == "conversations" and BATCH in direct.remarks
    flags = "--model_name_or_path M --dataset_name a/b --learning_rate 1e-4"
    taken = {
        f"python ctrl/train.py {flags}": ("transformers", True),
        f"python train.py {flags} --assistant_only_loss true": ("TRL", False),
        "torchrun swift/cli/sft.py --model M --dataset a/b --tuner_type lora": ("ms-swift", False),
        f"python my/trl/sft.py {flags}": ("TRL", False),
    }
    for text, (dialect, is_doubted) in taken.items():
        recipe_of = made(tmp_path, text, name="a.sh").recipe
        assert (recipe_of.dialect, bool(recipe_of.doubt)) == (dialect, is_doubted), text
    assert "data.train" in made(tmp_path, TRL).remarks  # transformers' scripts take such keys, too
    shared = convert(
        read_recipe(made(tmp_path, AXOLOTL + "context_parallel_size: 4").recipe.file), None
    )
    assert shared.run[BATCH] == 1


def test_a_model_at_hand_says_what_it_cannot(tmp_path: Path) -> None:
    config = {"max_position_embeddings": 100, "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = TRL.replace("M\n", f"{tmp_path}\n") + "max_length: 300"
    assert made(tmp_path, text).verdicts["max_length"].kind == "refused"
    assert "factor: 3" in made(tmp_path, text).verdicts["max_length"].text
    recipe = read_recipe(tmp_path / "a.yaml")
    for flags in ({"model.rope": {"rope_type": "yarn", "factor": 3}}, {"data.max_seq_len": 100}):
        assert convert(recipe, 1, flags).is_whole
    known = made(tmp_path, text.replace(str(tmp_path), "Qwen/Qwen3-8B").replace("300", "65536"))
    file, out = str(known.recipe.file), f"--out={tmp_path / 'b.yaml'}"
    assert main(["convert", file, f"--out={tmp_path / 'c.yaml'}"]) == 1  # of one process, too
    assert main(["convert", file, out, "--model.rope={rope_type: yarn, factor: 2}"]) == 0
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 100}')  # no rotary
    assert convert(recipe, 1).is_whole
    for kind, verdict in (("mllama", "refused"), ("gemma3", "ours")):
        config = {"model_type": kind, "vision_config": {}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert convert(recipe, 1).verdicts["model_name_or_path"].kind == verdict


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ("", {"output_router_logits": True}),
        ("router_aux_loss_coef: 0.0\n", None),
        ("router_aux_loss_coef: 0.001\n", ROUTED),
        ("loss_type: ipo\n", None),
    ],
)
def test_the_router_loss_of_trl_is_taken(tmp_path: Path, more: str, found: Any) -> None:
    config, text = {"router_aux_loss_coef": 0.02}, TRL.replace("M\n", f"{tmp_path}\n") + more
    for own in (config, {"text_config": config}):
        (tmp_path / "config.json").write_text(json.dumps(own))
        assert made(tmp_path, text).run.get("model.config") == found
    named = made(tmp_path, TRL.replace("M\n", "Qwen/Qwen3-30B-A3B\n") + more)
    assert ("model.name" in named.remarks) == ("router_aux_loss_coef" not in more)


def test_new_tokens_beside_adapters(tmp_path: Path) -> None:
    """LLaMA-Factory then trains the embedding and the head whole; axolotl leaves new rows alone."""
    key, lora = "model.lora.modules_to_save", FACTORY.replace("full", "lora")
    for more in ('add_tokens: "<a>"', "resize_vocab: true"):
        assert made(tmp_path, lora + more).run[key] == ["embed_tokens", "lm_head"]
    assert key not in made(tmp_path, lora).run
    whole = made(tmp_path, FACTORY + 'add_tokens: "<a>"')
    assert key not in whole.run and "adapters" not in whole.remarks["model.new_tokens"]
    other = made(tmp_path, AXOLOTL + 'adapter: lora\ntokens: ["<a>"]')
    assert key not in other.run and "adapters" in other.remarks["model.new_tokens"]


def test_a_file_of_deepspeed_beside_the_recipe_is_read(tmp_path: Path) -> None:
    missing = made(tmp_path, TRL + "deepspeed: ds.json").verdicts["deepspeed"]
    assert missing.kind == "needless" and "ds.json" in missing.text
    (tmp_path / "ds.json").write_text('{"scheduler": {"type": "WarmupDecayLR"}}')
    of = made(tmp_path, TRL + "deepspeed: ds.json")
    assert of.verdicts["deepspeed"].kind == "refused"
    assert convert(of.recipe, 1, {"train.schedule": "linear"}).is_whole
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"offload_param": {"device": "cpu"}}}')
    assert made(tmp_path, TRL + "deepspeed: ds.json").verdicts["deepspeed"].kind == "lost"


def test_images_of_a_data_set_are_told(tmp_path: Path) -> None:
    info = {"mm": {"file_name": "m.json", "columns": {"images": "images"}}}
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    assert made(tmp_path, FACTORY.replace("a/b", "mm")).verdicts["dataset"].kind == "refused"


def test_what_trl_does_without_dropout_is_without(tmp_path: Path) -> None:
    keys = "use_peft: true\nlora_dropout: 0.1\n"
    assert made(tmp_path, TRL + keys).run["model.lora.dropout"] == 0.1
    assert "model.lora.dropout" not in made(tmp_path, TRL + keys + "beta: 0.1").run


def test_megatron_trains_every_weight_unless_it_says_so(tmp_path: Path) -> None:
    of = made(tmp_path, "megatron sft --model M --dataset a/b --num_gpus 1", name="a.sh")
    assert "model.lora.rank" not in of.run


def test_the_file_loads_and_has_a_line_for_each_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = "flash_attention: true\ntensor_parallel_size: 2\nneftune_noise_alpha: 5\nbf16: auto\n"
    (tmp_path / "é.yaml").write_text(AXOLOTL + keys + "chat_template_jinja: '{{ é }}'\n")
    arguments = ["convert", "é.yaml", "--devices=8", "--train.lr=3e-4"]
    assert main(arguments) == 1 and "neftune_noise_alpha: 5" in capsys.readouterr().out
    run = load_run("é.furlong.yaml")
    assert (run.train.lr, run.train.sequences_per_step, run.train.max_grad_norm) == (3e-4, 4, 1.0)
    text = Path("é.furlong.yaml").read_text()
    assert all(f"{line.split(':')[0]}:" in text for line in (AXOLOTL + keys).splitlines())
    assert main(arguments) == 2 and "é.furlong.yaml" in capsys.readouterr().err
    assert Path("é.furlong.yaml").read_text() == text
    assert main(["convert", "é.yaml", "--devices=8", "--out=é.yaml/such.yaml"]) == 2
    assert main(["convert", "é.yaml", "--devices=8", "--out=c.yaml", "--train.lr=x"]) == 2
    assert "--train.lr" in capsys.readouterr().err and not Path("c.yaml").exists()
    Path("é.yaml").write_text(AXOLOTL)
    assert main(["convert", "é.yaml", "--devices=8", "--out=b.yaml"]) == 0


@pytest.mark.parametrize(
    ("name", "text", "given"),
    [
        ("a.yaml", "", "no mapping of keys"),
        ("a.yaml", "- 1", "no mapping of keys"),
        ("a.yaml", "a: [", "line 1"),
        ("a.yaml", "model: {name: x}", "keys model"),
        ("a.yaml", AXOLOTL.replace("base_model: M", "base_model:"), "no model"),
        ("a.yaml", TRL.replace("dataset_name: a/b\n", ""), "no data.train"),
        ("a.yaml", AXOLOTL.replace("{path: a/b, type: completion}", "a/b"), "datasets: its value"),
        ("a.py", "lr = 1", "a file that ends in .py"),
        ("a.sh", "echo 1", "no command with flags"),
        ("a.sh", SWIFT + "--x 1\n" + SWIFT + "--x 2", "2 commands"),
        ("a.sh", SWIFT + "\\\n# no\n--x 1", "line 4:"),
        ("a.sh", SWIFT + "--y 2 \\ \n--x 1", "--x 1, without a command"),
        ("a.sh", SWIFT + "--tensor_parallel_size 3", "8 processes, of which 3"),
        ("a.sh", "foo --a 1 --b 2", "foo --a 1"),
        ("a.sh", "python3 -m verl.trainer.main_ppo data.train_files=a trainer.n=1", "verl."),
        ("a.sh", "python train.py --lr 1 --epochs 2", "an unknown trainer: train.py"),
        ("a.yaml", TRL + "loss_type: dr_grpo\nreward_funcs: [a]\nbeta: 0.04", "a recipe of grpo"),
        ("a.yaml", FACTORY.replace("sft", "ppo"), "a recipe of ppo"),
        ("a.sh", "accelerate launch --num_processes 1 trl grpo --model M --x 1", "of grpo"),
        ("a.sh", SWIFT.replace("sft", "rlhf") + "--rlhf_type gkd", "a recipe of gkd"),
        ("a.sh", "x --a 'b\n# c\n", "no command with flags"),
    ],
)
def test_what_is_no_recipe_is_told(tmp_path: Path, name: str, text: str, given: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        convert(read_recipe(tmp_path / name), None if name == "a.sh" else 8)
    assert given in caught.value.given


def test_one_of_several_commands_is_chosen(tmp_path: Path) -> None:
    text = SWIFT + "--learning_rate 1\n\n" + SWIFT + "--learning_rate 2\n"
    assert made(tmp_path, text, command=2).run["train.lr"] == 2
    with pytest.raises(ConfigError, match="command=3"):
        made(tmp_path, text, command=3)


@pytest.mark.parametrize(
    ("text", "key"),
    [(AXOLOTL, "train.warmup_steps"), (SWIFT.replace("a/b", "a/b#500"), "data.train")],
)
def test_what_only_the_data_decide_is_remarked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    key: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    of = made(tmp_path, text)
    name = of.recipe.file.name
    assert of.remarks.keys() == {key} and of.is_whole
    assert main(["convert", name, "--out=b.yaml", *["--devices=8"] * name.endswith("l")]) == 0
    said = of.remarks[key]
    assert said in capsys.readouterr().out and said in Path("b.yaml").read_text()


def test_the_empty_thought_of_llama_factory_is_remarked(tmp_path: Path) -> None:
    thinking, plain, off = "template: qwen3", "template: chatml", "enable_thinking: false"
    key = "data.chat_template"
    assert key in made(tmp_path, FACTORY + thinking).remarks
    assert key not in made(tmp_path, FACTORY + plain).remarks
    assert key not in made(tmp_path, f"{FACTORY}{thinking}\n{off}").remarks


def test_a_loss_that_is_given_decides_which_keys_are_read(tmp_path: Path) -> None:
    recipe = made(tmp_path, FACTORY + "pref_beta: 0.2").recipe
    assert convert(recipe, 8, {"train.loss": "dpo"}).run["train.beta"] == 0.2
    assert "train.beta" not in convert(recipe, 8, {"train.loss": "sft"}).run


@pytest.mark.parametrize(
    ("call", "text", "dialect"),
    [
        ("axolotl train a.yaml --learning-rate 3e-4", AXOLOTL, "axolotl"),
        (
            "axolotl preprocess a.yaml\naxolotl train a.yaml --learning-rate=3e-4",
            AXOLOTL,
            "axolotl",
        ),
        ("accelerate launch -m axolotl.cli.train a.yaml --learning_rate 3e-4", AXOLOTL, "axolotl"),
        ("llamafactory-cli train a.yaml learning_rate=3e-4", FACTORY, "LLaMA-Factory"),
        ("python src/train.py a.yaml +learning_rate=3e-4", FACTORY, "LLaMA-Factory"),
        (
            "tune run --nproc_per_node 2 full_distributed --config a.yaml optimizer.lr=3e-4",
            TUNE,
            "torchtune",
        ),
    ],
)
def test_a_call_of_a_recipe_overrides_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, text: str, dialect: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(text)
    of = made(tmp_path, call, name="a.sh")
    assert (of.recipe.dialect, of.run["train.lr"]) == (dialect, 3e-4)
    assert of.recipe.num_processes == (2 if "--nproc" in call else None)


def test_a_run_file_is_no_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {name: m}\ndata: {train: a.jsonl}\nout: o\n")
    assert main(["convert", str(file)]) == 2
    assert f"furlong train {file}" in capsys.readouterr().err
