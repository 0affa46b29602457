"""Launch scripts as they are found: what a scheduler sets, what only a running machine tells.

How far bash is followed is in `test_shell_scripts.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.errors import DocumentError
from search.engines.reader import CheckedFile
from search.engines.table import read_checked
from search.engines.text import read_configuration
from search.engines.text.shell import scripts_started_with

MODEL = """export CUDA_DEVICE_MAX_CONNECTIONS=1
MODEL=(--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
  --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --swiglu
  --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 128256
  --micro-batch-size 1 --sequence-parallel --bf16 --use-distributed-optimizer --lr 1e-4)
"""
TP2 = "--tensor-model-parallel-size 2"


def checked(folder: Path, script: str, world_size: int | None = 64) -> CheckedFile:
    """Return what a script says on so many H100."""
    path = folder / "train.sh"
    path.write_text(f"#!/bin/bash\n{MODEL}{script}\n", encoding="utf-8")
    return read_checked(str(path), world_size=world_size, gpu="h100-80gb")


def said(file: CheckedFile) -> list[str]:
    """Return the findings."""
    return [f"{one.kind}: {one.text}" for one in file.findings]


# --------------------------------------------------------------------------------------------------
# Arguments that another program may declare.

_OWN = [
    ("--patch-sise 16", "megatron.unknown", "not understood"),
    ("--checkpoint-activations", "megatron.checkpoint-activations.renamed", "not priced"),
    ("--position-embedding-type alibi", "read.key", "not priced"),
    ("--hidden-sise 4096", "megatron.unknown", "not understood"),
]


@pytest.mark.parametrize(("words", "name", "kind"), _OWN)
def test_another_program_may_declare_arguments(
    words: str, name: str, kind: str, tmp_path: Path
) -> None:
    script = "torchrun --nproc-per-node 8 {}.py ${MODEL[@]} " + words
    file = checked(tmp_path, script.replace("{}", "own/pretrain_vl"), None)
    assert (name, kind) in [(one.id, one.kind) for one in file.findings]
    assert "illegal" not in [one.kind for one in file.findings]
    assert set(file.withdrawn) == {"memory", "time"}
    if "patch" not in words:  # no argument of Megatron-LM is meant by it
        known = checked(tmp_path, script.replace("{}", "megatron/pretrain_gpt"), None)
        assert "illegal" in [one.kind for one in known.findings]


def test_a_default_of_another_program_is_not_missing(tmp_path: Path) -> None:
    text = (
        "torchrun --nproc-per-node 8 {}.py --num-layers 2 --hidden-size 512 --num-attention-head 8 "
        "--micro-batch-size 1 --seq-length 64\n"
    )
    path = tmp_path / "train.sh"
    found = dict[str, list[tuple[str, str]]]()
    for program in ("pretrain_gpt", "train_own"):
        path.write_text(text.format(program), encoding="utf-8")
        file = read_checked(str(path), world_size=None, gpu="h100-80gb")
        found[program] = [(one.id, one.kind) for one in file.findings]
    assert ("read.missing", "illegal") in found["pretrain_gpt"]
    assert ("read.missing", "not priced") in found["train_own"]
    assert ("megatron.unknown", "not understood") in found["train_own"]


# --------------------------------------------------------------------------------------------------
# The number of nodes.

TORCHRUN = 'pretrain_gpt.py "${MODEL[@]}" --tensor-model-parallel-size 2'


@pytest.mark.parametrize(
    ("script", "name", "default", "own"),
    [
        (
            f"NNODES=${{SLURM_NNODES:-1}}\ntorchrun --nnodes $NNODES --nproc_per_node 8 {TORCHRUN}",
            "SLURM_NNODES", "1", 8,
        ),
        (
            ("GPUS=8\nD=(--nnodes ${SLURM_JOB_NUM_NODES:-2} --nproc-per-node $GPUS)\n"
             f'torchrun "${{D[@]}}" {TORCHRUN}'),
            "SLURM_JOB_NUM_NODES", "2", 16,
        ),
        (
            ('D="--nproc-per-node 8 --nnodes=${WORLD_SIZE:-4} --node-rank ${RANK:-0}"\n'
             f"torchrun $D {TORCHRUN}"),
            "WORLD_SIZE", "4", 32,
        ),
        (
            ("WORLD=${WORLD_SIZE:-8}\n"
             f"torchrun --nnodes $((WORLD / 8)) --nproc-per-node 8 {TORCHRUN}"),
            "WORLD_SIZE", "8", 8,
        ),
        (
            ('if [ -z "$NODES" ]; then NODES=1; fi\n'
             f"torchrun --nnodes $NODES --nproc-per-node 8 {TORCHRUN}"),
            None, None, 8,
        ),
    ],
)  # fmt: skip
def test_nodes_that_the_environment_gives_are_those_of_the_hardware(
    script: str, name: str | None, default: str | None, own: int, tmp_path: Path
) -> None:
    """With it nothing is to be said; without it the default counts, and is."""
    file = checked(tmp_path, script)
    assert (file.world_size, [text for text in said(file) if "default" in text]) == (64, [])
    assert file.run is not None
    assert file.run.strategy.dp == 32
    alone = checked(tmp_path, script, world_size=None)
    assert alone.world_size == own
    if name is not None:
        sentence = f"read: {name} not set; using its default {default}: {own} processes"
        assert sentence in said(alone)


@pytest.mark.parametrize(
    ("launcher", "own", "each"),
    [
        ("GPUS=4\ndeepspeed --num_gpus $GPUS", 4, None),
        ("deepspeed --num_nodes=2 --num_gpus=8", 16, 8),
        ("deepspeed --include localhost:0,1,4,5", 4, None),
        ("deepspeed -i a:0,1@b:2,3", 4, None),
        ("accelerate launch --num_processes 8 --num_machines 2", 8, 4),
        ("torchrun --nnodes 2 --nproc-per-node 4", 8, 4),
        ("torchrun --nnodes 1 --nproc-per-node 4", 4, None),
        ("srun -N 2 --ntasks-per-node 2 python", 4, 2),
    ],
)
def test_processes_of_each_launcher(
    launcher: str, own: int, each: int | None, tmp_path: Path
) -> None:
    file = checked(tmp_path, f"{launcher} {TORCHRUN}", None)
    assert (file.world_size, file.gpus_per_node) == (own, each)
    with pytest.raises(DocumentError, match=f"starts {own} processes"):
        checked(tmp_path, f"{launcher} {TORCHRUN}", 64)


def test_gpus_of_each_node_are_those_of_the_launch(tmp_path: Path) -> None:
    """Four nodes of two are no node of eight; a cluster that is given counts."""
    checked(tmp_path, f"torchrun --nnodes 4 --nproc-per-node 2 {TORCHRUN}", None)
    path = tmp_path / "train.sh"

    def step_s(**options: str) -> float:
        (found,) = autopar.check(path, neighbours=False, **options)["launches"]
        assert found["num_gpus"] == 8
        return float(found["step_time_s"])

    assert step_s() == step_s(hardware="h100:4x2") > 1.2 * step_s(hardware="h100:1x8")


@pytest.mark.parametrize(
    "launcher",
    [
        "deepspeed",
        "deepspeed --num_nodes 2",
        "deepspeed --include a:0,1@b",
        "deepspeed -e a:0,1",
        "accelerate launch --num_machines 2",
    ],
)
def test_launchers_that_take_the_gpus_they_find(launcher: str, tmp_path: Path) -> None:
    assert checked(tmp_path, f"{launcher} {TORCHRUN}").world_size == 64
    with pytest.raises(DocumentError, match="contains no number of GPUs"):
        checked(tmp_path, f"{launcher} {TORCHRUN}", None)


def test_what_a_script_asks_the_scheduler_for(tmp_path: Path) -> None:
    """Counts without --hardware, which counts over it; lines behind a command ask for nothing."""
    head = "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --gres=gpu:h100:8 --mem 0\n#SBATCH -J name\n"
    launch = f"torchrun --nnodes $SLURM_NNODES --nproc-per-node $SLURM_GPUS_ON_NODE {TORCHRUN}"
    path = tmp_path / "train.sh"
    for size, expected in ((None, 32), (32, 32), (64, 64)):
        path.write_text(f"{head}\n{MODEL}{launch}\n", encoding="utf-8")
        file = read_checked(str(path), world_size=size, gpu="h100-80gb")
        assert (file.world_size, said(file)) == (expected, [])
    path.write_text(f"#!/bin/bash\n{MODEL}#SBATCH --nodes=4\n{launch}\n", encoding="utf-8")
    with pytest.raises(DocumentError, match=r"number of GPUs. Add --hardware"):
        read_checked(str(path), world_size=None, gpu="h100-80gb")


def test_what_is_computed_of_the_nodes_follows(tmp_path: Path) -> None:
    """A batch per node, and a layout by the number of nodes."""
    script = (
        "NNODES=${NNODES:-1}\nBATCH=$((NNODES * 32))\nPP=1\n"
        "if [ $NNODES -gt 4 ]; then PP=2; fi\n"
        f"torchrun --nnodes $NNODES --nproc-per-node 8 {TORCHRUN} --global-batch-size $BATCH "
        "--pipeline-model-parallel-size $PP"
    )
    one, eight = (checked(tmp_path, script, size).run for size in (8, 64))
    assert one is not None
    assert eight is not None
    assert (one.strategy.global_batch, one.strategy.pp) == (32, 1)
    assert (eight.strategy.global_batch, eight.strategy.pp) == (256, 2)


def test_nodes_that_a_script_says_itself_are_its_own(tmp_path: Path) -> None:
    """A number is no default, nor is one that no number of nodes makes the hardware's."""
    for nodes in ("2", "${NNODES:-2}"):
        script = f"torchrun --nnodes {nodes} --nproc-per-node 8 {TORCHRUN}"
        with pytest.raises(DocumentError, match=r"16.*--hardware.*36"):
            checked(tmp_path, script, 36)
    with pytest.raises(DocumentError, match=r"16.*--hardware.*64"):
        checked(tmp_path, f"torchrun --nnodes 2 --nproc-per-node 8 {TORCHRUN}")


# --------------------------------------------------------------------------------------------------
# What only running tells.


@pytest.mark.parametrize(
    ("before", "decided"),
    [
        ('if [ -d /ckpt ]; then MORE="--load /ckpt --finetune"; fi', "--finetune, --load"),
        ("MORE=\n[ -f /data/x.bin ] && MORE+=' --data-path /data/x --split 9,1'",
         "--data-path, --split"),
        (("M=()\nif [[ -e /v ]]; then M+=(--vocab-file /v/a --merge-file /v/b)\n"
          'else M+=(--mock-data)\nfi\nMORE="${M[*]}"'), "--merge-file, --mock-data, --vocab-file"),
        (('case "$(hostname)" in a*) MORE="--num-workers 2";; b*) MORE="--num-workers 4 '
          '--log-energy";; esac'), "--log-energy, --num-workers"),
        ("if command -v nsys > /dev/null; then MORE='--profile --profile-ranks 0 1'; fi", None),
        ("if nvidia-smi | grep -q H100; then MORE='--seed 1'; else MORE='--seed 2'; fi", "--seed"),
        (("if [ -d /a ]; then MORE='--load /a'; fi\nif [ -d /b ]; then MORE+=' --save /b "
          "--save-interval 9'; fi"), "--load, --save, --save-interval"),
    ],
)  # fmt: skip
def test_both_ways_are_followed_where_they_are_no_matter(
    before: str, decided: str | None, tmp_path: Path
) -> None:
    """What differs is said; flags that change neither memory nor time decide nothing."""
    file = checked(tmp_path, f"{before}\ntorchrun --nproc-per-node 8 {TORCHRUN} $MORE", 8)

    assert file.run is not None
    assert file.run.split.tp == 2
    if decided is not None:
        (found,) = [text for text in said(file) if "decides" in text]
        assert found.startswith(("read: `", "read: line"))
        assert f" decides {decided}, which change" in found


@pytest.mark.parametrize(
    ("before", "differs"),
    [
        ('if [ -d /ckpt ]; then MORE="--recompute-activations --load /x"; fi',
         "--recompute-activations."),
        ("[ -f /x ] && MORE='--tp-comm-overlap'", "--tp-comm-overlap"),
        ("if [ -f /x ]; then MORE='--micro-batch-size 2'; else MORE='--micro-batch-size 4'; fi",
         "--micro-batch-size"),
    ],
)  # fmt: skip
def test_a_way_that_matters_is_not_guessed(before: str, differs: str, tmp_path: Path) -> None:
    """The sentence has the condition, its line and the flags."""
    with pytest.raises(DocumentError, match="on line 7, known only at run time") as caught:
        checked(tmp_path, f"{before}\ntorchrun --nproc-per-node 8 {TORCHRUN} $MORE", 8)
    assert f"run time: {differs}" in str(caught.value)


def test_ways_on_which_nothing_runs_are_none(tmp_path: Path) -> None:
    """A script that ends with what is wrong; two launches that are one but for their logs."""
    launch = f"torchrun --nproc-per-node 8 {TORCHRUN}"
    one = f"if [ ! -d /data ]; then echo no; exit 1; fi\n{launch}"
    other = f"if [ -d /c ]; then\n{launch} --load /c\nexit\nelse\n{launch} --log-interval 1\nfi"
    for script in (one, other):
        file = checked(tmp_path, script, 8)
        assert file.run is not None
    # neither ends in a launch that is priced as something else
    split = f"if [ -d /c ]; then\n{launch}\nelse\ntorchrun --nproc-per-node 4 {TORCHRUN}\nfi"
    with pytest.raises(DocumentError, match="--nproc-per-node"):
        checked(tmp_path, split, None)


@pytest.mark.parametrize(
    "guard",
    [
        'if [[ -z "${SLURM_JOB_ID:-}" ]]; then echo no; exit 1; fi',
        '[ -z "$SLURM_JOB_ID" ] && exit 1',
        'test -n "$SLURM_JOB_ID" || { echo no; exit 1; }',
    ],
)
def test_a_script_that_ends_without_a_variable_is_read_with_it(guard: str, tmp_path: Path) -> None:
    """Of a scheduler that is not there; what else depends on it is open, and what does not is."""
    script = (
        f'{guard}\nif [ -n "$SLURM_JOB_ID" ]; then M=--log-energy; fi\n'
        f"torchrun --nproc-per-node 8 {TORCHRUN} $M"
    )
    file = checked(tmp_path, script, 8)
    assert file.run is not None
    assert file.run.split.tp == 2
    assert "read: nothing is launched where these are not set: SLURM_JOB_ID" in said(file)


def test_too_many_open_conditions_are_refused(tmp_path: Path) -> None:
    """Seven that hang together have more ways than are followed."""
    lines = [f"[ -f /{i} ] && MORE+=' --log-interval {i}'" for i in range(7)]
    script = "\n".join([*lines, f"torchrun --nproc-per-node 8 {TORCHRUN} $MORE"])
    with pytest.raises(DocumentError, match="known only at run time"):
        checked(tmp_path, script, 8)


@pytest.mark.parametrize(
    "before",
    [
        "MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)",
        "MASTER_ADDR=${MASTER_ADDR:-$(hostname)}\nexport MASTER_PORT=$(shuf -i 1-9 -n 1)",
        'if [ "$RANK" -eq 0 ]; then mkdir -p /out; fi\nMASTER_ADDR=x',
        "if ! command -v torchrun; then pip install torch; fi\nMASTER_ADDR=x",
        "cat > hosts <<EOF\n$(hostname)\nEOF\nMASTER_ADDR=$(head -1 hosts)",
    ],
)
def test_addresses_are_no_matter(before: str, tmp_path: Path) -> None:
    """What torchrun is told of them changes no launch."""
    script = (
        f"{before}\ntorchrun --nproc-per-node 8 --master_addr $MASTER_ADDR "
        f"--master_port ${{MASTER_PORT:-6000}} {TORCHRUN}"
    )
    file = checked(tmp_path, script, 8)
    assert file.run is not None
    assert not [one for one in file.findings if one.kind == "illegal"]


@pytest.mark.parametrize(
    "words",
    [
        '--step-batch-size-schedule "0:$FIRST 2B:64"',
        "--rampup-batch-size $START 16 10000",
        "--normalization $NORM",
        "--cp-comm-type $KIND --context-parallel-size 2",
        "--position-embedding-type $POSITIONS",
    ],
)
def test_words_that_nobody_knows_are_not_illegal(words: str, tmp_path: Path) -> None:
    script = f"torchrun --nproc-per-node 64 pretrain_gpt.py ${{MODEL[@]}} {words}"
    file = checked(tmp_path, script.replace("pretrain_gpt.py", f"pretrain_gpt.py {TP2}"))
    assert "illegal" not in [one.kind for one in file.findings]
    # A ramp-up ends with the batch that is priced.
    assert bool(file.withdrawn) == ("rampup" not in words)


def test_numbers_that_nobody_knows_are_not_illegal(tmp_path: Path) -> None:
    """They are not priced, and rules on them say nothing; those on others do."""
    script = (
        'torchrun --nproc-per-node 8 pretrain_gpt.py "${MODEL[@]}" --tp-comm-overlap '
        "--tensor-model-parallel-size $TP --fp16"
    )
    assert said(checked(tmp_path, script, 8)) == [
        "not priced: --tensor-model-parallel-size is '$TP'. Give the value",
        "illegal: --fp16 and --bf16 exclude each other",
        "read: known only at run time, counted as one word each: $TP",
    ]


# --------------------------------------------------------------------------------------------------
# Other files, and other spellings.


@pytest.mark.parametrize(
    "path",
    ["conf/env.sh", '$(dirname "$0")/conf/env.sh', "${SCRIPT_DIR}/conf/env.sh",
     '"$HERE"/conf/env.sh'],
)  # fmt: skip
def test_a_file_that_is_sourced_is_read(path: str, tmp_path: Path) -> None:
    """From the folder of the script; what it sets and adds counts, its `return` ends it alone."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "env.sh").write_text(
        "TP=4\nMODEL+=(--recompute-activations)\nreturn 0\nTP=8\n", encoding="utf-8"
    )
    script = (
        'HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\nTP=1\n'
        f"source {path}\n"
        'torchrun --nproc-per-node 8 pretrain_gpt.py "${MODEL[@]}" '
        "--tensor-model-parallel-size $TP"
    )
    file = checked(tmp_path, script, 8)
    assert file.run is not None
    assert file.run.split.tp == 4
    assert file.run.split.modules
    assert not [text for text in said(file) if "is not read" in text]


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    """Names that it may set are unknown, and those with a default have it; circles end."""
    script = f"source none.sh\nTP=${{TP:-2}}\ntorchrun --nproc-per-node 8 {TORCHRUN}"
    file = checked(tmp_path, script, 8)
    assert any("none.sh" in text and text.endswith(": TP") for text in said(file))
    with pytest.raises(DocumentError, match="sources itself too often"):
        checked(tmp_path, f"source train.sh\ntorchrun --nproc-per-node 8 {TORCHRUN}", 8)


def test_sentences_stay_on_one_line(tmp_path: Path) -> None:
    """Variables and conditions that are written over several lines are quoted in one."""
    script = (
        'if [ -f "${A\n}" ]; then M=--log-energy; fi\n'
        f'torchrun --nproc-per-node 8 {TORCHRUN} $M --odd "a\nb" --log-interval 1 $(b\n)'
    )
    texts = [one.text for one in checked(tmp_path, script, 8).findings]
    assert any("decides --log-energy" in text for text in texts)
    assert "--odd a b may change time or memory" in texts
    assert not [text for text in texts if "\n" in text]


def test_a_launch_in_a_text_for_another_shell(tmp_path: Path) -> None:
    """Variables are those of the outer script, unknown ones stay what they are."""
    script = (
        'M="${MODEL[*]}"\nsrun --container x bash <<EOF\nexport A=$SLURM_JOB_ID\n'
        "torchrun --nproc-per-node 8 pretrain_gpt.py $M --tensor-model-parallel-size 2\nEOF"
    )
    file = checked(tmp_path, script, 8)
    assert file.run is not None
    assert file.run.split.tp == 2


def test_argparse_knows_no_underscores(tmp_path: Path) -> None:
    """Of a script or of flags in a document; Megatron-LM's own two spellings are meant."""
    script = (
        f"torchrun --nproc_per_node 8 {TORCHRUN} --log_interval=10 --override-opt_param-scheduler"
    )
    file = checked(tmp_path, script, 8)
    (text,) = said(file)
    assert text.startswith("illegal: --log_interval ")


def document(folder: Path, text: str) -> CheckedFile:
    """Return what a YAML of a launch on 8 GPUs says."""
    lines = {
        "num_layers": 12, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 1024,
        "max_position_embeddings": 1024, "micro_batch_size": 4, "vocab_size": 50257,
    }  # fmt: skip
    path = folder / "launch.yaml"
    body = "".join(f"{key}: {value}\n" for key, value in lines.items())
    path.write_text(body + text, encoding="utf-8")
    return read_checked(str(path), world_size=8, gpu="h100-80gb")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("bf16: true\n", []),
        ("optimizer_config:\n  lr: 3\n",
         ["read: optimizer_config "]),
        ("ENV_VARS:\n  A: 1\n", []),
        ("--log_interval: 3\n",
         ["illegal: --log_interval "]),
    ],
)  # fmt: skip
def test_documents(text: str, found: list[str], tmp_path: Path) -> None:
    """Keys without hyphens are names of Python; mappings among them are said."""
    texts = said(document(tmp_path, text))
    assert len(texts) == len(found)
    assert all(text.startswith(start) for text, start in zip(texts, found, strict=True))


def test_a_given_value_is_taken_for_a_script_alone(tmp_path: Path) -> None:
    """Documents say no variables, and their number of GPUs is their own."""
    one: Any = document(tmp_path, "world_size: 8\n")
    assert one.world_size == 8


# --------------------------------------------------------------------------------------------------
# Launches without flags.


@pytest.mark.parametrize(
    ("launch", "program", "arguments"),
    [
        (
            "torchrun --nproc-per-node 8 tasks/train_own.py a.yaml",
            "tasks/train_own.py",
            ("a.yaml",),
        ),
        ("accelerate launch own.py", "own.py", ()),
        ("python -m torch.distributed.run --nproc-per-node 8 own.py x=1", "own.py", ("x=1",)),
        (
            "torchrun -m own.cli.train --lr 1 --by a.py",
            "own.cli.train",
            ("--lr", "1", "--by", "a.py"),
        ),
        # a launch with flags counts, whichever comes last; a launcher before a single process
        ("torchrun a.py --lr 1\ntorchrun b.py c.yaml", "a.py", ("--lr", "1")),
        ("torchrun b.py c.yaml\ntorchrun a.py --lr 1", "a.py", ("--lr", "1")),
        ("python a.py --lr 1\ntorchrun b.py c.yaml", "b.py", ("c.yaml",)),
        ("torchrun b.py c.yaml\npython a.py --lr 1", "b.py", ("c.yaml",)),
    ],
)
def test_a_launcher_starts_a_program_without_flags(
    launch: str, program: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "x.sh"
    path.write_text(f"{launch}\n", encoding="utf-8")
    command = read_configuration(path).command
    assert command is not None
    assert (command.program, command.arguments) == (program, arguments)


def test_a_program_without_launcher_and_flags_is_none(tmp_path: Path) -> None:
    path = tmp_path / "x.sh"
    path.write_text("python prepare.py a b\nsrun python x.py a\n", encoding="utf-8")
    with pytest.raises(DocumentError, match="contains no launch command"):
        read_configuration(path)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("while [ $# -gt 0 ]; do case $1 in --x) shift ;;\n*) echo $1; exit 1 ;; esac; done\n", 2),
        ("f() {\n  echo no >&2\n  exit 3\n}\n[ $1 = b ] || f\n", 3),
    ],
)
def test_a_script_that_ends_before_its_launch(text: str, line: int, tmp_path: Path) -> None:
    path = tmp_path / "x.sh"
    path.write_text(f"{text}torchrun x.py --lr 1\n", encoding="utf-8")
    with (
        scripts_started_with(("a",), {}),
        pytest.raises(DocumentError, match=rf"up to line {line}, where it ends.*Set its variables"),
    ):
        read_configuration(path)


def test_a_command_that_is_the_arguments_of_a_script(tmp_path: Path) -> None:
    """They are asked for, and name the engine even where the number of processes is open."""
    path = tmp_path / "x.sh"
    path.write_text(
        "if nvidia-smi; then N=$(nvidia-smi -L | wc -l); else N=1; fi\n"
        "torchrun --nproc-per-node $N $@ 2>&1 | tee log\n",
        encoding="utf-8",
    )
    with pytest.raises(DocumentError, match="without its arguments"):
        read_checked(str(path), world_size=None, gpu="h100-80gb")
    for given in ("tasks/train_own.py a.yaml", "tasks/train_own.py a.yaml --x 1"):
        with (
            scripts_started_with(tuple(given.split()), {}),
            pytest.raises(DocumentError, match="launches VeOmni"),
        ):
            read_checked(str(path), world_size=None, gpu="h100-80gb")
