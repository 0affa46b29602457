"""Names of Megatron-LM arguments by topic, and whether they change time or memory.

`search.engines.megatron.read` interprets the arguments.

Sources of the names:

- `megatron/training/arguments.py` of core 0.15 to 0.19 and of main (d98e8a64, core 0.20), and the
  configuration classes whose fields it turns into arguments,
- functional tests up to August 2026,
- arguments of core 0.8 and later that later releases removed.

`NAME@0.18` is an argument from core 0.18 on, `NAME@-0.16` one up to core 0.16: the parsers of the
tags core_v0.14.0, 0.15.3, 0.16.1, 0.17.0, 0.17.1, 0.18.0, 0.18.2, 0.19.0 and of main were compared.
Arguments that other programs declare, and those before core 0.14, have no releases.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from autopar.run.rules import Estimate
from search.engines.arguments import BOTH
from search.engines.engine import Span, spanned

RELEASES = "core 0.8 to 0.19 and main of August 2026"
"""Releases whose arguments are known."""

_HARMLESS: dict[str, str] = {
    "logging": """
        log-batch-size-to-tensorboard log-device-memory-used@0.16 log-energy log-interval
        log-learning-rate-to-tensorboard log-loss-scale-to-tensorboard log-max-attention-logit@0.16
        log-memory-interval@0.16 log-memory-to-tensorboard log-num-zeros-in-grad log-params-norm
        log-per-layer-resource-usage log-per-layer-resource-usage-interval log-progress
        log-straggler log-throughput log-timers-to-tensorboard log-validation-ppl-to-tensorboard
        log-world-size-to-tensorboard logging-level no-log-learnig-rate-to-tensorboard
        no-log-learning-rate-to-tensorboard no-log-loss-scale-to-tensorboard
        disable-log-loss-scale-to-tensorboard@0.16 timing-log-level timing-log-option

        no-barrier-with-level-1-timing tensorboard-dir tensorboard-log-interval
        tensorboard-queue-size wandb-project wandb-entity wandb-exp-name wandb-save-dir

        moe-per-layer-logging moe-routing-trace-path@0.19 moe-routing-trace-max-training-iters@0.19
        moe-routing-trace-capture-logits@0.19 moe-routing-trace-capture-hidden-states@0.19
        moe-routing-trace-dump-weights@0.19 config-logger-dir dump-param-to-param-group-map@0.16
        app-tag-run-name app-tag-run-version enable-one-logger no-one-logger one-logger-project
        one-logger-run-name one-logger-async one-logger-entity disable-straggler-on-startup
        straggler-ctrlr-port straggler-minmax-count
    """,
    "profiling": """
        profile profile-ranks profile-step-start profile-step-end use-pytorch-profiler
        pytorch-profiler-collect-shapes@0.17 pytorch-profiler-collect-callstack@0.17
        pytorch-profiler-collect-chakra@0.17 record-memory-history memory-snapshot-path
        nvtx-ranges@0.18 run-workload-inspector-server gpu-sniff-test-interval@0.18
        flight-recorder-dump-path@0.17 flight-recorder-trace-buffer-size@0.17
        no-flight-recorder-dump-on-timeout@0.17 disable-flight-recorder-dump-on-timeout@0.17
        flight-recorder-include-stack-trace@0.17 no-flight-recorder-include-only-active@0.17
        disable-flight-recorder-include-only-active@0.17 no-flight-recorder-extra-dump-on-exec@0.17

        disable-flight-recorder-extra-dump-on-exec@0.17 cuda-graph-warmup-steps
        cuda-graph-memory-report otel-enabled@0.20 otel-service-name@0.20 otel-span-groups@0.20
        record-shapes@0.18
    """,
    "checkpoints": """
        save save-interval persistent-save-interval save-retain-interval save-params-interval@0.18
        save-activations-interval@0.18 save-tokens-per-expert-interval@0.18
        save-wgrads-interval@0.16 save-dgrads-interval@0.16 load load-iteration finetune
        pretrained-checkpoint ckpt-step ckpt-format ckpt-convert-format ckpt-convert-save
        ckpt-convert-update-legacy-dist-opt-format ckpt-fully-parallel-save
        no-ckpt-fully-parallel-save ckpt-fully-parallel-load
        ckpt-fully-parallel-load-exchange-algo@0.17 ckpt-fully-parallel-save-process-group@0.17
        ckpt-fully-parallel-load-process-group@0.17 ckpt-fully-parallel-save-replicate-local

        ckpt-fully-parallel-load-replicate-local ckpt-assume-constant-structure
        no-ckpt-load-validate-sharding-integrity@0.18
        disable-ckpt-load-validate-sharding-integrity@0.18 no-load-optim no-load-rng no-save-optim
        no-save-rng load-main-params-from-ckpt

        no-strict-fsdp-dtensor-load disable-strict-fsdp-dtensor-load@0.16 auto-detect-ckpt-format
        dist-ckpt-format dist-ckpt-strictness dist-ckpt-save-pre-mcore-014
        dist-ckpt-optim-fully-reshardable distrib-optim-fully-reshardable-mem-efficient
        dist-ckpt-workers@0.17 use-dist-ckpt async-save async-strategy@0.17
        async-ckpt-cpu-priority@0.17 async-ckpt-io-priority@0.17 async-ckpt-use-cpu-shm@0.18
        use-persistent-ckpt-worker non-persistent-save-interval non-persistent-ckpt-type
        non-persistent-global-ckpt-dir non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo
        verify-integrity@0.17.1 use-checkpoint-args no-use-tokenizer-model-from-checkpoint-args

        disable-use-tokenizer-model-from-checkpoint-args@0.16 exit-on-missing-checkpoint replication
        replication-jump replication-factor moe-use-upcycling moe-upcycling-granularity
        no-load-strict hetereogenous-dist-checkpoint

        ckpt-drop-redundant-extra-state@0.20 override-ckpt-iteration@0.19 keep-last
        ckpt-fully-parallel-load-per-rank-objects@0.20 ckpt-pg-tensors-cache-create@0.20
        ckpt-pg-tensors-cache-path@0.20 disable-stream-ckpt-dequant@0.19-0.19
        no-stream-ckpt-dequant@0.19-0.19 disable-save-tokenizer-assets@0.20
        no-save-tokenizer-assets@0.20
    """,
    "restarts": """
        adlr-autoresume adlr-autoresume-interval enable-ft-package calc-ft-timeouts
        ft-num-warmup-iters@0.16 exit-duration-in-mins exit-signal@0.16 exit-signal-handler
        exit-signal-handler-for-dataloader@0.16 exit-signal-handler-for-training@0.17 rerun-mode
        error-injection-rate error-injection-type result-rejected-tracker-filename
        iterations-to-skip inprocess-restart inprocess-max-iterations
        inprocess-monitor-thread-interval inprocess-monitor-process-interval
        inprocess-progress-watchdog-interval inprocess-heartbeat-interval inprocess-soft-timeout
        inprocess-hard-timeout inprocess-heartbeat-timeout inprocess-barrier-timeout

        inprocess-completion-timeout inprocess-last-call-wait inprocess-termination-grace-time
        inprocess-granularity inprocess-active-world-size inprocess-empty-cuda-cache
        check-for-spiky-loss check-for-large-grads no-check-for-nan-in-loss-and-grad

        check-for-nan-in-loss-and-grad check-weight-hash-across-dp-replicas-interval
        fault-injector-delay-start-iteration@0.18 fault-injector-fault-delay@0.18
        fault-injector-fault-probabilities@0.18 fault-injector-fault-types@0.18
        fault-injector-mtti-seconds@0.18 fault-injector-num-ranks@0.18
        fault-injector-offset-seconds@0.18 fault-injector-ranks@0.18 fault-injector-seed@0.18
    """,
    "data": """
        data-path train-data-path valid-data-path test-data-path data-args-path
        per-split-data-args-path per-dataset-sequences-path@0.16 data-cache-path split mock-data
        dataloader-type dataloader-fast-cache-load@0.16 dataloader-defer-npy-index-mmap@0.16
        num-workers num-dataset-builder-threads object-storage-cache-path s3-cache-path
        mid-level-dataset-surplus no-mmap-bin-files mmap-bin-files no-data-sharding data-sharding
        reset-position-ids reset-attention-mask eod-mask-loss fim-data@0.16 fim-rate@0.16
        fim-spm-rate@0.16 fim-split-sample@0.16 fim-fragment-rate@0.16 fim-no-prefix@0.16
        fim-prefix-token@0.16 fim-middle-token@0.16

        fim-suffix-token@0.16 fim-pad-token@0.16 fim-eod-token@0.16 mask-prob short-seq-prob
        sample-rate allow-ambiguous-pad-tokens@0.16 no-create-attention-mask
        phase-transition-iterations@0.16 disable-msc train-sync-interval enable-msc@0.18 data-impl
        dataset train-data valid-data max-padding-length epochs
    """,
    "tokenizer": """
        merge-file vocab-file tokenizer-model tokenizer-metadata tokenizer-special-tokens@0.16
        tokenizer-sentencepiece-legacy@0.16 tokenizer-hf-use-fast@0.16-0.17
        tokenizer-hf-no-use-fast@0.17 tokenizer-hf-include-special-tokens@0.16-0.17
        tokenizer-hf-no-include-special-tokens@0.17
        no-tokenizer-sentencepiece-ignore-extra-whitespaces@0.18 tiktoken-pattern
        tiktoken-num-special-tokens tiktoken-special-tokens@-0.17 legacy-tokenizer@-0.16
        trust-remote-code chat-template@0.18 tokenizer-prompt-format sft-tokenizer-prompt-format
        patch-tokenizer-type disable-tokenizer-sentencepiece-ignore-extra-whitespaces@0.18

        null-tokenizer-eod-id@0.18 null-tokenizer-pad-id@0.18 use-gigatoken@0.20
    """,
    "optimizer": """
        lr min-lr lr-decay-style lr-decay-iters lr-decay-samples lr-warmup-fraction lr-warmup-iters
        lr-warmup-samples lr-warmup-init lr-wsd-decay-style lr-wsd-decay-iters lr-wsd-decay-samples
        decoupled-lr decoupled-min-lr head-lr-mult weight-decay start-weight-decay end-weight-decay
        weight-decay-incr-style no-weight-decay-cond-type@0.16 apply-wd-to-qk-layernorm@0.16
        clip-grad adam-beta1 adam-beta2 adam-eps sgd-momentum muon-momentum@0.16
        muon-use-nesterov@0.16-0.17 muon-scale-mode@0.16
        muon-extra-scale-factor@0.16

        override-opt-param-scheduler use-checkpoint-opt-param-scheduler loss-scale
        initial-loss-scale min-loss-scale loss-scale-window hysteresis train-iters train-samples
        exit-interval lion-beta1@0.17 lion-beta2@0.17 muon-nesterov@0.18
        adaptive-muon-beta2 adaptive-muon-eps grad-norm-skip-threshold
    """,
    "loss": """
        calculate-per-token-loss mtp-loss-scaling-factor moe-aux-loss-coeff moe-z-loss-coeff
        moe-router-bias-update-rate dsa-indexer-loss-coeff@0.16 dsa-indexer-use-sparse-loss@0.16
    """,
    "initialization": """
        seed init-method-std init-method-xavier-uniform embedding-init-method-std
        data-parallel-random-init no-initialization no-perform-initialization use-cpu-initialization
        init-model-with-meta-device inference-rng-tracker te-rng-tracker use-te-rng-tracker
    """,
    "evaluation": """
        eval-iters eval-interval eval-global-batch-size@0.18 eval-micro-batch-size@0.18
        start-eval-at-iter@0.18 full-validation multiple-validation-sets validation-set-names@0.18
        skip-train test-mode test-only
    """,
    "numbers": """
        apply-layernorm-1p apply-query-key-layer-scaling norm-epsilon rotary-base
        dsa-indexer-rope-interleaved@0.19 no-dsa-indexer-rotate-activation@0.19
        disable-dsa-indexer-rotate-activation@0.19 dsa-indexer-k-norm-epsilon@0.19
        dsa-indexer-k-norm-fp32@0.19 rotary-interleaved rotary-seq-len-interpolation-factor
        rotary-scaling-factor use-rope-scaling rope-scaling-factor mscale mscale-all-dim
        attention-softmax-in-fp32 glu-linear-offset disable-bf16-reduced-precision-matmul
        moe-router-load-balancing-type moe-router-pre-softmax moe-router-score-function
        moe-router-topk-scaling-factor moe-router-enable-expert-bias moe-router-dtype

        moe-token-drop-policy fp8-margin fp8-interval fp8-amax-history-len fp8-amax-compute-algo
        qk-clip-alpha@0.16 qk-clip-threshold@0.16 softmax-scale no-masked-softmax-fusion
        no-bias-gelu-fusion no-persist-layer-norm

        ddp-average-in-collective no-gradient-reduce-div-fusion gradient-accumulation-fusion
        rope-type moe-shared-expert-gate@0.16 moe-router-padding-for-fp8
        moe-router-padding-for-quantization@0.16 moe-input-jitter-eps yarn-beta-fast@0.19
        yarn-beta-slow@0.19 yarn-correction-range-round-to-int@0.19
        no-yarn-correction-range-round-to-int@0.19 yarn-original-max-position-embeddings@0.19
        use-mup@0.17 mup-attn-scale-power@0.17 mup-base-head-dim@0.17 mup-base-hidden-size@0.17
        mup-embedding-mult@0.17 mup-output-mult@0.17 mup-width-mult@0.17
    """,
    "process groups": """
        distributed-backend distributed-timeout-minutes distributed-timeout-seconds-after-init
        disable-gloo-process-groups enable-gloo-process-groups local-rank lazy-mpu-init
        use-tp-pp-dp-mapping nccl-communicator-config-path pipeline-model-parallel-comm-backend
        tp-comm-bootstrap-backend use-ring-exchange-p2p world-size
    """,
    "the collector of garbage": """
        manual-gc manual-gc-interval no-manual-gc-eval disable-manual-gc-eval@0.16
        empty-unused-memory-level
    """,
    "inference": """
        inference-batch-times-seqlen-threshold max-tokens-to-oom flash-decode
        use-legacy-static-engine@0.16 inference-max-requests inference-max-seq-length
        inference-max-batch-size@-0.16 inference-dynamic-batching
        inference-dynamic-batching-buffer-size-gb inference-dynamic-batching-block-size
        inference-dynamic-batching-buffer-guaranteed-fraction@-0.15
        inference-dynamic-batching-buffer-overflow-factor@-0.15
        inference-dynamic-batching-paused-buffer-size-gb@0.16
        inference-dynamic-batching-mamba-memory-ratio@0.17

        inference-dynamic-batching-max-requests@0.16
        inference-dynamic-batching-max-requests-override@-0.15
        inference-dynamic-batching-max-tokens@0.16
        inference-dynamic-batching-max-tokens-override@-0.15
        inference-dynamic-batching-num-cuda-graphs
        inference-dynamic-batching-cuda-graph-sizing-distribution@0.19
        inference-dynamic-batching-track-paused-request-events
        inference-dynamic-batching-unified-memory-level inference-logging-step-interval@0.16

        inference-wandb-logging-step-interval inference-fuse-tp-communication@0.16
        use-inference-optimized-layers decode-only-cuda-graphs nccl-all-reduce-for-prefill
        mlp-chunks-for-prefill disable-chunked-prefill@-0.16 symmetric-ar-type cache-mla-latents
        moe-pad-experts-for-cuda-graph-inference output-bert-embeddings bert-embedder-type

        inference-sampling-seed enable-chunked-prefill@0.16 num-speculative-tokens@0.17
        output-logit-dtype@0.20 inference-coordinator-port@0.16
        inference-cuda-graph-all-prefills@0.18 inference-cuda-graph-max-tokens@0.19
        inference-disable-ep-consensus@0.18 inference-dynamic-batching-async-sched-mode@0.19
        inference-dynamic-batching-cuda-graph-mixed-prefill-count@0.16
        inference-dynamic-batching-logprobs-mode@0.19 inference-dynamic-batching-prefix-caching@0.17
        inference-dynamic-batching-prefix-caching-coordinator-policy@0.17
        inference-dynamic-batching-prefix-caching-eviction-policy@0.17

        inference-dynamic-batching-prefix-caching-mamba-gb@0.17
        inference-dynamic-batching-prefix-caching-routing-alpha@0.17
        inference-dynamic-batching-sampling-backend@0.18
        inference-dynamic-batching-track-generated-token-events@0.17 inference-shards@0.19
        inference-text-gen-server-logging@0.17 inference-use-synchronous-zmq-collectives@0.17
        inference-wandb-logging@0.16 mamba-inference-conv-states-dtype@0.17
        mamba-inference-ssm-states-dtype@0.17 use-same-sampling-seed-across-dp-ranks@0.19
        use-flashinfer-fused-rope inference-cuda-graph-scope@0.18

        inference-disable-triton-nvls-kernels@0.17
        inference-dynamic-batching-cuda-graph-max-tokens@0.16-0.17
        inference-grouped-gemm-backend@0.17 inference-moe-disable-fused-quant-kernels@0.17
        inference-moe-token-dispatcher-type@0.18 no-inference-disable-ep-consensus@0.18
        no-inference-dynamic-batching-prefix-caching@0.17 no-inference-text-gen-server-logging@0.17
        no-inference-use-synchronous-zmq-collectives@0.17 no-inference-wandb-logging@0.16
    """,
    "nothing any more": """
        use-mcore-models no-async-tensor-model-parallel-allreduce@-0.16
        disable-async-tensor-model-parallel-allreduce@0.16-0.16 enable-experimental onnx-safe
        no-query-key-layer-scaling
    """,
}
"""Arguments that change neither memory nor time, by topic."""
REMOVED = "an argument of old"
"""Topic of arguments that Megatron-LM no longer has."""
_EFFECTIVE: dict[str, str] = {
    "sizes": """
        num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels group-query-attention
        num-query-groups seq-length max-position-embeddings make-vocab-size-divisible-by vocab-size
        padded-vocab-size vocab-extra-ids tokenizer-type untie-embeddings-and-output-weights
        disable-bias-linear add-qkv-bias swiglu squared-relu quick-geglu openai-gelu normalization
        qk-layernorm position-embedding-type use-rotary-position-embeddings rotary-percent
        no-position-embedding multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim
        qk-pos-emb-head-dim v-head-dim mtp-num-layers

        mtp-use-repeated-layer@0.17 attention-dropout hidden-dropout spec transformer-impl
        use-legacy-models@-0.17 yaml-cfg extra-vocab-size disable-pad-vocab-size@0.18
        no-pad-vocab-size@0.18 mtp-detach-heads@0.19 mtp-hsm@0.20 mtp-standalone@0.16
    """,
    "batches": """
        micro-batch-size global-batch-size rampup-batch-size decrease-batch-size-if-needed
        step-batch-size-schedule@0.18
    """,
    "degrees": """
        tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size
        expert-model-parallel-size expert-tensor-parallel-size sequence-parallel cp-comm-type
        hierarchical-context-parallel-sizes hybrid-context-parallel@0.16
        max-seqlen-per-dp-cp-rank@0.16 use-mp-args-from-checkpoint-args moe-extended-tp@-0.16
        virtual-pipeline-model-parallel-size dynamic-context-parallel
        min-dynamic-context-parallel-size
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
        no-batch-p2p-sync disable-batch-p2p-sync no-scatter-gather-tensors-in-pipeline@-0.17
        delay-grad-reduce no-delay-grad-reduce delay-param-gather no-align-grad-reduce
        disable-align-grad-reduce@0.17 no-align-param-gather ddp-num-buckets ddp-bucket-size
        ddp-pad-buckets-for-high-nccl-busbw ddp-reduce-scatter-with-fp32-accumulation@0.16
        tp-comm-overlap tp-comm-overlap-cfg tp-comm-overlap-rs-dgrad disable-tp-comm-overlap-ag

        no-tp-comm-overlap-ag@0.16 disable-tp-comm-overlap-rs no-tp-comm-overlap-rs@0.16
        disable-tp-comm-bulk-dgrad no-tp-comm-bulk-dgrad@0.16 disable-tp-comm-bulk-wgrad
        no-tp-comm-bulk-wgrad@0.16 disable-tp-comm-split-ag

        no-tp-comm-split-ag@0.16 disable-tp-comm-split-rs no-tp-comm-split-rs@0.16
        tp-comm-overlap-disable-qkv tp-comm-overlap-disable-fc1 use-sharp sharp-enabled-group
        high-priority-stream-groups use-nccl-ub nccl-ub disable-symmetric-registration
        create-all-gather-group@0.16 fake-process-group@0.16 high-priority-a2a-comm-stream@0.18
        overlap-dispatch-backward-with-experts-wgrad@0.18
    """,
    "sharding": """
        use-distributed-optimizer num-distributed-optimizer-instances use-megatron-fsdp
        use-custom-fsdp use-torch-fsdp2 torch-fsdp2-no-reshard-after-forward
        data-parallel-sharding-strategy outer-dp-sharding-strategy@0.16 fsdp-double-buffer
        suggested-communication-unit-size keep-fp8-transpose-cache
        keep-fp8-transpose-cache-when-using-custom-fsdp enable-full-sharding-in-hsdp
        fsdp-manual-registration@0.16 megatron-fsdp-grad-comm-dtype@0.17
        megatron-fsdp-main-grads-dtype@0.17 megatron-fsdp-main-params-dtype@0.17
        tensor-parallel-num-weight-shards@0.19 expert-tensor-parallel-num-weight-shards@0.19

        gtp-weight-remat-size expert-gtp-weight-remat-size gtp-remat-nccl-ub@0.20
        gtp-expert-remat-nccl-ub@0.20 gtp-remat-reduce-scatter-with-fp32-accumulation@0.20
        fsdp-db-use-persist-buf-on-alloc-fail@0.19 megatron-fsdp-version@0.20
        megatron-fsdp-max-pool-double-buffer@0.19
        megatron-fsdp-enable-fine-grained-param-gather@0.18 no-use-layer-wise-param-layout@0.18
        gtp-remat-opt-in-modules@0.20
    """,
    "recomputation": """
        recompute-granularity recompute-method recompute-num-layers recompute-modules
        recompute-activations distribute-saved-activations moe-layer-recompute
        no-clone-scatter-output-in-embedding disable-clone-scatter-output-in-embedding@0.16
    """,
    "precision": """
        bf16 fp16 fp8-format fp8-recipe fp8-param-gather fp8-quantizer-factory@0.16 no-fp8-wgrad
        disable-fp8-wgrad@0.16 first-last-layers-bf16 num-layers-at-start-in-bf16
        num-layers-at-end-in-bf16 fp4-format fp4-recipe fp4-param-gather fp4-param
        fp4-quantizer-factory@0.16 fp8-e4m3 fp8-hybrid te-precision-config-file@0.16
        kitchen-config-file@-0.15 kitchen-recipe-number@-0.15 use-kitchen-attention@0.16
        kitchen-attention-backend@0.16 grad-reduce-in-bf16 reuse-grad-buf-for-mxfp8-param-ag
        fp16-lm-cross-entropy fp32-residual-connection accumulate-allreduce-grads-in-fp32
        ddp-param-name-patterns-for-fp32-local-accumulation@0.17
    """,
    "kernels": """
        attention-backend use-flash-attn deterministic-mode batch-invariant-mode@0.16
        no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion use-te-activation-func
        use-transformer-engine-op-fuser@0.18 use-fused-weighted-squared-relu
        cross-entropy-loss-fusion cross-entropy-fusion-impl no-gradient-accumulation-fusion
        disable-jit-fuser@0.16 apply-residual-connection-post-layernorm delay-wgrad-compute
        mla-down-proj-fusion@0.17 batch-invariant-backend@0.20 flash-attention-version@0.19
        fused-residual-rmsnorm@0.17 mlp-chunks-for-training@0.18 use-grouped-gemm-for-dense-mlp@0.18
        gdp-cutedsl-kernel@0.20 mamba-training-ssm-states-dtype@0.19
    """,
    "attention": """
        window-size window-attn-skip-freq softmax-type qk-l2-norm qk-clip@0.16
        attention-output-gate@0.16 no-rope-freq experimental-attention-variant@0.16
        linear-attention-type linear-attention-freq@0.16 linear-conv-kernel-dim@0.16
        linear-key-head-dim@0.16 linear-value-head-dim@0.16 linear-num-key-heads@0.16
        linear-num-value-heads@0.16 dsa-indexer-n-heads@0.16 dsa-indexer-head-dim@0.16
        dsa-indexer-topk@0.16 dsa-indexer-topk-freq@0.19 dsa-indexer-skip-topk-offset@0.19
        dsa-kernel-backend@0.19 no-dsa-indexer-scoring-relu@0.19
        disable-dsa-indexer-scoring-relu@0.19 relative-attention-num-buckets

        relative-attention-max-distance mrope-section no-create-attention-mask-in-dataloader
        dataloader-inter-document-masking@0.19
    """,
    "experts": """
        num-experts moe-layer-freq moe-ffn-hidden-size moe-shared-expert-intermediate-size
        moe-shared-expert-overlap moe-grouped-gemm activation-func-clamp-value moe-router-group-topk
        moe-router-num-groups fp8-output-proj@0.18 moe-use-legacy-grouped-gemm@-0.16 moe-router-topk
        moe-router-topk-limited-devices moe-router-fusion moe-router-force-load-balancing
        moe-token-dispatcher-type moe-enable-deepep moe-flex-dispatcher-backend@0.16
        moe-deepep-num-sms moe-hybridep-num-sms@0.16 moe-flex-dispatcher-num-sms@0.19
        moe-permute-fusion moe-expert-capacity-factor moe-pad-expert-input-to-capacity
        moe-apply-probs-on-input moe-latent-size@0.16 overlap-moe-expert-parallel-comm

        ep-overlap-early-attn-memory-release@0.16 moe-enable-routing-replay@0.16
        moe-combine-bwd-dtype@0.20 moe-dispatch-fwd-dtype@0.20 moe-expert-rank-capacity-factor@0.18
        moe-hybridep-num-blocks-permute@0.17.1 moe-hybridep-num-blocks-unpermute@0.17.1
        moe-hybridep-num-sms-preprocessing@0.18 moe-hybridep-pad-uneven-dispatch-inputs@0.19
        moe-mlp-glu-interleave-size@0.18 moe-ncclep-static-shape@0.19-0.19 moe-ncclep-zero-copy@0.19
        moe-paged-stash@0.18 moe-paged-stash-buffer-size-factor-cpu@0.18
        moe-paged-stash-buffer-size-factor-cuda@0.18 moe-paged-stash-page-size@0.18
        moe-permute-fusion-into-hybridep@0.17.1 moe-router-force-biased@0.17

        moe-router-quantile-balancing-ema@0.19 moe-shared-expert-glu-interleave-size@0.19
        moe-single-grouped-bias@0.18 moe-single-grouped-weight@0.18 moe-use-grouped-tensor@0.20
        use-grouped-gemm-for-shared-expert@0.19
    """,
    "offloading": """
        cpu-offloading cpu-offloading-num-layers@0.16 no-cpu-offloading-activations
        disable-cpu-offloading-activations cpu-offloading-weights cpu-offloading-double-buffering
        fine-grained-activation-offloading@0.16 offload-modules@0.16 min-offloaded-tensor-size@0.16
        optimizer-cpu-offload optimizer-offload-fraction use-torch-optimizer-for-cpu-offload
        overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params optimizer-offload-policy
        activation-offload-fraction@0.19 delta-offload-bytes-across-pp-ranks@0.19
        cpu-offloading-retain-pinned-cpu-buffers@0.17 delay-offload-until-cuda-graph@0.19
        fine-grained-offloading-max-inflight-offloads@0.18
    """,
    "optimizer states": """
        optimizer use-precision-aware-optimizer main-grads-dtype main-params-dtype exp-avg-dtype
        exp-avg-sq-dtype muon-scalar-optimizer@0.17 muon-no-split-qkv@0.16
        muon-fp32-matmul-prec@0.16 muon-num-ns-steps@0.16 muon-tp-mode@0.16
        muon-coefficient-type@0.17 muon-use-syrk@0.20
    """,
    "CUDA graphs": """
        cuda-graph-impl cuda-graph-scope cuda-graph-modules@0.18 enable-cuda-graph
        external-cuda-graph optimizer-cuda-graph@0.17
    """,
    "another model": """
        encoder-num-layers decoder-num-layers encoder-seq-length decoder-seq-length
        encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size
        retriever-seq-length@-0.15 bert-no-binary-head bert-load ict-head-size ict-load
        biencoder-projection-dim biencoder-shared-query-context-model titles-data-path
        query-in-block-prob use-one-sent-docs evidence-data-path retriever-report-topk-accuracies
        retriever-score-scaling block-data-path embedding-path indexer-batch-size
        indexer-log-interval num-classes img-h img-w num-channels patch-dim classes-fraction
        data-per-class-fraction vision-pretraining vision-pretraining-type

        vision-backbone-type swin-backbone-type mask-type mask-factor iter-per-epoch
        dino-local-img-size dino-local-crops-number dino-head-hidden-size dino-bottleneck-size
        dino-freeze-last-layer dino-norm-last-layer dino-warmup-teacher-temp dino-teacher-temp
        dino-warmup-teacher-temp-epochs retro-project-dir@-0.15 retro-add-retriever@-0.15
        retro-cyclic-train-iters@-0.15 retro-encoder-layers@-0.15 retro-encoder-hidden-dropout@-0.15
        retro-encoder-attention-dropout@-0.15 retro-num-neighbors@-0.15
        retro-num-retrieved-chunks@-0.15 retro-attention-gate@-0.15
        retro-no-verify-neighbor-count@-0.15 retro-workdir hybrid-attention-ratio@-0.16

        hybrid-mlp-ratio@-0.16 hybrid-override-pattern hybrid-layer-pattern@0.17
        mtp-hybrid-override-pattern@0.17 is-hybrid-model mamba-state-dim mamba-head-dim

        mamba-num-groups mamba-num-heads disable-mamba-mem-eff-path heterogeneous-layers-config-path
        heterogeneous-layers-config-encoded-json dataset-provider language-model-type model-provider
        vision-model-type disable-vision-class-token use-packed-sequence packing-buffer-size
        dataloader-seq-length total-seq-length flextron enable-mhc-connections@0.20
        mhc-init-gating-factor@0.20 mhc-num-residual-streams@0.20 mhc-recompute-layer-num@0.20
        mhc-sinkhorn-iterations@0.20 gdp-num-chunk-states-to-recompute@0.20 gdp-num-householder@0.20
    """,
    "another training": """
        sft pad-packed-seq-alignment thd-max-packed-sequences thd-tail-padding-policy
        thd-static-packing perform-rl-step rl-prompts-per-eval rl-default-temperature@0.16
        rl-default-top-p@0.16 rl-default-top-k@0.16 rl-offload-optimizer-during-inference
        rl-offload-kv-cache-during-training@-0.16 rl-remove-kv-cache-during-training@-0.16
        rl-reset-cuda-graphs@-0.16 rl-partial-rollouts rl-inference-logprobs-is-correction
        rl-importance-sampling-truncation-coef rl-calculate-intra-group-similarity@-0.15
        rl-use-sequence-packing rl-sequence-packing-bin-size@-0.15
        rl-sequence-packing-max-sequences-per-bin@0.16 rl-sequence-packing-algo

        rl-training-cuda-graphs@0.16 rl-inference-tensor-model-parallel-size@0.16
        rl-inference-pipeline-model-parallel-size@0.16 rl-inference-expert-model-parallel-size@0.16
        rl-inference-expert-tensor-model-parallel-size@0.16
        rl-inference-model-unified-memory-level@0.16
        rl-offload-inference-model-weights-when-idle@0.16 rl-verify-model-weights-swap@0.16
        rl-parallel-generation-tasks@0.16-0.18 rl-skip-bos-token@0.16

        rl-consumption-granularity@0.19 rl-submission-granularity@0.19 rl-generation-lag@0.19
        refit-method@0.16 grpo-prompts-per-step grpo-group-size grpo-iterations grpo-clamp-eps-lower
        grpo-clamp-eps-upper grpo-kl-beta grpo-entropy-term-weight
        grpo-filter-groups-with-same-reward grpo-default-temperature@-0.15 grpo-default-top-p@-0.15
        langrl-inference-server-type@-0.16 langrl-inference-server-conversation-template@-0.16
        langrl-external-server@-0.16 langrl-env-config export-kd-teacher-load export-kd-cfg
        export-te-mcore-model export-default-te-spec export-model-type freeze-all-layers@0.19
        logits-load-dir@0.19 logits-load-kd-loss-alpha@0.19 logits-load-decode-threads@0.19

        logits-load-ignore-errors@0.19 logits-load-msc-prefetch-depth@0.19
        logits-load-prefetch-factor@0.19 logits-save-dir@0.19 logits-save-dtype@0.19
        logits-save-top-k@0.19 logits-save-top-p@0.19 logits-save-top-p-min-k@0.19
        rl-durable-rollout-bank@0.20 rl-generation-batch-size@0.17-0.18 rl-inference-parsers@0.17
        rl-kv-cache-management-mode@0.17 rl-max-inflight-requests@0.20
        rl-num-parallel-generation-batches@0.17-0.18 rl-num-parallel-generations@0.17-0.18
        rl-persist-cuda-graphs@0.17 rl-profile@0.19 rl-profile-dir@0.19 rl-rollout-bank-dir@0.20
        rl-rollout-bank-max-bytes@0.20 no-rl-inference-logprobs-is-correction

        no-rl-offload-inference-model-weights-when-idle@0.16 no-rl-partial-rollouts
        no-rl-persist-cuda-graphs@0.17 no-rl-skip-bos-token@0.16 no-rl-training-cuda-graphs@0.16
        no-rl-use-sequence-packing@0.16 no-rl-verify-model-weights-swap@0.16
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

    no-pin-cpu-grads no-pin-cpu-params dataloader-inter-document-masking muon-no-split-qkv
    muon-fp32-matmul-prec muon-num-ns-steps muon-tp-mode muon-coefficient-type muon-use-syrk
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


_VALUES = """
    optimizer=muon@0.16 optimizer=dist_muon@0.16 optimizer=lion@0.17 optimizer=soap@0.18
    optimizer=adaptive_muon@0.18 experimental-attention-variant=gdn@0.20
    experimental-attention-variant=gdn2@0.20 position-embedding-type=yarn@0.18
    cuda-graph-impl=full_iteration@0.18 moe-flex-dispatcher-backend=ncclep@0.19
    moe-router-load-balancing-type=quantile_balancing@0.19
    moe-router-score-function=sqrtsoftplus@0.18 transformer-impl=inference_optimized@0.16
    fp8-recipe=custom@0.16 fp4-recipe=custom@0.16 ckpt-format=zarr@-0.15
"""
"""Values of arguments that not all releases accept (`choices` of the parsers)."""


@cache
def _concerns() -> dict[str, tuple[str, bool]]:
    return {
        spanned(word)[0]: (about, harmless)
        for harmless, table in ((True, _HARMLESS), (False, _EFFECTIVE))
        for about, names in table.items()
        for word in names.split()
    }


@cache
def _spans() -> dict[str, Span]:
    tables = (*_HARMLESS.values(), *_EFFECTIVE.values(), _VALUES)
    return dict(spanned(word) for names in tables for word in names.split() if "@" in word)


def spans_of(flag: str, words: Sequence[str] = ()) -> dict[str, Span]:
    """Return the releases that have an argument, and those that accept its words.

    The key of a word is `FLAG=WORD`. Arguments and words without known releases are omitted.
    """
    keys = (flag, *(f"{flag}={word}" for word in words))
    return {key: _spans()[key] for key in keys if key in _spans()}


def names_about(about: str) -> tuple[str, ...]:
    """Return the arguments that may change memory or time, by topic such as `experts`."""
    return tuple(name for name, concern in _concerns().items() if concern == (about, False))


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
GATHERED_SHARDS = (
    "generalized tensor parallelism gathers weights from a part of the data ranks in each GEMM"
)
"""Reason why generalized tensor parallelism has no estimate."""
UNPRICED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("perform-rl-step",), "reinforcement learning keeps a second model and its caches"),
    (("sft",), "sequences of several lengths share a micro-batch"),
    (("yaml-cfg",), "the arguments are in another file"),
    (("use-mp-args-from-checkpoint-args",), "degrees are those of a checkpoint"),
    (
        ("hybrid-context-parallel", "dynamic-context-parallel"),
        "dynamic context parallelism chooses context groups by the lengths of each batch",
    ),
    (("delta-offload-bytes-across-pp-ranks",), "stages offload different bytes"),
    (("cpu-offloading-weights",), "weights of layers are offloaded"),
    (("disable-mamba-mem-eff-path",), "the scan of a mixer saves other tensors"),
    (("fp32-residual-connection",), "residual streams are of 4 bytes"),
    (("distribute-saved-activations",), "saved inputs are scattered over tensor ranks"),
    (
        ("te-precision-config-file", "kitchen-config-file", "kitchen-recipe-number"),
        "precisions of modules are in another file",
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
    (("gtp-weight-remat-size", "expert-gtp-weight-remat-size"), GATHERED_SHARDS),
)
"""Flags of features whose memory or time autopar cannot estimate, with the reason."""
