"""Job keys of other frameworks, and the keys of a job file that take their place.

    train: {learning_rate: 3e-4}    ─▶   train.learning_rate: unknown key; did you mean 'train.optimizer.lr'?
    tensor_parallel_size: 4         ─▶   tensor_parallel_size: unknown key; did you mean 'parallel.mesh' ("tp=N")?

The words are those of transformers' TrainingArguments and configurations, Lightning, DeepSpeed, Megatron-LM, torchtitan
and nanoGPT; docs/guide.md shows the same table. A word counts at any level of the file, in small or capital letters,
with hyphens or underscores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ForeignKeys:
    """Words of other frameworks with one meaning.

    Attributes:
        ours: the full key in a job file; with "--", an option of `quintsched run`.
        value: how the value is written there; "": as it is.
        theirs: the words, separated by spaces.
    """

    ours: str
    value: str
    theirs: str


FOREIGN_KEYS: Sequence[ForeignKeys] = (
    # model
    ForeignKeys("model.name", "", "model_name model_type model_class arch architecture"),
    ForeignKeys(
        "model.name",
        '"my_file.py:build", which returns the model with its adapters, or with weights that are not trained',
        "lora use_lora lora_r lora_rank lora_alpha lora_dropout lora_target_modules lora_target lora_config qlora peft "
        "use_peft peft_type peft_config adapter adapters target_modules task_type finetuning_type freeze freeze_layers "
        "freeze_backbone quantization load_in_4bit load_in_8bit attn_implementation flash_attention use_flash_attn",
    ),
    ForeignKeys(
        "model.pretrained",
        "a safetensors file, or a folder with one",
        "model_name_or_path pretrained_model_name_or_path pretrained_path pretrained_checkpoint init_from",
    ),
    ForeignKeys(
        "model.options.hidden", "", "hidden hidden_dim hidden_size d_model n_embd embed_dim embedding_dim model_dim dim"
    ),
    ForeignKeys("model.options.depth", "", "depth num_layers n_layers n_layer num_hidden_layers num_blocks"),
    ForeignKeys("model.options.heads", "", "heads num_heads n_heads n_head num_attention_heads"),
    ForeignKeys("model.options.kv_heads", "", "num_key_value_heads n_kv_heads num_query_groups"),
    ForeignKeys("model.options.head_size", "", "head_dim kv_channels"),
    ForeignKeys("model.options.ffn", "", "intermediate_size ffn_hidden_size ffn_dim d_ff mlp_dim"),
    ForeignKeys("model.options.rope_base", "", "rope_theta rotary_base"),
    ForeignKeys("model.options.dropout", "", "dropout_rate hidden_dropout hidden_dropout_prob resid_pdrop"),
    ForeignKeys("model.options.tied", "true or false", "tie_word_embeddings tie_weights"),
    ForeignKeys("model.options.patch", "", "patch_size"),
    ForeignKeys("model.options.experts", "with model.name: moe-gpt", "num_experts num_local_experts n_routed_experts"),
    ForeignKeys("model.options.top_k", "with model.name: moe-gpt", "num_experts_per_tok moe_router_topk moe_top_k"),
    ForeignKeys(
        "model.options.balance", "with model.name: moe-gpt", "moe_aux_loss_coeff router_aux_loss_coef aux_loss_coef"
    ),
    # data
    ForeignKeys("data.name", '"digits", "mnist", "text", or "my_file.py:load"', "dataset dataset_name"),
    ForeignKeys("data.path", "", "data_path data_dir data_root dataset_path dataset_dir train_file train_data_path"),
    ForeignKeys(
        "data.path",
        "token shards, which quintsched data tokenize writes",
        "tokenizer tokenizer_name tokenizer_name_or_path tokenizer_path tokenizer_type",
    ),
    ForeignKeys(
        "data.name",
        '"my_file.py:load", with PromptAnswers, which trains on answers alone',
        "train_on_inputs train_on_prompt mask_inputs mask_prompt completion_only_loss assistant_only_loss "
        "response_template instruction_template prompt_template chat_template",
    ),
    ForeignKeys("data.options.pack", "of data.name: tokens", "packing packed sample_packing pack_sequences"),
    ForeignKeys(
        "data.options.sequence",
        "of data.name: text",
        "seq_len seq_length sequence_length max_seq_len max_seq_length max_length block_size context_length",
    ),
    ForeignKeys(
        "data.options.validation",
        "of data.name: tokens",
        "validation_split val_split val_fraction validation_fraction eval_fraction test_size",
    ),
    ForeignKeys(
        "data.name",
        '"my_file.py:load", which returns a DataLoader with workers',
        "num_workers dataloader_num_workers n_workers",
    ),
    # parallel
    ForeignKeys(
        "parallel.mesh",
        'the product of the axes, such as "dp=2,pp=2" for 4',
        "num_gpus n_gpus gpus world_size num_processes nproc_per_node num_devices devices mesh_dim mesh_name "
        "mesh_shape device_mesh strategy strategy_name",
    ),
    ForeignKeys(
        "parallel.mesh",
        '"dp=N"',
        "dp dp_size data_parallel_size data_parallel_degree data_parallel_replicate_degree",
    ),
    ForeignKeys(
        "parallel.mesh",
        '"pp=N"',
        "pp pp_size pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree num_stages",
    ),
    ForeignKeys(
        "parallel.mesh",
        '"tp=N"',
        "tp tp_size tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree model_parallel_size",
    ),
    ForeignKeys("parallel.mesh", '"cp=N"', "cp cp_size context_parallel_size context_parallel_degree"),
    ForeignKeys(
        "parallel.mesh",
        '"ep=N"',
        "ep ep_size expert_parallel_size expert_model_parallel_size expert_parallel_degree",
    ),
    ForeignKeys(
        "parallel.schedule",
        "1F1B: 1f1b, Interleaved1F1B: interleaved-1f1b, AFAB and GPipe: gpipe",
        "pipeline_schedule pipeline_parallel_schedule pp_schedule schedule_type",
    ),
    ForeignKeys("parallel.microbatches", "", "num_microbatches n_microbatches num_micro_batches micro_batches"),
    ForeignKeys(
        "parallel.microbatches",
        "batch_size / (accumulate x dp x ep x the samples of a microbatch)",
        "micro_batch_size microbatch_size per_device_train_batch_size per_device_batch_size local_batch_size "
        "device_batch_size train_micro_batch_size_per_gpu pipeline_parallel_microbatch_size",
    ),
    ForeignKeys(
        "parallel.chunks",
        "stages of a pipeline rank",
        "virtual_pipeline_model_parallel_size virtual_pipeline_parallel_size num_model_chunks",
    ),
    ForeignKeys(
        "parallel.chunks",
        "the layers of a pipeline rank / N",
        "num_layers_per_virtual_pipeline_stage num_layers_per_virtual_stage",
    ),
    ForeignKeys(
        "parallel.zero",
        "0 to 3; FULL_SHARD: 3, SHARD_GRAD_OP: 2, use_distributed_optimizer: 1",
        "zero_redundancy zero_stage zero_optimization zero_level fsdp fsdp_sharding_strategy sharding_strategy "
        "use_distributed_optimizer deepspeed deepspeed_config",
    ),
    ForeignKeys(
        "parallel.recompute",
        "1 for true or full, 0 for false",
        "gradient_checkpointing activation_checkpointing activation_checkpoint use_activation_checkpointing "
        "checkpoint_activations recompute_activations recompute_granularity",
    ),
    ForeignKeys(
        "parallel.communication",
        "native, ring, tree, two-level or auto; over cp see parallel.context",
        "communication_pattern all_reduce_algorithm allreduce_algorithm",
    ),
    ForeignKeys(
        "parallel.context",
        "p2p: ring, all_gather: gather, a2a: ulysses",
        "cp_comm_type context_parallel_method context_parallel_rotate_method",
    ),
    ForeignKeys("parallel.sequence_parallel", "true or false", "enable_sequence_parallel use_sequence_parallel"),
    ForeignKeys(
        "parallel.bucket_mb",
        "MB, 10^6 bytes; elements x 4 / 10^6",
        "bucket_cap_mb bucket_size_mb reduce_bucket_size allreduce_bucket_size ddp_bucket_size",
    ),
    ForeignKeys(
        "parallel.buckets_per_stage",
        "sums of gradients are always hidden behind the last backward; more buckets begin earlier",
        "overlap_comm overlap_grad_reduce",
    ),
    # train
    ForeignKeys("train.epochs", "", "num_epochs max_epochs n_epochs num_train_epochs"),
    ForeignKeys(
        "train.max_steps",
        "",
        "max_iters max_iterations train_iters num_steps num_train_steps max_train_steps total_steps train_steps "
        "training_steps steps",
    ),
    ForeignKeys(
        "train.batch_size",
        "samples of a step, over all ranks and accumulated batches",
        "global_batch_size train_batch_size total_batch_size effective_batch_size",
    ),
    ForeignKeys(
        "train.accumulate",
        "the same number; with pp, parallel.microbatches fills the pipeline",
        "gradient_accumulation_steps gradient_accumulation grad_acc_steps grad_accum_steps grad_accumulation_steps "
        "accumulate_grad_batches accumulation_steps update_freq",
    ),
    ForeignKeys("train.optimizer.name", "adamw, sgd, muon, …", "optim optimizer_name optimizer_type"),
    ForeignKeys("train.optimizer.lr", "", "learning_rate base_lr max_lr peak_lr init_lr"),
    ForeignKeys("train.optimizer.weight_decay", "", "wd l2_penalty"),
    ForeignKeys("train.optimizer.betas", "[beta1, beta2]", "beta1 beta2 adam_beta1 adam_beta2"),
    ForeignKeys("train.optimizer.options", "{eps: 1e-8}", "eps epsilon adam_eps adam_epsilon"),
    ForeignKeys(
        "train.lr_schedule.name",
        "constant, linear, cosine, wsd, …",
        "lr_scheduler lr_scheduler_type scheduler scheduler_type lr_decay_style decay_type",
    ),
    ForeignKeys(
        "train.lr_schedule.warmup_steps", "", "warmup num_warmup_steps warmup_iters lr_warmup_steps lr_warmup_iters"
    ),
    ForeignKeys(
        "train.lr_schedule.warmup_steps",
        "the ratio x the number of steps",
        "warmup_ratio warmup_fraction lr_warmup_fraction",
    ),
    ForeignKeys("train.lr_schedule.min_factor", "min_lr / lr", "min_lr lr_min eta_min end_learning_rate"),
    ForeignKeys("train.lr_schedule.min_factor", "", "min_lr_ratio min_lr_rate min_lr_factor"),
    ForeignKeys("train.lr_schedule.decay_steps", "with name: wsd", "lr_wsd_decay_iters"),
    ForeignKeys("train.max_steps", "a decay ends with the run", "lr_decay_iters lr_decay_steps"),
    ForeignKeys(
        "train.clip",
        "the largest norm",
        "gradient_clipping gradient_clip gradient_clip_val max_grad_norm max_norm clip_grad clip_grad_norm grad_clip",
    ),
    ForeignKeys(
        "train.loss", '"my_file.py:loss"', "loss_fn loss_function criterion label_smoothing label_smoothing_factor"
    ),
    ForeignKeys(
        "train.evaluate_every",
        'steps, "5M tokens" or "10 min"; 0: the end of each epoch',
        "eval_interval eval_steps eval_every eval_freq evaluation_strategy eval_strategy val_interval "
        "val_check_interval validation_interval",
    ),
    ForeignKeys("train.patience", "validations", "early_stopping early_stopping_patience"),
    ForeignKeys("train.seed", "", "random_seed manual_seed"),
    ForeignKeys("train.seed", "samples are shuffled, in an order of this seed", "shuffle data_seed"),
    # runtime
    ForeignKeys(
        "runtime.precision",
        "float32, bfloat16 or float64; for fp16 Engine(…, grad_scaler=…)",
        "fp16 bf16 fp32 mixed_precision dtype torch_dtype param_dtype params_dtype use_amp amp",
    ),
    ForeignKeys(
        "runtime.transport", "auto, nccl, gloo or local", "backend dist_backend distributed_backend ddp_backend"
    ),
    ForeignKeys("runtime.compile", "true or false", "torch_compile use_compile compile_model"),
    ForeignKeys(
        "runtime.timeout_s", "seconds; minutes x 60", "timeout ddp_timeout dist_timeout distributed_timeout_minutes"
    ),
    ForeignKeys("runtime.trace", "a folder", "profile profiler profiling enable_profiling wall_clock_breakdown"),
    # checkpoint
    ForeignKeys(
        "checkpoint.dir",
        "",
        "output_dir out_dir save_dir checkpoint_dir ckpt_dir checkpoint_path default_root_dir",
    ),
    ForeignKeys(
        "checkpoint.every",
        'steps, "50M tokens" or "30 min"; 0: the end of each epoch',
        "save_steps save_interval save_every save_freq save_strategy checkpoint_interval checkpoint_every",
    ),
    ForeignKeys("checkpoint.keep", "", "save_total_limit keep_latest_k keep_last_n max_checkpoints"),
    # log
    ForeignKeys("log.path", "a file of JSON lines", "log_dir logging_dir log_file log_path"),
    ForeignKeys(
        "log.every",
        'steps, "1M tokens" or "30 s"',
        "logging_steps log_interval log_every_n_steps log_every log_freq print_freq steps_per_print",
    ),
    ForeignKeys(
        "log.sinks", "[tensorboard, wandb]", "report_to logger loggers wandb tensorboard use_wandb enable_wandb"
    ),
    ForeignKeys(
        "log.sinks",
        "{name: wandb, options: {project: …}}, {name: tensorboard, options: {log_dir: …}}",
        "wandb_project wandb_run_name wandb_entity tensorboard_dir",
    ),
    # quintsched run
    ForeignKeys("--resume", "a flag of quintsched run", "resume resume_from resume_from_checkpoint auto_resume"),
    ForeignKeys("--nnodes", "an option of quintsched run", "nnodes num_nodes n_nodes num_machines machines"),
)
"""All words that are known; each has one meaning."""

_MEANINGS = {word: meaning for meaning in FOREIGN_KEYS for word in meaning.theirs.split()}


def find_foreign_key(key: str) -> ForeignKeys | None:
    """Return the meaning of another framework's key, or None."""
    return _MEANINGS.get(key.lower().lstrip("-").replace("-", "_"))
