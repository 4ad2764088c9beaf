"""What verl, slime, TRL, prime-rl, SGLang and vLLM call the settings of this package.

Only for suggestions: no setting is taken under another name.
"""

_NAMES: dict[str, str] = {
    # rollout
    "rollout.samples_per_prompt": "n group_size num_generations n_samples_per_prompt rollouts_per_example "
    "num_samples_per_prompt rollout_n num_return_sequences",
    "rollout.prompts_per_step": "batch_size train_batch_size rollout_batch_size global_batch_size "
    "gen_batch_size num_prompts prompts_per_batch",
    "rollout.max_concurrent_requests": "max_num_seqs concurrency max_concurrency "
    "max_concurrent_rollouts sglang_server_concurrency",
    "rollout.max_sample_tokens": "seq_len max_seq_len max_seq_length max_length max_total_length "
    "max_model_length",
    "rollout.sampling.max_new_tokens": "max_tokens max_response_length max_completion_length "
    "rollout_max_response_len response_length max_response_len",
    "rollout.sampling.temperature": "temp rollout_temperature",
    "rollout.sampling.top_p": "rollout_top_p nucleus",
    "rollout.sampling.top_k": "rollout_top_k",
    "rollout.sampling.stop": "stop_strings stop_sequences rollout_stop",
    "rollout.sampling.stop_token_ids": "eos_token_id rollout_stop_token_ids",
    "rollout.dynamic_sampling": "filter_groups dynamic_sampling_filter_path",
    "rollout.dynamic_sampling.max_rounds": "max_num_gen_batches",
    # algorithm
    "algorithm.advantage": "adv_estimator advantage_estimator estimator",
    "algorithm.loss": "loss_type policy_loss loss_mode loss_fn",
    "algorithm.loss.clip_low": "clip_ratio_low epsilon eps_clip clip_ratio clip_eps cliprange clip_range",
    "algorithm.loss.clip_high": "clip_ratio_high epsilon_high eps_clip_high",
    "algorithm.loss.dual_clip": "clip_ratio_c eps_clip_c delta",
    "algorithm.reduction": "loss_agg_mode loss_aggregation token_level_loss calculate_per_token_loss",
    "algorithm.kl_coefficient": "kl_coef kl_coeff kl_loss_coef beta kl_beta kl_penalty init_kl_coef "
    "use_kl_loss kl_weight",
    "algorithm.correction": "use_tis rollout_correction importance_sampling_correction rollout_is "
    "vllm_importance_sampling_correction",
    "algorithm.correction.high": "tis_clip tis_imp_ratio_cap rollout_is_threshold "
    "vllm_importance_sampling_cap imp_ratio_cap",
    # optimizer
    "optimizer.lr": "learning_rate",
    "optimizer.betas": "adam_betas adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.eps": "adam_epsilon adam_eps",
    "optimizer.weight_decay": "wd",
    "optimizer.max_grad_norm": "grad_clip clip_grad gradient_clipping max_norm grad_norm",
    "optimizer.warmup_steps": "lr_warmup_steps lr_warmup_iters num_warmup_steps warmup warmup_ratio",
    "optimizer.schedule": "lr_scheduler_type lr_scheduler lr_decay_style scheduler warmup_style",
    "optimizer.min_lr_ratio": "min_lr",
    # train
    "train.steps": "max_steps total_training_steps num_steps num_rollout total_steps num_train_epochs "
    "total_epochs num_epochs epochs",
    "train.minibatches": "ppo_epochs num_iterations mini_batch_size ppo_mini_batch_size "
    "num_steps_per_rollout num_minibatches",
    "train.microbatch_tokens": "micro_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu "
    "ppo_max_token_len_per_gpu max_tokens_per_gpu per_device_train_batch_size gradient_accumulation_steps",
    "train.num_ranks": "world_size n_gpus_per_node nproc_per_node num_gpus num_gpus_per_node "
    "actor_num_gpus_per_node",
    "train.dtype": "precision torch_dtype bf16 fp16 param_dtype mixed_precision",
    "train.gradient_checkpointing": "enable_gradient_checkpointing activation_checkpointing recompute ac",
    "train.replay_routed_experts": "use_rollout_routing_replay router_replay routing_replay "
    "use_routing_replay r3",
    # model and engine
    "model.path": "model_path model_name_or_path hf_checkpoint pretrained model_name name_or_path",
    "model.attention": "attn_implementation attn attention_backend",
    "model.experts": "moe_impl experts_implementation",
    "engine.kv_cache_tokens": "max_total_tokens kv_cache_size gpu_memory_utilization mem_fraction_static",
    "engine.chunked_prefill_tokens": "chunked_prefill_size max_num_batched_tokens max_prefill_tokens",
    "engine.context_length": "max_model_len max_context_len",
    "engine.prefix_cache_tokens": "enable_prefix_caching disable_radix_cache",
    "engine.urls": "base_url base_urls server_url server_urls server_addresses vllm_server_base_url "
    "rollout_url url",
    "engine.api_key_env": "api_key api_key_var",
    "engine.admin_api_key_env": "admin_api_key",
    "engine.type": "rollout_backend backend_name inference_backend use_vllm vllm_mode",
    # weights, store
    "weights.transport": "weight_sync_method weight_broadcast update_weight_transfer_mode "
    "weight_sync_backend",
    "weights.bucket_bytes": "update_weights_bucket_megabytes update_weight_buffer_size bucket_size "
    "update_weights_bucket_size",
    # data and evaluation
    "environment.train_path": "train_files train_file prompt_data train_data dataset_path train_dataset",
    "environment.test_path": "val_files test_file eval_files val_data eval_prompt_data test_data",
    "environment.hub_dataset": "dataset dataset_name hf_dataset",
    "environment": "env data reward",
    "eval": "evaluation val validation test",
    "eval.every_steps": "test_freq eval_steps eval_interval eval_every val_interval eval_freq "
    "val_check_interval",
    "eval.num_problems": "val_size num_eval_examples num_examples eval_num_samples",
    # checkpoint, observe
    "checkpoint": "ckpt checkpoints checkpointing save",
    "checkpoint.every_steps": "save_freq save_steps save_interval interval save_every ckpt_interval",
    "checkpoint.keep": "save_total_limit max_actor_ckpt_to_keep keep_last max_to_keep keep_last_n",
    "checkpoint.resume": "resume_mode resume_from_checkpoint resume_from resume_path resume_step load "
    "resume_from_path",
    "observe": "logging log monitor",
    "observe.trackers": "logger loggers report_to wandb tensorboard use_wandb use_tensorboard "
    "tracking_backend wandb_project project_name",
    "output_dir": "save_dir default_local_dir out_dir log_dir run_dir output_path experiment_name run_name",
    "output_store": "store",
    "seed": "random_seed data_seed",
    "optimizer": "optim",
    "rollout.sampling": "sampling_params generation",
    "train": "trainer training",
}

OTHER_NAMES = {other: ours for ours, others in _NAMES.items() for other in others.split()}
"""Another tool's name, in lower case with underscores -> the path of the setting here."""
