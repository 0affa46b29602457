"""Names of Megatron-LM arguments by topic, and whether they change time or memory.

`search.engines.megatron.read` interprets the arguments.

Sources of the names:

- `megatron/training/arguments.py` of core 0.15 and of main in early 2026,
- fields that newer parsers turn into arguments: `TransformerConfig` and `ModelParallelConfig` of
  megatron-core 0.16.1, `megatron/training/config` of main in 2026,
- functional tests up to August 2026,
- arguments of core 0.8 and later that later releases removed.
"""

from __future__ import annotations

import re
from functools import cache

from autopar.run.rules import Estimate
from search.engines.arguments import BOTH

RELEASES = "core 0.8 to 0.16 and main of 2026"
"""Releases whose arguments are known."""

_HARMLESS: dict[str, str] = {
    "logging": """
        log-batch-size-to-tensorboard log-device-memory-used log-energy log-interval
        log-learning-rate-to-tensorboard log-loss-scale-to-tensorboard log-max-attention-logit
        log-memory-interval log-memory-to-tensorboard log-num-zeros-in-grad log-params-norm
        log-per-layer-resource-usage log-per-layer-resource-usage-interval log-progress
        log-straggler log-throughput log-timers-to-tensorboard log-validation-ppl-to-tensorboard
        log-world-size-to-tensorboard logging-level no-log-learnig-rate-to-tensorboard
        no-log-learning-rate-to-tensorboard no-log-loss-scale-to-tensorboard
        disable-log-loss-scale-to-tensorboard timing-log-level timing-log-option
        no-barrier-with-level-1-timing tensorboard-dir tensorboard-log-interval
        tensorboard-queue-size wandb-project wandb-entity wandb-exp-name wandb-save-dir

        moe-per-layer-logging moe-routing-trace-path moe-routing-trace-max-training-iters
        moe-routing-trace-capture-logits moe-routing-trace-capture-hidden-states
        moe-routing-trace-dump-weights config-logger-dir dump-param-to-param-group-map
        app-tag-run-name app-tag-run-version enable-one-logger no-one-logger one-logger-project
        one-logger-run-name one-logger-async one-logger-entity disable-straggler-on-startup
        straggler-ctrlr-port straggler-minmax-count
    """,
    "profiling": """
        profile profile-ranks profile-step-start profile-step-end use-pytorch-profiler
        pytorch-profiler-collect-shapes pytorch-profiler-collect-callstack
        pytorch-profiler-collect-chakra record-memory-history memory-snapshot-path nvtx-ranges
        run-workload-inspector-server gpu-sniff-test-interval flight-recorder-dump-path
        flight-recorder-trace-buffer-size no-flight-recorder-dump-on-timeout
        disable-flight-recorder-dump-on-timeout flight-recorder-include-stack-trace
        no-flight-recorder-include-only-active disable-flight-recorder-include-only-active
        no-flight-recorder-extra-dump-on-exec disable-flight-recorder-extra-dump-on-exec
        cuda-graph-warmup-steps cuda-graph-memory-report otel-enabled otel-service-name
        otel-span-groups
    """,
    "checkpoints": """
        save save-interval persistent-save-interval save-retain-interval save-params-interval
        save-activations-interval save-tokens-per-expert-interval save-wgrads-interval
        save-dgrads-interval load load-iteration finetune pretrained-checkpoint ckpt-step
        ckpt-format ckpt-convert-format ckpt-convert-save
        ckpt-convert-update-legacy-dist-opt-format ckpt-fully-parallel-save
        no-ckpt-fully-parallel-save ckpt-fully-parallel-load
        ckpt-fully-parallel-load-exchange-algo ckpt-fully-parallel-save-process-group
        ckpt-fully-parallel-load-process-group ckpt-fully-parallel-save-replicate-local
        ckpt-fully-parallel-load-replicate-local ckpt-assume-constant-structure
        no-ckpt-load-validate-sharding-integrity disable-ckpt-load-validate-sharding-integrity
        no-load-optim no-load-rng no-save-optim no-save-rng load-main-params-from-ckpt

        no-strict-fsdp-dtensor-load disable-strict-fsdp-dtensor-load auto-detect-ckpt-format
        dist-ckpt-format dist-ckpt-strictness dist-ckpt-save-pre-mcore-014
        dist-ckpt-optim-fully-reshardable distrib-optim-fully-reshardable-mem-efficient
        dist-ckpt-workers use-dist-ckpt async-save async-strategy async-ckpt-cpu-priority
        async-ckpt-io-priority async-ckpt-use-cpu-shm use-persistent-ckpt-worker
        non-persistent-save-interval non-persistent-ckpt-type non-persistent-global-ckpt-dir
        non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo verify-integrity
        use-checkpoint-args no-use-tokenizer-model-from-checkpoint-args
        disable-use-tokenizer-model-from-checkpoint-args exit-on-missing-checkpoint
        replication replication-jump replication-factor moe-use-upcycling
        moe-upcycling-granularity no-load-strict hetereogenous-dist-checkpoint

        ckpt-drop-redundant-extra-state override-ckpt-iteration keep-last
    """,
    "restarts": """
        adlr-autoresume adlr-autoresume-interval enable-ft-package calc-ft-timeouts
        ft-num-warmup-iters exit-duration-in-mins exit-signal exit-signal-handler
        exit-signal-handler-for-dataloader exit-signal-handler-for-training rerun-mode
        error-injection-rate error-injection-type result-rejected-tracker-filename
        iterations-to-skip inprocess-restart inprocess-max-iterations
        inprocess-monitor-thread-interval inprocess-monitor-process-interval
        inprocess-progress-watchdog-interval inprocess-heartbeat-interval inprocess-soft-timeout
        inprocess-hard-timeout inprocess-heartbeat-timeout inprocess-barrier-timeout
        inprocess-completion-timeout inprocess-last-call-wait inprocess-termination-grace-time
        inprocess-granularity inprocess-active-world-size inprocess-empty-cuda-cache
        check-for-spiky-loss check-for-large-grads no-check-for-nan-in-loss-and-grad

        check-for-nan-in-loss-and-grad check-weight-hash-across-dp-replicas-interval
    """,
    "data": """
        data-path train-data-path valid-data-path test-data-path data-args-path
        per-split-data-args-path per-dataset-sequences-path data-cache-path split mock-data
        dataloader-type dataloader-fast-cache-load dataloader-defer-npy-index-mmap num-workers
        num-dataset-builder-threads object-storage-cache-path s3-cache-path
        mid-level-dataset-surplus no-mmap-bin-files mmap-bin-files no-data-sharding data-sharding
        reset-position-ids reset-attention-mask eod-mask-loss fim-data fim-rate fim-spm-rate
        fim-split-sample fim-fragment-rate fim-no-prefix fim-prefix-token fim-middle-token

        fim-suffix-token fim-pad-token fim-eod-token mask-prob short-seq-prob sample-rate
        allow-ambiguous-pad-tokens no-create-attention-mask phase-transition-iterations
        disable-msc train-sync-interval
        enable-msc data-impl dataset train-data valid-data max-padding-length epochs
    """,
    "tokenizer": """
        merge-file vocab-file tokenizer-model tokenizer-metadata tokenizer-special-tokens
        tokenizer-sentencepiece-legacy tokenizer-hf-use-fast tokenizer-hf-no-use-fast
        tokenizer-hf-include-special-tokens tokenizer-hf-no-include-special-tokens
        no-tokenizer-sentencepiece-ignore-extra-whitespaces tiktoken-pattern
        tiktoken-num-special-tokens tiktoken-special-tokens legacy-tokenizer trust-remote-code
        chat-template tokenizer-prompt-format sft-tokenizer-prompt-format
        patch-tokenizer-type
    """,
    "optimizer": """
        lr min-lr lr-decay-style lr-decay-iters lr-decay-samples lr-warmup-fraction
        lr-warmup-iters lr-warmup-samples lr-warmup-init lr-wsd-decay-style lr-wsd-decay-iters
        lr-wsd-decay-samples decoupled-lr decoupled-min-lr head-lr-mult weight-decay
        start-weight-decay end-weight-decay weight-decay-incr-style no-weight-decay-cond-type
        apply-wd-to-qk-layernorm clip-grad adam-beta1 adam-beta2 adam-eps sgd-momentum
        muon-momentum muon-no-split-qkv muon-use-nesterov muon-scale-mode
        muon-fp32-matmul-prec muon-num-ns-steps muon-tp-mode muon-extra-scale-factor

        override-opt-param-scheduler use-checkpoint-opt-param-scheduler loss-scale
        initial-loss-scale min-loss-scale loss-scale-window hysteresis
        train-iters train-samples exit-interval
        lion-beta1 lion-beta2 muon-coefficient-type muon-nesterov muon-use-syrk
        adaptive-muon-beta2 adaptive-muon-eps grad-norm-skip-threshold
    """,
    "loss": """
        calculate-per-token-loss mtp-loss-scaling-factor moe-aux-loss-coeff moe-z-loss-coeff
        moe-router-bias-update-rate dsa-indexer-loss-coeff
        dsa-indexer-use-sparse-loss
    """,
    "initialization": """
        seed init-method-std init-method-xavier-uniform embedding-init-method-std
        data-parallel-random-init no-initialization no-perform-initialization
        use-cpu-initialization init-model-with-meta-device inference-rng-tracker
        te-rng-tracker use-te-rng-tracker
    """,
    "evaluation": """
        eval-iters eval-interval eval-global-batch-size eval-micro-batch-size
        start-eval-at-iter full-validation multiple-validation-sets validation-set-names
        skip-train test-mode test-only
    """,
    "numbers": """
        apply-layernorm-1p apply-query-key-layer-scaling norm-epsilon rotary-base
        dsa-indexer-rope-interleaved no-dsa-indexer-rotate-activation
        disable-dsa-indexer-rotate-activation dsa-indexer-k-norm-epsilon dsa-indexer-k-norm-fp32
        rotary-interleaved rotary-seq-len-interpolation-factor rotary-scaling-factor
        use-rope-scaling rope-scaling-factor mscale mscale-all-dim attention-softmax-in-fp32
        glu-linear-offset
        disable-bf16-reduced-precision-matmul
        moe-router-load-balancing-type
        moe-router-pre-softmax moe-router-score-function moe-router-topk-scaling-factor
        moe-router-enable-expert-bias moe-router-dtype moe-token-drop-policy fp8-margin
        fp8-interval fp8-amax-history-len fp8-amax-compute-algo qk-clip-alpha qk-clip-threshold
        softmax-scale no-masked-softmax-fusion no-bias-gelu-fusion no-persist-layer-norm

        ddp-average-in-collective no-gradient-reduce-div-fusion gradient-accumulation-fusion
        rope-type moe-shared-expert-gate moe-router-padding-for-fp8
        moe-router-padding-for-quantization moe-input-jitter-eps yarn-beta-fast
        yarn-beta-slow yarn-correction-range-round-to-int
        no-yarn-correction-range-round-to-int yarn-original-max-position-embeddings use-mup
        mup-attn-scale-power mup-base-head-dim mup-base-hidden-size mup-embedding-mult
        mup-output-mult mup-width-mult
    """,
    "process groups": """
        distributed-backend distributed-timeout-minutes distributed-timeout-seconds-after-init
        disable-gloo-process-groups enable-gloo-process-groups local-rank lazy-mpu-init
        use-tp-pp-dp-mapping nccl-communicator-config-path pipeline-model-parallel-comm-backend
        tp-comm-bootstrap-backend use-ring-exchange-p2p world-size
    """,
    "the collector of garbage": """
        manual-gc manual-gc-interval no-manual-gc-eval disable-manual-gc-eval
        empty-unused-memory-level
    """,
    "inference": """
        inference-batch-times-seqlen-threshold max-tokens-to-oom flash-decode
        use-legacy-static-engine inference-max-requests inference-max-seq-length
        inference-max-batch-size inference-dynamic-batching
        inference-dynamic-batching-buffer-size-gb inference-dynamic-batching-block-size
        inference-dynamic-batching-buffer-guaranteed-fraction
        inference-dynamic-batching-buffer-overflow-factor
        inference-dynamic-batching-paused-buffer-size-gb
        inference-dynamic-batching-mamba-memory-ratio
        inference-dynamic-batching-max-requests inference-dynamic-batching-max-requests-override
        inference-dynamic-batching-max-tokens inference-dynamic-batching-max-tokens-override
        inference-dynamic-batching-num-cuda-graphs
        inference-dynamic-batching-cuda-graph-sizing-distribution
        inference-dynamic-batching-track-paused-request-events
        inference-dynamic-batching-unified-memory-level inference-logging-step-interval
        inference-wandb-logging-step-interval inference-fuse-tp-communication
        use-inference-optimized-layers decode-only-cuda-graphs nccl-all-reduce-for-prefill
        mlp-chunks-for-prefill disable-chunked-prefill symmetric-ar-type cache-mla-latents
        moe-pad-experts-for-cuda-graph-inference output-bert-embeddings bert-embedder-type

        inference-sampling-seed
        enable-chunked-prefill num-speculative-tokens output-logit-dtype
        inference-coordinator-port inference-cuda-graph-all-prefills
        inference-cuda-graph-max-tokens inference-disable-ep-consensus
        inference-dynamic-batching-async-sched-mode
        inference-dynamic-batching-cuda-graph-mixed-prefill-count
        inference-dynamic-batching-logprobs-mode inference-dynamic-batching-prefix-caching
        inference-dynamic-batching-prefix-caching-coordinator-policy
        inference-dynamic-batching-prefix-caching-eviction-policy
        inference-dynamic-batching-prefix-caching-mamba-gb
        inference-dynamic-batching-prefix-caching-routing-alpha
        inference-dynamic-batching-sampling-backend
        inference-dynamic-batching-track-generated-token-events inference-shards
        inference-text-gen-server-logging inference-use-synchronous-zmq-collectives
        inference-wandb-logging mamba-inference-conv-states-dtype
        mamba-inference-ssm-states-dtype use-same-sampling-seed-across-dp-ranks
        use-flashinfer-fused-rope
    """,
    "nothing any more": """
        use-mcore-models no-async-tensor-model-parallel-allreduce
        disable-async-tensor-model-parallel-allreduce enable-experimental onnx-safe
        no-query-key-layer-scaling
    """,
}
"""Arguments that change neither memory nor time, by topic."""
REMOVED = "an argument of old"
"""Topic of arguments that Megatron-LM no longer has."""
_EFFECTIVE: dict[str, str] = {
    "sizes": """
        num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels
        group-query-attention num-query-groups seq-length max-position-embeddings
        make-vocab-size-divisible-by vocab-size padded-vocab-size vocab-extra-ids tokenizer-type
        untie-embeddings-and-output-weights disable-bias-linear add-qkv-bias swiglu squared-relu
        quick-geglu openai-gelu normalization qk-layernorm position-embedding-type
        use-rotary-position-embeddings rotary-percent no-position-embedding multi-latent-attention
        q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim mtp-num-layers

        mtp-use-repeated-layer attention-dropout hidden-dropout spec transformer-impl
        use-legacy-models yaml-cfg
        extra-vocab-size
    """,
    "batches": """
        micro-batch-size global-batch-size rampup-batch-size decrease-batch-size-if-needed
        step-batch-size-schedule
    """,
    "degrees": """
        tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size
        expert-model-parallel-size expert-tensor-parallel-size sequence-parallel cp-comm-type
        hierarchical-context-parallel-sizes hybrid-context-parallel max-seqlen-per-dp-cp-rank
        use-mp-args-from-checkpoint-args moe-extended-tp virtual-pipeline-model-parallel-size
    """,
    "stages": """
        num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank
        pipeline-model-parallel-layout decoder-first-pipeline-num-layers
        decoder-last-pipeline-num-layers account-for-embedding-in-pipeline-split
        account-for-loss-in-pipeline-split standalone-embedding-stage
        microbatch-group-size-per-virtual-pipeline-stage
        num-microbatches-with-partial-activation-checkpoints pipeline-model-parallel-split-rank
        defer-embedding-wgrad-compute wgrad-deferral-limit variable-seq-lengths
        deallocate-pipeline-outputs
    """,
    "exchanges": """
        overlap-grad-reduce overlap-param-gather overlap-param-gather-with-optimizer-step
        no-overlap-p2p-communication overlap-p2p-communication
        overlap-p2p-communication-warmup-flush no-batch-p2p-comm disable-batch-p2p-comm
        no-batch-p2p-sync disable-batch-p2p-sync no-scatter-gather-tensors-in-pipeline
        delay-grad-reduce no-delay-grad-reduce delay-param-gather no-align-grad-reduce
        disable-align-grad-reduce no-align-param-gather ddp-num-buckets ddp-bucket-size
        ddp-pad-buckets-for-high-nccl-busbw ddp-reduce-scatter-with-fp32-accumulation
        tp-comm-overlap tp-comm-overlap-cfg tp-comm-overlap-rs-dgrad
        disable-tp-comm-overlap-ag no-tp-comm-overlap-ag disable-tp-comm-overlap-rs
        no-tp-comm-overlap-rs disable-tp-comm-bulk-dgrad no-tp-comm-bulk-dgrad
        disable-tp-comm-bulk-wgrad no-tp-comm-bulk-wgrad disable-tp-comm-split-ag

        no-tp-comm-split-ag disable-tp-comm-split-rs no-tp-comm-split-rs
        tp-comm-overlap-disable-qkv tp-comm-overlap-disable-fc1 use-sharp sharp-enabled-group
        high-priority-stream-groups use-nccl-ub nccl-ub disable-symmetric-registration
        create-all-gather-group fake-process-group
    """,
    "sharding": """
        use-distributed-optimizer num-distributed-optimizer-instances use-megatron-fsdp
        use-custom-fsdp use-torch-fsdp2 torch-fsdp2-no-reshard-after-forward
        data-parallel-sharding-strategy outer-dp-sharding-strategy fsdp-double-buffer
        suggested-communication-unit-size keep-fp8-transpose-cache
        keep-fp8-transpose-cache-when-using-custom-fsdp enable-full-sharding-in-hsdp
        fsdp-manual-registration megatron-fsdp-grad-comm-dtype megatron-fsdp-main-grads-dtype
        megatron-fsdp-main-params-dtype
        tensor-parallel-num-weight-shards expert-tensor-parallel-num-weight-shards
        gtp-weight-remat-size expert-gtp-weight-remat-size gtp-remat-nccl-ub
        gtp-expert-remat-nccl-ub gtp-remat-reduce-scatter-with-fp32-accumulation
        fsdp-db-use-persist-buf-on-alloc-fail megatron-fsdp-version
        megatron-fsdp-max-pool-double-buffer megatron-fsdp-enable-fine-grained-param-gather
        no-use-layer-wise-param-layout
    """,
    "recomputation": """
        recompute-granularity recompute-method recompute-num-layers recompute-modules
        recompute-activations distribute-saved-activations moe-layer-recompute
        no-clone-scatter-output-in-embedding disable-clone-scatter-output-in-embedding
    """,
    "precision": """
        bf16 fp16 fp8-format fp8-recipe fp8-param-gather fp8-quantizer-factory no-fp8-wgrad
        disable-fp8-wgrad first-last-layers-bf16 num-layers-at-start-in-bf16
        num-layers-at-end-in-bf16 fp4-format fp4-recipe fp4-param-gather fp4-param
        fp4-quantizer-factory fp8-e4m3 fp8-hybrid te-precision-config-file kitchen-config-file
        kitchen-recipe-number use-kitchen-attention kitchen-attention-backend
        grad-reduce-in-bf16 reuse-grad-buf-for-mxfp8-param-ag fp16-lm-cross-entropy
        fp32-residual-connection
        accumulate-allreduce-grads-in-fp32
        ddp-param-name-patterns-for-fp32-local-accumulation
    """,
    "kernels": """
        attention-backend use-flash-attn deterministic-mode batch-invariant-mode
        no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion use-te-activation-func
        use-transformer-engine-op-fuser
        use-fused-weighted-squared-relu cross-entropy-loss-fusion cross-entropy-fusion-impl
        no-gradient-accumulation-fusion disable-jit-fuser
        apply-residual-connection-post-layernorm delay-wgrad-compute
        mla-down-proj-fusion
    """,
    "attention": """
        window-size window-attn-skip-freq softmax-type qk-l2-norm qk-clip attention-output-gate
        no-rope-freq experimental-attention-variant linear-attention-type linear-attention-freq
        linear-conv-kernel-dim linear-key-head-dim linear-value-head-dim linear-num-key-heads
        linear-num-value-heads dsa-indexer-n-heads dsa-indexer-head-dim dsa-indexer-topk
        dsa-indexer-topk-freq dsa-indexer-skip-topk-offset dsa-kernel-backend
        no-dsa-indexer-scoring-relu disable-dsa-indexer-scoring-relu
        relative-attention-num-buckets relative-attention-max-distance mrope-section
        no-create-attention-mask-in-dataloader
        dataloader-inter-document-masking
    """,
    "experts": """
        num-experts moe-layer-freq moe-ffn-hidden-size moe-shared-expert-intermediate-size
        moe-shared-expert-overlap moe-grouped-gemm
        activation-func-clamp-value moe-router-group-topk moe-router-num-groups fp8-output-proj
        moe-use-legacy-grouped-gemm moe-router-topk moe-router-topk-limited-devices
        moe-router-fusion moe-router-force-load-balancing
        moe-token-dispatcher-type moe-enable-deepep
        moe-flex-dispatcher-backend moe-deepep-num-sms moe-hybridep-num-sms
        moe-flex-dispatcher-num-sms moe-permute-fusion
        moe-expert-capacity-factor moe-pad-expert-input-to-capacity moe-apply-probs-on-input
        moe-latent-size overlap-moe-expert-parallel-comm ep-overlap-early-attn-memory-release
        moe-enable-routing-replay
    """,
    "offloading": """
        cpu-offloading cpu-offloading-num-layers no-cpu-offloading-activations
        disable-cpu-offloading-activations cpu-offloading-weights cpu-offloading-double-buffering
        fine-grained-activation-offloading offload-modules min-offloaded-tensor-size
        optimizer-cpu-offload optimizer-offload-fraction use-torch-optimizer-for-cpu-offload
        overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params
        optimizer-offload-policy
    """,
    "optimizer states": """
        optimizer use-precision-aware-optimizer main-grads-dtype main-params-dtype exp-avg-dtype
        exp-avg-sq-dtype
        muon-scalar-optimizer
    """,
    "CUDA graphs": """
        cuda-graph-impl cuda-graph-scope cuda-graph-modules
        enable-cuda-graph external-cuda-graph
        optimizer-cuda-graph
    """,
    "another model": """
        encoder-num-layers decoder-num-layers encoder-seq-length decoder-seq-length
        encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size
        retriever-seq-length bert-no-binary-head bert-load ict-head-size ict-load
        biencoder-projection-dim biencoder-shared-query-context-model titles-data-path
        query-in-block-prob use-one-sent-docs evidence-data-path
        retriever-report-topk-accuracies retriever-score-scaling block-data-path embedding-path
        indexer-batch-size indexer-log-interval num-classes img-h img-w num-channels patch-dim
        classes-fraction data-per-class-fraction vision-pretraining vision-pretraining-type

        vision-backbone-type swin-backbone-type mask-type mask-factor iter-per-epoch
        dino-local-img-size dino-local-crops-number dino-head-hidden-size dino-bottleneck-size
        dino-freeze-last-layer dino-norm-last-layer dino-warmup-teacher-temp dino-teacher-temp
        dino-warmup-teacher-temp-epochs retro-project-dir retro-add-retriever
        retro-cyclic-train-iters retro-encoder-layers retro-encoder-hidden-dropout
        retro-encoder-attention-dropout retro-num-neighbors retro-num-retrieved-chunks
        retro-attention-gate retro-no-verify-neighbor-count retro-workdir
        hybrid-attention-ratio hybrid-mlp-ratio hybrid-override-pattern hybrid-layer-pattern
        mtp-hybrid-override-pattern is-hybrid-model mamba-state-dim mamba-head-dim

        mamba-num-groups mamba-num-heads disable-mamba-mem-eff-path
        heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json
        dataset-provider language-model-type model-provider vision-model-type
        disable-vision-class-token use-packed-sequence packing-buffer-size dataloader-seq-length
        total-seq-length flextron
    """,
    "another training": """
        sft pad-packed-seq-alignment thd-max-packed-sequences thd-tail-padding-policy
        thd-static-packing perform-rl-step rl-prompts-per-eval rl-default-temperature
        rl-default-top-p rl-default-top-k rl-offload-optimizer-during-inference
        rl-offload-kv-cache-during-training rl-remove-kv-cache-during-training
        rl-reset-cuda-graphs rl-partial-rollouts rl-inference-logprobs-is-correction
        rl-importance-sampling-truncation-coef rl-calculate-intra-group-similarity
        rl-use-sequence-packing rl-sequence-packing-bin-size
        rl-sequence-packing-max-sequences-per-bin rl-sequence-packing-algo
        rl-training-cuda-graphs rl-inference-tensor-model-parallel-size
        rl-inference-pipeline-model-parallel-size rl-inference-expert-model-parallel-size
        rl-inference-expert-tensor-model-parallel-size
        rl-inference-model-unified-memory-level rl-offload-inference-model-weights-when-idle
        rl-verify-model-weights-swap rl-parallel-generation-tasks rl-skip-bos-token

        rl-consumption-granularity rl-submission-granularity rl-generation-lag refit-method
        grpo-prompts-per-step grpo-group-size grpo-iterations grpo-clamp-eps-lower
        grpo-clamp-eps-upper grpo-kl-beta grpo-entropy-term-weight
        grpo-filter-groups-with-same-reward grpo-default-temperature grpo-default-top-p
        langrl-inference-server-type langrl-inference-server-conversation-template
        langrl-external-server langrl-env-config export-kd-teacher-load export-kd-cfg
        export-te-mcore-model export-default-te-spec export-model-type
        freeze-all-layers logits-load-dir logits-load-kd-loss-alpha
        logits-load-decode-threads logits-load-ignore-errors logits-load-msc-prefetch-depth
        logits-load-prefetch-factor logits-save-dir logits-save-dtype logits-save-top-k
        logits-save-top-p logits-save-top-p-min-k
    """,
    REMOVED: """
        batch-size warmup model-parallel-size checkpoint-activations
    """,
}
"""Arguments that may change memory or time, by topic."""
_OF_TIME = """
    no-batch-p2p-comm disable-batch-p2p-comm no-batch-p2p-sync disable-batch-p2p-sync
    no-scatter-gather-tensors-in-pipeline delay-grad-reduce no-delay-grad-reduce
    delay-param-gather no-align-grad-reduce disable-align-grad-reduce no-align-param-gather
    tp-comm-overlap-rs-dgrad disable-tp-comm-overlap-ag no-tp-comm-overlap-ag
    disable-tp-comm-overlap-rs no-tp-comm-overlap-rs disable-tp-comm-bulk-dgrad
    no-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad no-tp-comm-bulk-wgrad
    disable-tp-comm-split-ag no-tp-comm-split-ag disable-tp-comm-split-rs no-tp-comm-split-rs
    tp-comm-overlap-disable-qkv tp-comm-overlap-disable-fc1 use-sharp sharp-enabled-group
    disable-symmetric-registration create-all-gather-group delay-wgrad-compute
    moe-router-topk-limited-devices softmax-type use-torch-optimizer-for-cpu-offload

    no-pin-cpu-grads no-pin-cpu-params dataloader-inter-document-masking
"""
"""Arguments of `_EFFECTIVE` that change no memory: the rate of kernels and of messages."""
_OF_MEMORY = """
    no-clone-scatter-output-in-embedding disable-clone-scatter-output-in-embedding
    deallocate-pipeline-outputs keep-fp8-transpose-cache
    keep-fp8-transpose-cache-when-using-custom-fsdp reuse-grad-buf-for-mxfp8-param-ag
    fsdp-double-buffer ep-overlap-early-attn-memory-release
"""
"""Arguments of `_EFFECTIVE` that change no time: when tensors are freed."""
VARIABLES = r"NVTE_\w+"
"""Pattern of the environment variables of Transformer Engine."""
KNOWN_VARIABLES = (
    r"NVTE_((FLASH|FUSED|UNFUSED)_ATTN|CPU_OFFLOAD_V1|ALLOW_NONDETERMINISTIC_ALGO|DEBUG\w*"
    r"|(FWD|BWD)_LAYERNORM_SM_MARGIN|NORM_(FWD|BWD)_USE_CUDNN|USE_FAST_MATH"
    r"|APPLY_QK_LAYER_SCALING|BATCH_MHA_P2P_COMM|ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
    r"|CUTEDSL_FUSED_GROUPED_MLP|ENV_VARS|WITH_\w+|BUILD_\w+|FRAMEWORK|CUDA_ARCHS)"
)
"""Pattern of those that are read, or that change neither memory nor time."""
_MOST_EDITS = 2
"""Maximum edit distance between a misspelt name and the intended argument, in letters."""


@cache
def _concerns() -> dict[str, tuple[str, bool]]:
    return {
        name: (about, harmless)
        for harmless, table in ((True, _HARMLESS), (False, _EFFECTIVE))
        for about, names in table.items()
        for name in names.split()
    }


def names_about(about: str) -> tuple[str, ...]:
    """Return the arguments that may change memory or time, by topic such as `experts`."""
    return tuple(_EFFECTIVE[about].split())


def concern_of(flag: str) -> str | None:
    """Return the topic of an argument, such as `checkpoints`; None: not in any known release."""
    about = _concerns().get(flag)
    return None if about is None else about[0]


@cache
def _single() -> dict[str, tuple[Estimate, ...]]:
    """Return the estimate by argument, for arguments that may change only one."""
    rows: tuple[tuple[str, Estimate], ...] = ((_OF_TIME, "time"), (_OF_MEMORY, "memory"))
    return {name: (estimate,) for names, estimate in rows for name in names.split()}


def changes_of(flag: str) -> tuple[Estimate, ...]:
    """Return the estimates that an argument may change; those of an unknown one are all."""
    if _concerns().get(flag, ("", False))[1]:
        return ()
    return _single().get(flag, BOTH)


def harmless(flag: str) -> bool:
    """Return whether an argument is known to change neither memory nor time."""
    return not changes_of(flag)


def alike(flag: str) -> str | None:
    """Return the known argument that a misspelt one most likely means; None: no similar name.

    Names are similar if they differ in hyphens only, or by at most two missing, added, changed or
    swapped letters. Parts between hyphens of 3 letters or more may differ by one letter, of 8 or
    more by two. Shorter parts must be equal, so that `kv-layernorm` of a fork does not match
    `qk-layernorm`.
    """
    # Names that differ only in digits are different arguments, such as --adam-beta3.
    near = [
        (_apart(flag, name), name)
        for name in _concerns()
        if re.sub("[0-9]", "", name) != re.sub("[0-9]", "", flag)
    ]
    edits, name = min(near)
    return name if 0 < edits <= _MOST_EDITS else None


def _apart(one: str, other: str) -> int:
    """Return the edit distance of two names, summed over parts; above `_MOST_EDITS`: too far."""
    if one.replace("-", "") == other.replace("-", ""):
        return 1 if one != other else 0
    parts = [one.split("-"), other.split("-")]
    if len(parts[0]) != len(parts[1]) or abs(len(one) - len(other)) > _MOST_EDITS:
        return _MOST_EDITS + 1
    total = 0
    for mine, theirs in zip(*parts, strict=True):
        if mine != theirs:
            longest = max(len(mine), len(theirs))
            most = 0 if longest < 3 else 1 if longest < 8 else _MOST_EDITS
            edits = _edits(mine, theirs, most)
            total += edits if edits <= most else _MOST_EDITS + 1
    return total


def _edits(one: str, other: str, most: int) -> int:
    """Return the optimal string alignment distance of two texts, in letters.

    A swap of neighbouring letters counts once. A distance above `most` may be returned as any
    number above `most`.
    """
    if abs(len(one) - len(other)) > most:
        return most + 1
    before: list[int] = []
    above = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, mark in enumerate(other, 1):
            cost = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != mark))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == mark:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        if min(row) > most:
            return most + 1
        before, above = above, row
    return above[-1]


OTHER_MODELS: tuple[tuple[tuple[str, ...], str], ...] = (
    # LLaVA has the arguments of T5, too.
    (
        ("dataset-provider", "img-h", "language-model-type", "model-provider", "vision-model-type",
         "vision-pretraining"),
        "a multimodal model",
    ),
    (("decoder-num-layers", "decoder-seq-length"), "a T5 model"),
    (("binary-head", "bert-no-binary-head"), "a BERT model"),
    (("retro-project-dir", "retro-add-retriever"), "a Retro model"),
    (("flextron",), "an elastic model"),
    (("quick-geglu",), "a gated activation that is not SwiGLU"),
    (("use-legacy-models",), "the models before Megatron-Core"),
)  # fmt: skip
"""Flags that identify unsupported model types, with the type for messages."""
WITHOUT_PATTERN: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("is-hybrid-model", "hybrid-attention-ratio", "hybrid-mlp-ratio", "mamba-num-heads",
         "mamba-head-dim", "mamba-state-dim"),
        "a hybrid model without --hybrid-layer-pattern",
    ),
)  # fmt: skip
"""Flags of hybrid models that are not priced without the pattern of their layers."""
PRICED_MODELS = "Only GPT and hybrid models are priced"
UNPRICED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("perform-rl-step",), "reinforcement learning keeps a second model and its caches"),
    (("sft",), "sequences of several lengths share a micro-batch"),
    (("yaml-cfg",), "the arguments are in another file"),
    (("use-mp-args-from-checkpoint-args",), "degrees are those of a checkpoint"),
    (("hybrid-context-parallel",), "context degrees change with the sequences"),
    (("delta-offload-bytes-across-pp-ranks",), "stages offload different bytes"),
    (("cpu-offloading-weights",), "weights of layers are offloaded"),
    (("disable-mamba-mem-eff-path",), "the scan of a mixer saves other tensors"),
    (("fp32-residual-connection",), "residual streams are of 4 bytes"),
    (("distribute-saved-activations",), "saved inputs are scattered over tensor ranks"),
    (
        ("te-precision-config-file", "kitchen-config-file", "kitchen-recipe-number"),
        "precisions of modules are in another file",
    ),
    (
        (
            "tensor-parallel-num-weight-shards",
            "expert-tensor-parallel-num-weight-shards",
            "gtp-weight-remat-size",
            "expert-gtp-weight-remat-size",
        ),
        "weights are sharded over a part of the data ranks",
    ),
    (("freeze-all-layers",), "weights are frozen"),
    (("logits-load-dir", "logits-save-dir"), "distillation keeps logits of a teacher"),
    (("use-torch-fsdp2",), "FSDP2's buffers are not known"),
    (("standalone-embedding-stage",), "a stage for the embedding alone is not known"),
    (
        ("heterogeneous-layers-config-path", "heterogeneous-layers-config-encoded-json"),
        "layers of several shapes are not known",
    ),
    (("export-kd-teacher-load", "export-te-mcore-model"), "distillation keeps a second model"),
)
"""Flags of features whose memory or time autopar cannot estimate, with the reason."""
