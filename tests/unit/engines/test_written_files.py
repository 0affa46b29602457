"""Configurations that a launch script writes before it starts the training."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import DocumentError
from search.engines.table import read_checked

_TRAINING = (
    "run_clm.py --model_name_or_path llama3-8b --per_device_train_batch_size $MBS "
    "--block_size 4096 --bf16 --gradient_accumulation_steps 2"
)
_LAUNCH = f"torchrun --nproc_per_node 8 {_TRAINING} --deepspeed ds.json\n"


def _document(micro_batch: str = "$MBS", stage: int = 3) -> str:
    return (
        f'{{"train_micro_batch_size_per_gpu": {micro_batch}, "gradient_accumulation_steps": 2,\n'
        f' "zero_optimization": {{"stage": {stage}}}, "bf16": {{"enabled": true}}}}\n'
    )


def _stage(folder: Path, script: str) -> tuple[int, int]:
    """Return (ZeRO stage, micro-batch) of the run that a script launches."""
    path = folder / "run.sh"
    path.write_text(script)
    run = read_checked(str(path), world_size=None, gpu="h100-80gb").run
    assert run is not None
    return run.strategy.layers[0].split.zero, run.strategy.micro_batch


@pytest.mark.parametrize(
    "write",
    [
        f"cat > ds.json <<EOF\n{_document()}EOF\n",
        f"cat <<EOF >./ds.json\n{_document()}EOF\n",
        f"cat > ds.json <<'EOF'\n{_document('4')}EOF\ncat ds.json\n",
        f"function make {{\ncat > $1 <<EOF\n{_document()}EOF\n}}\nmake ds.json\n",
        f"echo '{_document('4')}' > ds.json\n",
        f"echo '{_document('4')[:38]}' > ds.json\necho '{_document('4')[38:]}' >> ds.json\n",
        f"if [ -z $X ]; then\ncat > ds.json <<EOF\n{_document()}EOF\nfi\n",
        f"(cat > ds.json <<EOF\n{_document()}EOF\n)\n",
        f"cat > ds.json <<EOF\n{_document(stage=1)}EOF\ncat > ds.json <<EOF\n{_document()}EOF\n",
    ],
)
def test_written_configuration_is_read(tmp_path: Path, write: str) -> None:
    # A file of an earlier run is not what this run reads.
    (tmp_path / "ds.json").write_text(_document("1", stage=2))
    assert _stage(tmp_path, f"MBS=4\n{write}{_LAUNCH}") == (3, 4)


def test_accelerate_reads_the_files_that_its_script_writes(tmp_path: Path) -> None:
    script = (
        f"MBS=4\ncat > ds.json <<EOF\n{_document()}EOF\n"
        "cat > config.yaml <<EOF\ndistributed_type: DEEPSPEED\nnum_processes: 8\n"
        "deepspeed_config:\n  deepspeed_config_file: ds.json\nEOF\n"
        f"accelerate launch --config_file config.yaml {_TRAINING}\n"
    )
    assert _stage(tmp_path, script) == (3, 4)


@pytest.mark.parametrize(
    "write",
    [
        f"cat > ds.json <<EOF\n{_document()}EOF\nsed -i s/3/2/ ds.json\n",
        "python make_config.py > ds.json\n",
        f"for D in $(ls); do\ncat > ds.json <<EOF\n{_document()}EOF\ndone\n",
        "cat other.json > ds.json\n",
        (
            f'if [ -n "$(hostname)" ]; then\ncat > ds.json <<EOF\n{_document(stage=1)}EOF\nelse\n'
            f"cat > ds.json <<EOF\n{_document()}EOF\nfi\n"
        ),
    ],
)
def test_text_known_only_at_run_time_is_refused(tmp_path: Path, write: str) -> None:
    (tmp_path / "ds.json").write_text(_document("1", stage=2))
    with pytest.raises(DocumentError, match="known only at run time"):
        _stage(tmp_path, f"MBS=4\n{write}{_LAUNCH}")
