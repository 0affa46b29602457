"""Options in the words of the programs that people come from, and misspelled: taken or asked.

Spellings are those of Megatron-LM (megatron/training/arguments.py), torchtitan (config), DeepSpeed
and its launcher, accelerate (commands/launch.py), transformers, Galvatron, PaddleNLP, Calculon and
SimuMax (keys of their files), AIConfigurator (cli), torchrun.
"""

from __future__ import annotations

import re
import shlex
from functools import partial
from importlib import import_module

import pytest

from autopar.cli import SUBCOMMANDS
from autopar.command.aliases import alias_tables
from autopar.command.fields import read_values
from autopar.command.options import HELP_WIDTH
from autopar.errors import OptionError
from search.commands.explain import COMMAND as EXPLAIN
from search.commands.export import COMMAND as EXPORT
from search.commands.search import COMMAND
from search.commands.what_if import COMMAND as EXPLORE
from search.request.request import ROWS, build_request

ELSEWHERE = alias_tables().elsewhere

_TAKEN = (
    # Megatron-LM
    ("--tensor-model-parallel-size 4", "tp", (4,)),
    ("--pipeline-model-parallel-size 2", "pp", (2,)),
    ("--context-parallel-size 2", "cp", (2,)),
    ("--expert-model-parallel-size 8", "ep", (8,)),
    ("--expert-tensor-parallel-size 1", "etp", (1,)),
    ("--num-virtual-stages-per-pipeline-rank 2", "vpp", (2,)),
    ("--use-distributed-optimizer", "zero", (1,)),
    ("--data-parallel-sharding-strategy optim_grads_params", "zero", (3,)),
    ("--num-distributed-optimizer-instances 2", "dp-replicate", (2,)),
    ("--recompute-granularity selective", "recompute", ("core_attn",)),
    ("--recompute-granularity full", "recompute", ("full",)),
    ("--moe-token-dispatcher-type flex", "dispatcher", ("flex",)),
    ("--overlap-moe-expert-parallel-comm", "moe-overlap", True),
    ("--cp-comm-type p2p", "cp-kind", "ring"),
    ("--fp8-recipe blockwise", "precision", ("fp8-blockwise",)),
    ("--tp-comm-overlap", "tp-overlap", True),
    ("--optimizer-cpu-offload", "offload-optimizer", 1.0),
    ("--global-batch-size 256", "global-batch-size", 256),
    ("--micro-batch-size 2", "micro-batch-size", (2,)),
    ("--num-query-groups 8", "num-kv-heads", 8),
    ("--kv-channels 128", "head-dim", 128),
    ("--bf16", "mixed-precision", "bf16"),
    # torchtitan
    ("--parallelism.tensor_parallel_degree 4", "tp", (4,)),
    ("--parallelism.pipeline_parallel_degree=4", "pp", (4,)),
    ("--parallelism.data_parallel_replicate_degree 2", "dp-replicate", (2,)),
    ("--parallelism.pipeline_parallel_schedule Interleaved1F1B", "schedule", ("interleaved",)),
    ("--parallelism.pipeline_parallel_microbatch_size 1", "micro-batch-size", (1,)),
    ("--parallelism.expert_parallel_degree 8", "ep", (8,)),
    ("--activation_checkpoint.mode selective", "recompute", ("op",)),
    ("activation_checkpoint.mode=full", "recompute", ("full",)),
    ("--training.seq_len 8192", "seq-length", (8192,)),
    ("--training.global_batch_size 64", "global-batch-size", 64),
    ("--training.mixed_precision_param bfloat16", "mixed-precision", "bf16"),
    # DeepSpeed, accelerate, transformers, torchrun
    ("--train_micro_batch_size_per_gpu 4", "micro-batch-size", (4,)),
    ("--train_batch_size 512", "global-batch-size", 512),
    ("--zero_stage 3", "zero", (3,)),
    ("zero_optimization.stage=2", "zero", (2,)),
    ("--autotp_size 4", "tp", (4,)),
    ("--num_processes 16", "gpus", 16),
    ("--num_machines 2", "nodes", 2),
    ("--fsdp_sharding_strategy FULL_SHARD", "zero", (3,)),
    ("--fsdp_sharding_strategy 2", "zero", (2,)),
    ("--fsdp_activation_checkpointing true", "recompute", ("full",)),
    ("--offload_optimizer_device cpu", "offload-optimizer", 1.0),
    ("--offload-optimizer cpu", "offload-optimizer", 1.0),
    ("--offload-optimizer none", "offload-optimizer", 0.0),
    ("--cp-kind ulysses", "cp-kind", "a2a"),
    ("--megatron_lm_tp_degree 2", "tp", (2,)),
    ("--megatron_lm_num_micro_batches 8", "micro-batches", 8),
    ("--parallelism_config_cp_size 2", "cp", (2,)),
    ("--per_device_train_batch_size 2", "micro-batch-size", (2,)),
    ("--gradient_accumulation_steps 8", "micro-batches", 8),
    ("--gradient_checkpointing true", "recompute", ("full",)),
    ("--nnodes 4", "nodes", 4),
    ("--nproc-per-node 8", "gpus-per-node", 8),
    # Galvatron, PaddleNLP
    ("--settle_bsz 64", "global-batch-size", 64),
    ("--settle_chunk 8", "micro-batches", 8),
    ("--pp_deg 2", "pp", (2,)),
    ("--global_tp_deg 4", "tp", (4,)),
    ("--num_gpus_per_node 8", "gpus-per-node", 8),
    ("--tensor_parallel_degree 4", "tp", (4,)),
    ("--virtual_pp_degree 2", "vpp", (2,)),
    ("--sharding stage2", "zero", (2,)),
    # Calculon, SimuMax, AIConfigurator
    ("--num_procs 64", "gpus", 64),
    ("--tensor_par 8", "tp", (8,)),
    ("--pipeline_interleaving 2", "vpp", (2,)),
    ("--activation_recompute attn_only", "recompute", ("core_attn",)),
    ("--microbatch_size 1", "micro-batch-size", (1,)),
    ("--tp_size 4", "tp", (4,)),
    ("--ep_size 8", "ep", (8,)),
    ("--interleaving_size 2", "vpp", (2,)),
    ("--zero_state 1", "zero", (1,)),
    ("--micro_batch_num 8", "micro-batches", 8),
    ("--world_size 64", "gpus", 64),
    ("--total_gpus 32", "gpus", 32),
    ("--system h200:4x8", "hardware", "h200:4x8"),
    ("--model_path llama3-8b", "model", "llama3-8b"),
    ("--backend megatron-core", "engine", "megatron"),
    # one hyphen: vLLM, run scripts of Megatron-Bridge, shells
    ("-tp 4", "tp", (4,)),
    ("-vp 4", "vpp", (4,)),
    ("-ng 64", "gpus", 64),
    ("-gb 512", "global-batch-size", 512),
    ("-o plans", "output-config-path", "plans"),
    ("-v", "verbose", True),
    # Megatron-Bridge, NeMo, and further words of the others
    ("--compute_dtype fp8_mx", "precision", ("mxfp8",)),
    ("trainer.devices=8", "gpus-per-node", 8),
    ("model.activations_checkpoint_granularity=full", "recompute", ("full",)),
    ("--recompute-modules core_attn mlp", "recompute", ("core_attn+mlp",)),
    ("--recompute-modules=core_attn,moe_act", "recompute", ("core_attn+moe_act",)),
    ("--decoder-seq-length 8192", "seq-length", (8192,)),
    ("--max-model-len 8192", "seq-length", (8192,)),
    ("--fsdp full_shard", "zero", (3,)),
    ("--sharding_strategy SHARD_GRAD_OP", "zero", (2,)),
    ("--fsdp_reshard_after_forward false", "zero", (2,)),
    ("--parallelism.fsdp_reshard_after_forward always", "zero", (3,)),
    ("--zero3", "zero", (3,)),
    ("--use_fsdp", "zero", (3,)),
    ("bf16.enabled=true", "mixed-precision", "bf16"),
    ("--vram 40", "memory-constraint", 40 * 2**30),
    ("--price-per-hour 2", "price", 2.0),
    ("--goal cheapest", "goal", "cost"),
)

_ASKED = (
    ("--num-gpus 64", "--gpus-per-node 64"),
    ("--batch-size 8", "--global-batch-size 8 (per step) or --micro-batch-size 8 (per GPU"),
    ("--num-layers-per-virtual-pipeline-stage 4", "V = layers / (pp * 4)"),
    ("--fp8-format hybrid", "--precision fp8"),
    ("--data_parallel_shard_degree 8", "--zero 3"),
    ("--local_batch_size 8", "--global-batch-size N"),
    ("--deepspeed_config ds.json", "autopar check FILE"),
    ("--isl 4000", "serving"),
    # misspelled, or in words that nobody has
    ("--tensor-paralel-size 4", "Did you mean --tp?"),
    ("--tensor-parallelism 4", "Did you mean --tp?"),
    ("--tensor-parallel 4", "Did you mean --tp?"),
    ("--pipeline-stages 4", "Did you mean --pp?"),
    ("--pipeline-parallelism 4", "Did you mean --pp?"),
    ("--expert-parallelism 4", "Did you mean --ep?"),
    ("--context-parallel 4", "Did you mean --cp?"),
    ("--data-parallelism 4", "Did you mean --dp?"),
    ("--virtual-stages 2", "Did you mean --vpp?"),
    ("--global-batch-sise 4", "Did you mean --global-batch-size?"),
    ("--global-bs 4", "Did you mean --global-batch-size?"),
    ("--microbatch 4", "--micro-batch-size 4"),
    ("--batchsize 4", "Did you mean --global-batch-size or --micro-batch-size?"),
    ("--seq-lenght 4096", "Did you mean --seq-length?"),
    ("--sequence-len 4096", "Did you mean --seq-length?"),
    ("--num-gpu 64", "Did you mean --gpus or --gpus-per-node?"),
    ("--zero-level 3", "Did you mean --zero?"),
    ("--zero-stag 3", "Did you mean --zero?"),
    ("--activation-checkpointing full", "Did you mean --recompute?"),
    ("--recomputation full", "Did you mean --recompute?"),
    ("--hardwear h100:1x8", "Did you mean --hardware?"),
    ("--modle llama3-8b", "Did you mean --model?"),
    ("--gpu-memory-gib 40", "Did you mean --memory-constraint?"),
    ("--gpu-mem 40", "Did you mean --memory-constraint?"),
    ("--num-kv-head 8", "Did you mean --num-kv-heads?"),
    ("--lora-ranks 8", "Did you mean --lora?"),
    ("--offload-optimiser 1", "Did you mean --offload-optimizer?"),
    ("--precison bf16", "Did you mean --precision?"),
    ("--time-limits 5", "Did you mean --time-limit?"),
    # words of which the nearest option is another matter
    ("--num-experts 8", "Did you mean --model"),
    ("--moe-router-topk 2", "Did you mean --model"),
    ("--model.flavor 8B", "Did you mean --model"),
    ("--recompute-num-layers 2", "Did you mean --recompute 'block N'"),
    ("--activation_checkpoint.selective_ac_option op", "Did you mean --recompute op?"),
    ("--quantize.linear.float8.recipe_name rowwise", "Did you mean --precision fp8"),
    ("--quantization fp8", "Did you mean --precision fp8"),
    ("--enable-expert-parallel", "Did you mean --ep N?"),
    ("--ulysses_sequence_parallel_size 4", "Did you mean --cp N --cp-kind a2a"),
    ("--use-ulysses", "Did you mean --cp N --cp-kind a2a"),
    ("--parallelism_config_dp_shard_size 8", "Did you mean --zero 3, --dp N or both?"),
    ("--dp-shard 8", "Did you mean --zero 3, --dp N or both?"),
    ("--vocab_sdp 1", "Did you mean --pin vzero3=1?"),
    ("zero_optimization.offload_optimizer.device=cpu", "Did you mean --offload-optimizer 1?"),
    ("--whynot tp=8", "autopar-explain FILE --why-not tp=8"),
    ("--sdp 1", "Did you mean --zero 3?"),
    ("--ddp", "Did you mean --zero 0?"),
    ("--offload_param cpu", "Weights stay on the GPUs"),
    ("--max-num-seqs 256", "serving"),
    ("--gpu h100", "Did you mean --hardware h100:8x8 (which) or --gpus N (how many)?"),
    ("--cost 2", "Did you mean --price X (dollars of a GPU-hour) or --goal cost?"),
    ("--interleave 2", "Did you mean --vpp N?"),
    ("--no-recompute", "Did you mean --recompute none?"),
    ("--seq-length 128k", "Use 131072 or 128000"),
    ("--memory-constraint 75000MiB", "73.24"),
    ("--memory-constraint 80GB", "74.51"),
    ("--global-batch-size 4M", "Use 4194304 or 4000000, of samples"),
    ("-zz 4", "-zz"),
    ("--zzzzzz", "See --help"),
)


def read(line: str) -> dict[str, object]:
    """Return the values of a command line of `autopar-search`."""
    raw = COMMAND.read(shlex.split(line), lambda _: None)
    assert raw is not None
    return read_values(ROWS, raw)


@pytest.mark.parametrize(("line", "name", "value"), _TAKEN)
def test_words_of_peers_are_taken(line: str, name: str, value: object) -> None:
    """With their value, in the words of the option that means the same."""
    assert read(line) == {name: value}


@pytest.mark.parametrize("option", ["--to", "--from", "--engine"])
def test_an_engine_has_the_same_names_at_every_door(option: str) -> None:
    """A search of `--engine megatron-lm` is exported `--to megatron-lm`."""
    raw = EXPORT.read(["plan.json", option, "megatron-lm"], lambda _: None)
    assert raw is not None
    assert "megatron" in read_values(EXPORT.rows, raw).values()


@pytest.mark.parametrize(("line", "said"), _ASKED)
def test_other_words_get_a_sentence_that_helps(line: str, said: str) -> None:
    """By what they mean, and one that means two things is asked about."""
    with pytest.raises(OptionError) as caught:
        read(line)

    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line",
    ["--overlap-grad-reduce", "--overlap-param-gather", "--train-iters 100", "--fsdp_version 2"],
)
def test_words_that_change_no_plan_are_left_out(line: str) -> None:
    """With a sentence that says why."""
    said: list[str] = []
    assert COMMAND.read(shlex.split(line), said.append) == {}
    assert "is ignored" in said[0]


@pytest.mark.parametrize(
    ("line", "off"),
    [("--use-distributed-optimizer 0", "zero"), ("--bf16=false", "mixed-precision")],
)
def test_switch_that_is_off_says_nothing(line: str, off: str) -> None:
    """It is not the option with another value."""
    assert off not in read(line)


def test_precision_of_all_of_training_has_one_name() -> None:
    """`--precision` takes those of products and those of training."""
    found = build_request({"precision": "fp16", "model": "llama3-8b"})

    assert found.options.mixed_precision == "fp16"
    assert found.degrees.precision is None
    assert found.given == {"mixed-precision": "fp16", "model": "llama3-8b"}
    with pytest.raises(OptionError, match=r"fp16 contradicts --mixed-precision fp32"):
        build_request({"precision": "fp16", "mixed-precision": "fp32"})


@pytest.mark.parametrize(
    ("words", "hardware"),
    [
        ({"gpus": "64"}, "h100:8x8"),
        ({"gpus": "4"}, "h100:1x4"),
        ({"nodes": "4"}, "h100:4x8"),
        ({"nodes": "4", "gpus-per-node": "4"}, "h100:4x4"),
        ({"nodes": "4", "gpus": "16"}, "h100:4x4"),
        ({"gpus-per-node": "4"}, "h100:1x4"),
    ],
)
def test_shape_may_stand_beside_a_card(words: dict[str, str], hardware: str) -> None:
    """Nodes are those of the card; the plan file has the shape."""
    found = build_request({"hardware": "h100", **words})

    assert found.inputs.hardware == hardware
    assert found.given["hardware"] == hardware


@pytest.mark.parametrize("command", [COMMAND, EXPLAIN, EXPORT, EXPLORE])
def test_help_is_one_screen_then_groups(command) -> None:
    """What most questions take, and where the rest is."""
    screen = command.help_of()
    lines = screen.splitlines()

    assert len(lines) <= 24
    assert max(map(len, lines)) <= HELP_WIDTH
    groups = [line.split()[0] for line in lines[lines.index("") :] if line.startswith("  ")]
    for row in command.rows:
        word = row.panel.partition(":")[0].split()[0].lower()
        assert word in groups
        assert row.label in command.help_of([word]).replace("[no-]", "")
    assert command.help_of(["all"]) == command.help_text
    # whatever else stands behind it: help is for command lines that are not right yet
    assert command.help_of(["nonsense"]) == screen


@pytest.mark.parametrize("command", sorted(SUBCOMMANDS))
def test_help_of_every_command_is_a_screen(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A long one is a screen of 24 lines, behind which every group has a word of its own."""
    module = import_module(SUBCOMMANDS[command][1])
    found = getattr(module, "COMMAND", None)
    if found is None:  # a list, or a front door of others
        return
    screen = found.help_of()
    assert len(screen.splitlines()) <= 24
    assert max(map(len, screen.splitlines())) <= HELP_WIDTH
    if screen == found.help_text:
        return
    panels = {row.panel for row in found.rows}
    groups = [line.split()[0] for line in screen.partition("--help GROUP")[2].splitlines()[1:]]
    assert len(groups) == len(panels)
    shown = "".join(found.help_of([group]) for group in groups)
    assert all(row.label in shown.replace("[no-]", "") for row in found.rows)


def test_help_of_an_option_says_its_spellings() -> None:
    """By any of them."""
    text = COMMAND.help_of(["tensor_parallel_degree"])

    assert text == COMMAND.help_of(["tp"])
    assert "--tensor-model-parallel-size" in text


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_option_of_another_command_names_it(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And that command has it."""
    program, first, *_ = ELSEWHERE[name].split()
    command = first if program == "autopar" else program.removeprefix("autopar-")
    run = import_module(SUBCOMMANDS[command][1]).run
    if command == "cards":
        run = partial(run, what=command)
    assert run(["--help", "all"]) == 0
    assert name == command or f"--{name} " in capsys.readouterr().out

    stranger = EXPORT if command != "export" else EXPLAIN
    with pytest.raises(OptionError, match=re.escape(ELSEWHERE[name])):
        stranger.read([f"--{name}", "x"], lambda _: None)


def test_a_degree_that_does_not_divide_is_named_as_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`--tp 6` becomes a rule of per-layer plans, but the answer names the option."""
    from search.commands.search import run

    question = ["--model=gpt2-xl", "--hardware=h100:1x8", "--engine=none", "--global-batch-size=8"]
    for words in ("--tp 6", "--tp 6 --cp 2", "--pin tp=6"):
        assert run([*question, *words.split()]) == 3
        assert f"with {words}, " in capsys.readouterr().err
