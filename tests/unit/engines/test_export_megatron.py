"""Megatron-LM: nearest plans, arguments, its rules, and the way back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import strategies as st

from autopar.documents.spec import load_spec
from autopar.errors import InputError
from autopar.records import replace
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy, violations
from search.engines.megatron.arguments import Arguments
from search.engines.megatron.plan import checkpoints_first, import_megatron
from search.engines.megatron.rules import violated_rules
from search.engines.plans import ExportedPlan, lower_for
from search.engines.text import Configuration, flags_of, script_command
from tests.export_cases import HETEROGENEOUS, SMALL, job, legal_plans
from tests.often import often
from tests.unit.export_plans import check_read_back

UNIFORM = Plan(
    world_size=16,
    num_stages=2,
    stage_sizes=(3, 5),
    layers=(LayerStrategy(tp=4),) * 8,
    vocab=VocabStrategy(tp=4),
    global_batch=64,
    num_microbatches=8,
    default_dp_type="zero2",
)


lower = lower_for("megatron")


def arguments(lowered: ExportedPlan) -> Arguments:
    """Return the flags in the script of an export."""
    return flags_of(script_command(lowered.files["megatron_args.sh"], "x").arguments)


def read(lowered: ExportedPlan, world_size: int) -> Plan:
    """Return the plan that the files of an export describe."""
    flags = arguments(lowered)
    source = Configuration(path=Path("x"), flags=flags, document={})
    return import_megatron(source, world_size=world_size).plan


def as_run(plan: Plan) -> Plan:
    """Return a plan without the choices that mean nothing in it and that no argument says.

    ZeRO-2 that reduces gradients once per step is the distributed optimizer, which is ZeRO-1.
    """
    if plan.num_stages == 1:
        plan = replace(plan, pipeline_type="1f1b")
    at_once = plan.num_stages == plan.num_microbatches == 1
    if plan.default_dp_type == "zero2" and not at_once:
        plan = replace(plan, default_dp_type="zero1")
    if all(strategy.zero3 for strategy in plan.layers):
        plan = replace(plan, default_dp_type="ddp")
    return plan


def test_uniform_plan_loses_nothing() -> None:
    """Degrees, layout, batch and data parallelism stand in the arguments."""
    lowered = lower(job(UNIFORM))
    flags = arguments(lowered)

    assert lowered.losses == ()
    assert lowered.plan == UNIFORM
    assert flags["tensor-model-parallel-size"] == ("4",)
    assert flags["pipeline-model-parallel-layout"] == ("Et*3|t*5L",)
    assert flags["micro-batch-size"] == ("4",)  # 64 / (8 * (16 / (2 * 4)))
    assert "sequence-parallel" in flags
    assert "use-distributed-optimizer" in flags
    assert "overlap-param-gather" in flags
    assert "use-megatron-fsdp" not in flags
    assert read(lowered, 16) == as_run(UNIFORM)
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" in lowered.files["megatron_args.sh"]
    assert "torchrun --nnodes 2 --nproc-per-node 8" in lowered.launch


def test_model_stands_in_the_arguments() -> None:
    """Shapes, norms, biases and embeddings of three families."""
    plan = replace(UNIFORM, stage_sizes=(16, 16), layers=UNIFORM.layers * 4)
    llama = arguments(lower(job(plan, load_spec("llama3-8b"), model="llama3-8b")))
    small = arguments(lower(job(UNIFORM, SMALL)))

    assert llama["num-query-groups"] == ("8",)
    assert llama["ffn-hidden-size"] == ("14336",)
    assert {"swiglu", "disable-bias-linear", "untie-embeddings-and-output-weights"} <= set(llama)
    assert llama["normalization"] == ("RMSNorm",)
    assert llama["seq-length"] == llama["max-position-embeddings"] == ("8192",)
    assert small["kv-channels"] == ("32",)

    gpt = load_spec("gpt2-xl")
    layers = (LayerStrategy(tp=1),) * 48
    flat = replace(UNIFORM, stage_sizes=(24, 24), layers=layers, vocab=VocabStrategy())
    flags = arguments(lower(job(flat, gpt, model="gpt2-xl")))
    assert flags["position-embedding-type"] == ("learned_absolute",)
    assert flags["normalization"] == ("LayerNorm",)
    assert not {"swiglu", "disable-bias-linear", "untie-embeddings-and-output-weights"} & set(flags)


def test_base_of_rotary_positions_is_the_specs() -> None:
    """A whole number and Llama 3.1's factor; where a spec has none the launch asks for it."""
    for name, base, factor in (
        ("llama2-7b", "10000", None),
        ("llama3-8b", "500000", None),
        ("llama3-405b", "500000", "8.0"),
        ("qwen2.5-7b", "1000000", None),
    ):
        spec = load_spec(name)
        flat = replace(
            UNIFORM,
            num_stages=1,
            stage_sizes=(spec.num_layers,),
            layers=(LayerStrategy(tp=4),) * spec.num_layers,
        )
        flags = arguments(lower(job(flat, spec)))
        assert flags["rotary-base"] == (base,)
        assert flags.get("rope-scaling-factor", (None,)) == (factor,)
        assert ("use-rope-scaling" in flags) == (factor is not None)

    unsaid = lower(job(UNIFORM))
    assert '--rotary-base "${ROTARY_BASE:?set ROTARY_BASE to' in unsaid.files["megatron_args.sh"]
    assert "--rotary-base: ${ROTARY_BASE}\n" in unsaid.files["megatron_args.yaml"]
    assert any("ROTARY_BASE" in note for note in unsaid.notes)


def test_a_base_that_is_no_whole_number_is_refused() -> None:
    """Megatron-LM's own parser would refuse `--rotary-base 10000.5` on the cluster."""
    asked = job(UNIFORM)
    spec = replace(asked.spec, rotary_base=10000.5)

    with pytest.raises(InputError, match=r"base 10000\.5, .* whole number"):
        lower(replace(asked, spec=spec))


@pytest.mark.parametrize("name", ["t5-3b", "bert-large"])
def test_other_architectures_are_refused(name: str) -> None:
    """pretrain_gpt.py builds decoders of one kind."""
    spec = load_spec(name)
    layers = (LayerStrategy(),) * spec.num_layers
    plan = replace(
        UNIFORM,
        num_stages=1,
        stage_sizes=(spec.num_layers,),
        layers=layers,
        vocab=VocabStrategy(),
    )

    with pytest.raises(InputError, match=r"pretrain_gpt\.py"):
        lower(job(plan, spec, model=name))


@pytest.mark.parametrize(
    ("change", "present", "absent"),
    [
        ({"default_dp_type": "ddp"}, ["overlap-grad-reduce"], ["use-distributed-optimizer"]),
        (
            {"num_stages": 1, "stage_sizes": (8,), "num_microbatches": 1},
            ["use-megatron-fsdp", "overlap-param-gather", "no-gradient-accumulation-fusion"],
            [],
        ),
        ({"num_stages": 1, "stage_sizes": (8,)}, ["use-distributed-optimizer"], ["ckpt-format"]),
    ],
)
def test_data_parallelism(change: dict[str, object], present: list[str], absent: list[str]) -> None:
    """ddp, ZeRO-2 that shards gradients at once, and ZeRO-2 that reduces once per step."""
    flags = arguments(lower(job(replace(UNIFORM, **change))))  # type: ignore[arg-type]

    assert set(present) <= set(flags)
    assert not set(absent) & set(flags)


def test_zero3_is_megatron_fsdp() -> None:
    """All layers and the embedding alike on one stage; the environment is the one it needs."""
    layers = (LayerStrategy(tp=2, zero3=True),) * 8
    plan = replace(
        UNIFORM,
        num_stages=1,
        stage_sizes=(8,),
        layers=layers,
        vocab=VocabStrategy(tp=2, zero3=True),
    )
    lowered = lower(job(plan))

    assert lowered.losses == ()
    assert arguments(lowered)["data-parallel-sharding-strategy"] == ("optim_grads_params",)
    assert "unset CUDA_DEVICE_MAX_CONNECTIONS\n" in lowered.files["megatron_args.sh"]
    assert any("every micro-batch" in note for note in lowered.notes)


def test_ulysses_is_context_parallelism_by_all_to_all() -> None:
    """All layers Ulysses, and a mix with ring attention of the same degree."""
    ulysses = LayerStrategy(tp=4, ulysses=True)
    vocab = VocabStrategy(tp=4, ulysses=True)
    plan = replace(UNIFORM, layers=(ulysses,) * 8, vocab=vocab)
    rings = (ulysses, *(LayerStrategy(cp=4),) * 7)
    mixed = replace(plan, layers=rings, vocab=VocabStrategy(cp=4))

    flags = arguments(lower(job(plan)))
    mix = lower(job(mixed))

    assert flags["tensor-model-parallel-size"] == ("1",)
    assert flags["context-parallel-size"] == ("4",)
    assert flags["cp-comm-type"] == ("a2a",)
    assert mix.losses == ()
    assert arguments(mix)["cp-comm-type"] == ("a2a", *("p2p",) * 7)
    assert read(mix, 16) == as_run(mixed)


def test_first_layers_of_every_stage_are_recomputed() -> None:
    """A prefix per stage is exact; anything else becomes the longest prefix, and is said."""
    kept, again = LayerStrategy(tp=4), LayerStrategy(tp=4, checkpoint=True)
    exact = replace(UNIFORM, layers=(again, again, kept, again, again, kept, kept, kept))
    other = replace(UNIFORM, layers=(kept, kept, again, kept, kept, kept, again, again))

    assert lower(job(exact)).losses == ()
    assert arguments(lower(job(exact)))["recompute-num-layers"] == ("2",)
    lowered = lower(job(other))
    assert [loss.field for loss in lowered.losses] == ["checkpoint"]
    assert [s.checkpoint for s in lowered.plan.layers] == [True] * 2 + [False] + [True] * 2 + [
        False
    ] * 3


def test_recomputed_layers_move_to_the_front_of_alike_ones() -> None:
    """Where the layers of a stage are alike in all else nothing is lost, and the note says so."""
    kept, again = LayerStrategy(tp=4), LayerStrategy(tp=4, checkpoint=True)
    plan = replace(UNIFORM, layers=(kept, again, again, kept, again, again, kept, kept))

    lowered = lower(job(plan))
    assert lowered.losses == ()
    assert lowered.plan == checkpoints_first(plan, job(plan).spec) != plan
    assert any("recomputed come first" in note for note in lowered.notes)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_zero_1_is_the_distributed_optimizer(num_microbatches: int) -> None:
    """With one micro-batch as well, where ZeRO-2 is Megatron-FSDP's."""
    plan = replace(
        UNIFORM,
        num_stages=1,
        stage_sizes=(8,),
        num_microbatches=num_microbatches,
        default_dp_type="zero1",
    )

    lowered = lower(job(plan))

    assert lowered.losses == ()
    assert "use-distributed-optimizer" in arguments(lowered)
    assert "use-megatron-fsdp" not in arguments(lowered)
    assert read(lowered, 16) == plan


def test_gpipe_is_lost() -> None:
    """It becomes 1F1B, and is refused where that has too few micro-batches."""
    plan = replace(UNIFORM, pipeline_type="gpipe")

    assert [loss.field for loss in lower(job(plan)).losses] == ["pipeline_type"]
    with pytest.raises(InputError, match="1F1B"):
        lower(job(replace(plan, num_microbatches=1)))


def test_heterogeneous_plan() -> None:
    """Every difference is listed, and the nearest plan is legal and one of the engine's."""
    lowered = lower(job(HETEROGENEOUS))

    assert {loss.field for loss in lowered.losses} == {
        "dp_types_enc",
        "embed_sdp",
        "checkpoint",
        "tp_sizes_enc",
        "use_sp",
        "tp_consecutive_flags",
    }
    assert len({(s.tp, s.ulysses) for s in lowered.plan.layers}) == 1
    assert read(lowered, 16) == as_run(lowered.plan)


@often(25, 100, legal_plans(), st.sampled_from([None, 1, 2, 4, 8]))
def test_exports_are_legal_and_read_back(plan: Plan, degree: int | None) -> None:
    """Losses are empty exactly for plans that stay; files say what the record says."""
    try:
        lowered = lower(job(plan, tensor_degree=degree))
    except InputError:
        return

    after = lowered.plan
    assert (lowered.losses == ()) == (after == checkpoints_first(plan, SMALL))
    assert not violations(after, SMALL, sequence_parallel=True)
    assert not violated_rules(arguments(lowered), plan.world_size)
    assert (after.world_size, after.global_batch) == (plan.world_size, plan.global_batch)
    assert read(lowered, plan.world_size) == as_run(after)
    check_read_back(lowered)
    assert lower(job(after, tensor_degree=degree)).losses == ()


@often(10, 40, legal_plans(uniform=True))
def test_yaml_says_the_same(plan: Plan) -> None:
    """Both files of an export describe one plan."""
    from search.engines.text import load_yaml

    try:
        lowered = lower(job(plan))
    except InputError:
        return
    document = load_yaml(lowered.files["megatron_args.yaml"], "x")
    source = Configuration(path=Path("x"), flags=None, document=document)

    assert import_megatron(source, world_size=plan.world_size).plan == as_run(lowered.plan)


def test_bash_sees_the_same_words(tmp_path: Path) -> None:
    """The script is one for bash, whose array is what our reader finds."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash on this machine")
    text = lower(job(HETEROGENEOUS)).files["megatron_args.sh"]
    (tmp_path / "args.sh").write_text(text, encoding="utf-8")
    program = 'source args.sh; printf "%s\\n" "${MEGATRON_ARGS[@]}"'

    done = subprocess.run(
        [bash, "-euc", program],
        cwd=tmp_path,
        env={
            "DATA_PATH": "a b",
            "TOKENIZER_MODEL": "c",
            "ROTARY_BASE": "7",
            "TRAIN_ITERS": "9",
        },
        capture_output=True,
        text=True,
        check=True,
    )

    known = 'DATA_PATH="a b"\nTOKENIZER_MODEL=c\nROTARY_BASE=7\nTRAIN_ITERS=9\n'
    command = script_command(known + text + 'python x.py "${MEGATRON_ARGS[@]}"\n', "x")
    assert done.stdout.splitlines() == list(command.arguments)


RULES: list[tuple[dict[str, tuple[str, ...]], str]] = [
    ({"global-batch-size": ("60",)}, "batch.whole"),
    ({"tensor-model-parallel-size": ("3",)}, "grid.dense"),
    ({"num-attention-heads": ("6",), "num-query-groups": ("6",)}, "heads.tensor"),
    ({"num-attention-heads": ("24",), "num-query-groups": ("3",)}, "kv-heads.copied"),
    ({"ffn-hidden-size": ("510",)}, "ffn.tensor"),
    ({"pipeline-model-parallel-layout": ("Et*3|t*4L",)}, "megatron.layout"),
    ({"pipeline-model-parallel-layout": (), "num-layers": ("7",)}, "layers.even"),
    ({"tensor-model-parallel-size": ("1",)}, "megatron.sequence-parallel.tensor"),
    ({"seq-length": ("250",)}, "sequence.tensor"),
    ({"max-position-embeddings": ("128",)}, "megatron.positions"),
    ({"context-parallel-size": ("2",), "seq-length": ("258",)}, "sequence.context-tensor"),
    ({"cp-comm-type": ("p2p", "a2a"), "context-parallel-size": ("2",)}, "megatron.cp-comm-type"),
    ({"cp-comm-type": ("a2a",), "context-parallel-size": ("2",)}, "megatron.exchange.kv-heads"),
    ({"cp-comm-type": ("a2a+p2p",), "context-parallel-size": ("2",)},
     "megatron.cp-comm-type-a2a+p2p.needs.hierarchical-context-parallel-sizes"),
    ({"hierarchical-context-parallel-sizes": ("2", "2")}, "megatron.hierarchy"),
    ({"recompute-granularity": ("full",)},
     "megatron.recompute-granularity-full.needs.recompute-method"),
    ({"use-megatron-fsdp": ()}, "megatron.use-megatron-fsdp.needs.ckpt-format-fsdp-dtensor"),
    ({"use-megatron-fsdp": ()}, "megatron.fsdp.stages"),
    ({"use-megatron-fsdp": ()}, "megatron.fsdp.fusion"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "rule"), RULES, ids=[rule for _, rule in RULES])
def test_rules(change: dict[str, tuple[str, ...]], rule: str) -> None:
    """Each rule of the engine is one that arguments can break."""
    good = dict(arguments(lower(job(UNIFORM))))

    assert violated_rules(good, 16) == ()
    assert rule in [one.id for one in violated_rules({**good, **change}, 16)]


@pytest.mark.parametrize("flag", ["use-distributed-optimizer", "overlap-grad-reduce"])
def test_parameters_are_gathered_by_whoever_shards_them(flag: str) -> None:
    """--overlap-param-gather needs both."""
    good = dict(arguments(lower(job(UNIFORM))))
    good.pop(flag)

    assert any("overlap-param-gather" in one.id for one in violated_rules(good, 16))


_REAL = """
import os, sys
sys.path.insert(0, sys.argv[1])
import megatron.training.arguments as module
module.get_device_arch_version = lambda: 9
sys.argv = ["pretrain_gpt.py", *sys.stdin.read().split("\\n")]
args = module.validate_args(module.parse_args())
print("sizes", args.data_parallel_size, args.tensor_model_parallel_size)
"""


def test_real_parser_takes_the_arguments() -> None:
    """validate_args of a Megatron-LM checkout, where AUTOPAR_MEGATRON_PATH names one."""
    folder = os.environ.get("AUTOPAR_MEGATRON_PATH")
    if not folder or not (Path(folder) / "megatron" / "training").is_dir():
        pytest.skip("AUTOPAR_MEGATRON_PATH names no Megatron-LM checkout")
    flags = arguments(lower(job(UNIFORM)))
    words = [word for name, given in flags.items() for word in (f"--{name}", *given)]

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _REAL, folder],
        input="\n".join(words),
        env={**os.environ, "WORLD_SIZE": "16", "RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert "sizes 2 4" in done.stdout


def test_experts_run_with_sequence_parallelism() -> None:
    """They do not train beside tensor parallelism without it: it is set, and priced."""
    spec = load_spec("mixtral-8x7b")
    sizes = (spec.num_layers // 2,) * 2
    plan = replace(UNIFORM, stage_sizes=sizes, layers=(LayerStrategy(tp=4),) * spec.num_layers)
    asked = replace(job(plan), spec=spec, sequence_parallel=False)
    lowered = lower(asked)

    assert "sequence-parallel" in arguments(lowered)
    assert lowered.as_run == {"sequence_parallel": True, "tp_overlap": False}
    flags = {flag: words for flag, words in arguments(lowered).items() if "sequence-p" not in flag}
    found = [one.id for one in violated_rules(flags, 16)]
    assert found == ["megatron.experts.sequence-parallel"]


def test_a_name_of_two_lines_is_one_comment() -> None:
    """What a model is called never becomes a command of the script."""
    asked = job(UNIFORM)
    lowered = lower(replace(asked, spec=replace(asked.spec, name="a\ntouch b")))
    assert "# for a touch b on" in lowered.files["megatron_args.sh"]
