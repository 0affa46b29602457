"""The layout string of Megatron-LM: what it means, and what is none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from autopar.run.strategy import chunks_of_sizes
from search.engines.megatron.arguments import LayoutError, parse_layout
from search.engines.megatron.stages import chunks_of_layout, layout_of
from tests.runs import decoder, run_of


def layout_string(sizes: Sequence[int]) -> str:
    """Return the layout of stages of so many layers, as the writer spells it."""
    stages = chunks_of_sizes(sizes, len(sizes))
    return layout_of(run_of(decoder(layers=sum(sizes)), stages=stages).strategy)


def test_published_examples() -> None:
    """The examples of its documentation mean what it says."""
    stages = parse_layout("Ettt|(tt|)*29,m|L")
    assert stages == ("Ettt", *["tt"] * 29, "m", "L")

    assert parse_layout("Et*3|(tt|)*2t*2,L") == ("Ettt", "tt", "tt", "ttL")
    found = chunks_of_layout("Et*7|t*9|t*9|t*7L", num_layers=32, num_stages=4)
    assert found == chunks_of_sizes((7, 9, 9, 7), 4)


def test_chunks_and_further_tokens() -> None:
    """Parts are dealt round the stages; `m` where it stands, else on the stage of the loss."""
    two = chunks_of_layout("E|tt|tt|L", num_layers=4, num_stages=2)
    assert [[len(chunk.layers) for chunk in stage] for stage in two] == [[0, 2], [2, 0]]
    for text, further in (("Ett|ttL", [0, 1]), ("Ettm|ttL", [1, 0])):
        stages = chunks_of_layout(text, num_layers=4, num_stages=2, mtp=1)
        assert [stage[0].mtp for stage in stages] == further


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_written_layouts_are_read(sizes: list[int]) -> None:
    """What is written for stages is read as these stages."""
    text = layout_string(sizes)

    found = chunks_of_layout(text, num_layers=sum(sizes), num_stages=len(sizes))
    assert found == chunks_of_sizes(sizes, len(sizes))


@given(st.text(alphabet="EtmL|()*,23", max_size=14))
def test_no_text_is_an_internal_error(text: str) -> None:
    """Every text is a layout or a LayoutError."""
    try:
        stages = parse_layout(text)
    except LayoutError:
        return

    assert set("".join(stages)) <= set("EtmL")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Ettx|ttL", "unknown character 'x'"),
        ("Et*|ttL", "needs a number"),
        ("E(tt|*3L", "not closed"),
        ("E(tt|)L", "needs a repetition"),
        ("E()*3L", "is empty"),
        ("Et*99999999L", "more than"),
        ("Et*9999999L", "more than"),
        ("tt|ttL", "needs one E"),
        ("Ett|tt", "needs one L"),
        ("Ett|ttEL", "needs one E"),
        ("Ett|t*9L", "has 11 layers where the model has 4"),
        ("Ett|t|tL", "no multiple of the 2 stages"),
        ("Ett|ttmL", "has 1 MTP layers (m) where the model has 0"),
    ],
)
def test_other_strings_are_refused(text: str, problem: str) -> None:
    """Each says what is wrong."""
    with pytest.raises(LayoutError, match=re.escape(problem)):
        chunks_of_layout(text, num_layers=4, num_stages=2)


_REAL = """
import sys
sys.path.append(sys.argv[1])
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
for line in sys.stdin.read().split():
    text, stages, layers = line.split(";")
    layout = PipelineParallelLayerLayout(text, int(stages))
    layout.validate_layer_layout(num_layers=int(layers), mtp_num_layers=None)
    print(",".join(str(sum(x.name == "decoder" for x in s[0])) for s in layout.layout))
"""


def test_megatron_reads_the_same() -> None:
    """Its own class, where AUTOPAR_MEGATRON_PATH names a folder that holds `megatron`."""
    folder = os.environ.get("AUTOPAR_MEGATRON_PATH")
    if not folder or not (Path(folder) / "megatron" / "core").is_dir():
        pytest.skip("AUTOPAR_MEGATRON_PATH names no folder with megatron.core")
    cases = [(7, 9, 9, 7), (1, 1), (15, 17), (3, 1, 4)]
    lines = [f"{layout_string(sizes)};{len(sizes)};{sum(sizes)}" for sizes in cases]

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _REAL, folder],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [",".join(map(str, sizes)) for sizes in cases]
