"""The dialect that every command speaks, on one small dataclass, and every command's own table."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from autopar.command.aliases import Family, alias_tables
from autopar.command.dialect import normalise
from autopar.command.fields import make, option, read_values, rows_of, validate
from autopar.command.options import HELP_WIDTH, REPEATED, Command
from autopar.errors import OptionError, nearest
from autopar.records import replace

COMMANDS = (
    *("search.commands.search", "search.commands.explain", "search.commands.export"),
    "search.commands.check",
    *("search.commands.estimate calculon", "search.commands.estimate tensor2d"),
    "search.commands.explore",
    *("search.commands.explore calculon", "search.commands.explore tensor2d"),
    *("profiler.verify.command", "autopar.rates.command"),
    *(
        "profiler.hardware.command",
        "profiler.site.command",
        "profiler.model.command",
        "profiler.plan.command",
        "profiler.show.command",
    ),
)


def command_of(module: str) -> Command:
    """Return the command that a module has, or that of the model behind its name."""
    name, _, model = module.partition(" ")
    found = vars(importlib.import_module(name))
    command = found["MODELS"][model].command if model else found.get("COMMAND")
    assert isinstance(command, Command)
    return command


@pytest.mark.parametrize(
    ("word", "known", "near"),
    [
        ("memroy", ("memory", "model"), "memory"),
        ("zvb", ("1f1b", "zbv"), "zbv"),
        ("bf16", ("fp16_flop_per_s", "bf16_flop_per_s"), "bf16_flop_per_s"),
        ("MEMORY", ("memory",), "memory"),
        ("micro", ("macro", "micro_batch_size"), "micro_batch_size"),
        ("tpu", ("cuda", "cpu"), None),
        ("nonsense_key", ("moe_exchange", "interleaved", "strategy", "processor_usage"), None),
        ("h1000", ("v100", "h100"), "h100"),
    ],
)
def test_only_a_near_word_is_suggested(word: str, known: tuple[str, ...], near: str | None) -> None:
    """A word with another first letter needs more equal ones, and may be meant by its start."""
    assert nearest(word, known) == near


@dataclass(frozen=True, kw_only=True)
class Small:
    """One option of every kind."""

    plan: Path | None = option(None, help="a file", panel="What", positional=True, metavar="PLAN")
    num_layers: tuple[int, ...] | None = option(
        None, help="layers", panel="What", low=1, high=99, most_used=True
    )
    memory_bytes: float = option(
        2.0 * 2**30, name="memory", help="GiB", panel="What", above=0, high=64, scale=2**30
    )
    name: str | None = option(None, help="a name", panel="What")
    kind: Literal["one", "two"] = option("one", help="which of two", panel="How", most_used=True)
    bsz: int | None = option(None, help="batch", panel="How", low=1, off=-1)
    seed: int = option(0, help="of what is drawn", panel="How", between=(0, 2**63 - 1))
    quick: bool = option(False, help="off unless given", panel="How")
    careful: bool = option(True, help="on unless told", panel="How")
    wide: bool | None = option(None, help="of the plan", panel="How", off=-1, shown="the plan's")
    pin: tuple[str, ...] = option((), help="repeats", panel="How", metavar="RULE")
    words: tuple[str, ...] = option(
        ("a",), help="in one text", panel="How", parse=lambda text: tuple(text.split("+"))
    )
    other: int = 7

    def __post_init__(self) -> None:
        validate(self)


SMALL = Command(name="small", intro="Do little.\n\nTwice.", fills=(Small,), usage="[PLAN]")
DEFAULTS = Small()


def read(*arguments: str) -> Small:
    """Return what a command line of the small command means."""
    raw = SMALL.read(arguments, lambda _: None)
    assert raw is not None
    return make(Small, read_values(SMALL.rows, raw))


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        ("", {}),
        ("x.json", {"plan": Path("x.json")}),
        ("--plan x.json", {"plan": Path("x.json")}),
        ("--galvatron_config_path x.json", {"plan": Path("x.json")}),
        ("--plan None", {}),
        ("-- -x.json", {"plan": Path("-x.json")}),
        ("--num-layers 4,5", {"num_layers": (4, 5)}),
        ("--num_layers=4", {"num_layers": (4,)}),
        ("--layernum_list 4 5", {"num_layers": (4, 5)}),
        ("--layer_num_list [4,5]", {"num_layers": (4, 5)}),
        ("++search.planning.space.num_layers=4", {"num_layers": (4,)}),
        ("--memory 4", {"memory_bytes": 4.0 * 2**30}),
        ("--MEMORY=0.5", {"memory_bytes": 0.5 * 2**30}),
        ("--kind TWO", {"kind": "two"}),
        ("--kind one --kind one", {"kind": "one"}),
        ("--bsz 8", {"bsz": 8}),
        ("--bsz -1", {}),
        ("--seed 9223372036854775807", {"seed": 2**63 - 1}),
        ("--quick", {"quick": True}),
        ("--quick 1 x.json", {"quick": True, "plan": Path("x.json")}),
        ("--quick=True", {"quick": True}),
        ("--quick --quick 1", {"quick": True}),
        ("--no-careful", {"careful": False}),
        ("--no_careful 0", {}),
        ("--careful 0", {"careful": False}),
        ("careful=off", {"careful": False}),
        ("--wide", {"wide": True}),
        ("--no-wide", {"wide": False}),
        ("--wide -1", {}),
        ("--pin tp=2 --pin pp=4", {"pin": ("tp=2", "pp=4")}),
        ("--words b+c", {"words": ("b", "c")}),
    ],
)
def test_spellings_mean_the_same(arguments: str, changes: dict[str, Any]) -> None:
    """Hyphens, underscores, overrides, peers' numbers and names: one typed value."""
    assert read(*arguments.split()) == replace(DEFAULTS, **changes)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--num-lyers", "4"], "--num-lyers"),
        (["--layernum_lst", "4"], "Did you mean --num-layers?"),
        (
            ["--kind", "two", "--kind", "one"],
            "--kind",
        ),
        (["--quick", "--quick", "0"], "--quick 1 and --quick 0 set the same option"),
        (["--careful", "--no-careful"], "--careful 1 and --no-careful 0 set the same option"),
        (["--layernum", "4", "--num-layers", "5"], "--num-layers 4,5"),
        (["--zzzzzz"], "--zzzzzz"),
        (["--no-quick"], "--no-quick"),
        (["--other", "3"], "--other"),
        (["--memory"], "--memory"),
        (["--memory", "--quick"], "--memory"),
        (
            ["--memory", "lots"],
            "--memory: expected a number of GiB above 0 and up to 64, got 'lots'",
        ),
        (["--memory", "nan"], "got 'nan'"),
        (["--memory", "65"], "--memory: expected a number of GiB above 0 and up to 64, got '65'"),
        (["--num-layers", "4,,4"], "--num-layers: expected an integer of at least 1 and up to 99"),
        (["--bsz", "1.5"], "--bsz: expected an integer of at least 1, got '1.5'"),
        (["--bsz", "9" * 5000], "--bsz: expected an integer of at least 1, got '999"),
        (["--seed", "-3"], "--seed: expected 0 to 9223372036854775807, got -3"),
        (["--seed", "few"], "--seed: expected 0 to 9223372036854775807, got 'few'"),
        (["--kind", "tow"], "--kind"),
        (["--quick", "2"], "--quick: expected 0 or 1, got '2'"),
        (["--no-careful=maybe"], "--no-careful: expected 0 or 1, got 'maybe'"),
        (["--name="], "--name: expected a text, got ''"),
        (["a.json", "b.json"], "'b.json'"),
        (["-x"], "--help"),
        (["--plan", "-x"], "--help"),
    ],
)
def test_unusable_command_lines_are_one_sentence(arguments: list[str], said: str) -> None:
    """Option, value and what was expected; the command ends with 2."""
    with pytest.raises(OptionError) as caught:
        read(*arguments)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert SMALL.run(arguments, lambda raw: bool(read_values(SMALL.rows, raw))) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bsz": 0}, "--bsz: expected an integer of at least 1, got 0"),
        ({"num_layers": (4, 0)}, "--num-layers: expected an integer of at least 1"),
        (
            {"memory_bytes": 65.0 * 2**30},
            "--memory: expected a number of GiB above 0 and up to 64, got 65",
        ),
        ({"memory_bytes": float("nan")}, "--memory: expected a number of GiB above 0"),
        ({"kind": "tow"}, "--kind"),
        ({"quick": 2}, "--quick: expected 0 or 1, got 2"),
    ],
)
def test_python_gets_the_same_check(changes: dict[str, Any], said: str) -> None:
    """A value that no command line could give is refused where the dataclass is made."""
    with pytest.raises(OptionError) as caught:
        replace(DEFAULTS, **changes)
    assert said in str(caught.value)


def test_python_may_say_the_words_of_the_command_line() -> None:
    """One that stands for another value becomes it."""

    @dataclass(frozen=True, kw_only=True)
    class Schedule:
        kind: str = option("1f1b", help="which", panel="What", choices={"flush": "1f1b", "g": "g"})

        def __post_init__(self) -> None:
            validate(self)

    assert Schedule(kind="flush") == Schedule(kind="1f1b") == Schedule()
    assert Schedule(kind="g").kind == "g"
    with pytest.raises(OptionError, match="--kind: expected flush or g, got '1f1'"):
        Schedule(kind="1f1")


def test_what_is_required_is_said() -> None:
    """A field without a default is an option that has to be given."""

    @dataclass(frozen=True, kw_only=True)
    class Needs:
        model: str = option(help="a name", panel="What")

    assert make(Needs, {"model": "x"}) == Needs(model="x")
    with pytest.raises(OptionError, match=r"^missing argument --model \(a name\)$"):
        make(Needs, {})


def test_names_are_checked_without_a_command_line() -> None:
    """A misspelt one is no option that was left out."""
    assert read_values(SMALL.rows, {"bsz": "2"}) == {"bsz": 2}
    with pytest.raises(OptionError, match="--bzs"):
        read_values(SMALL.rows, {"bzs": "2"})


def test_what_peers_write_beside() -> None:
    """Ignored with their value, refused with the remedy, and degrees that can only be 1."""
    family = Family(
        ignored={"lr": "nothing is trained", "flash": "always", "fused-": "never", "env": "no"},
        flags=frozenset({"flash", "fused-"}),
        lists=frozenset({"env"}),
        planned={"tp-deg": "--pin"},
        only_one={"cp-deg": "no rings"},
    )
    given = ["--lr", "1e-4", "--flash", "x.json", "--flash=1", "--cp_deg", "1", "--bsz", "2"]
    normal, notices = normalise(given, SMALL.rows, family)
    assert normal == ["x.json", "--bsz", "2"]
    assert [line.split()[0] for line in notices] == ["--lr", "--flash", "--flash"]
    # a beginning stands for many names, and a list has any number of words
    given = ["--env", "A=1", "bsz=7", "--fused-norm", "x.json", "--fused_rope=1", "--env"]
    normal, notices = normalise(given, SMALL.rows, family)
    assert normal == ["x.json"]
    assert [line.split()[0] for line in notices] == [
        "--env",
        "--fused-norm",
        "--fused_rope",
        "--env",
    ]
    with pytest.raises(OptionError, match="--pin"):
        normalise(["--tp_deg=4"], SMALL.rows, family)
    with pytest.raises(OptionError, match=r"--cp-deg.*'2'"):
        normalise(["--cp_deg=2"], SMALL.rows, family)


def test_choices_may_be_given_several_times() -> None:
    """As texts, in their order; what else a command has is as it was."""
    several = Command(name="several", intro="", fills=(Small,), repeats=("num-layers", "kind"))
    raw = several.read(
        ["--num-layers", "4,5", "--num_layers=6", "--kind", "two", "--bsz", "2"], lambda _: None
    )

    assert raw == {"num-layers": ["4,5", "6"], "kind": ["two"], "bsz": "2"}
    heading = f"{REPEATED}\n  --num-layers N[,N]        layers\n  --kind one|two"
    assert heading in several.help_text
    assert SMALL.help_text == HELP


def test_alias_may_bring_its_value() -> None:
    """It takes none of its own."""

    @dataclass(frozen=True, kw_only=True)
    class Modes:
        mode: Literal["static", "dryrun"] = option("static", help="how", panel="What")

    assert normalise(["--dry_run"], rows_of(Modes)) == (["--mode", "dryrun"], [])
    # engines write switches with a number, too
    assert normalise(["--dry-run", "1"], rows_of(Modes)) == (["--mode", "dryrun"], [])
    assert normalise(["--dry-run", "0"], rows_of(Modes)) == ([], [])
    with pytest.raises(OptionError, match=r"--dry-run.*--mode"):
        normalise(["--dry-run=3"], rows_of(Modes))


def test_a_text_of_several_words_is_a_value() -> None:
    """Also one that begins with hyphens, such as the arguments of a script."""

    @dataclass(frozen=True, kw_only=True)
    class Script:
        args: str | None = option(None, help="arguments", panel="What")
        kind: str | None = option(None, help="a name", panel="What")

    rows = rows_of(Script)
    words = ["--args", "--size 7B --kind x", "--kind", "y"]
    assert normalise(words, rows) == (words, [])
    with pytest.raises(OptionError, match="--args needs a value"):
        normalise(["--args", "--kind", "y"], rows)


HELP = """\
usage: small [PLAN]

Do little.

Twice.

Options shown without a value are flags; they also take 0 or 1 (off or on).

What
  PLAN                      a file
  --memory X                GiB [default: 2]
  --name TEXT               a name

Most used
  --num-layers N[,N]        layers
  --kind one|two            which of two [default: one]

How
  --bsz N                   batch
  --seed N                  of what is drawn [default: 0]
  --quick                   off unless given
  --[no-]careful            on unless told [default: on]
  --[no-]wide               of the plan [default: the plan's]
  --pin RULE                repeats
  --words TEXT              in one text [default: a]

--help prints this. Underscores and hyphens are equivalent, and so are `--name
value`, `--name=value` and `name=value`.
"""


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Groups, defaults and values; the same without a terminal wherever it runs."""
    assert SMALL.run(["--quick", "--help", "all"], lambda _: 7) == 0
    assert capsys.readouterr().out == HELP
    # Whole it has more lines than a screen.
    assert SMALL.run(["--quick", "-h"], lambda _: 7) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 24 < len(HELP.splitlines())
    assert lines[:4] == [
        "usage: small [PLAN]",
        "Do little.",
        "",
        "  --num-layers N[,N]       layers",
    ]


@pytest.mark.parametrize("module", COMMANDS)
def test_every_command_has_a_help_within_the_width(module: str) -> None:
    """Each option is named in it, once, and the most used are about a dozen."""
    command = command_of(module)
    text = command.help_text

    assert max(map(len, text.splitlines())) <= HELP_WIDTH
    assert len({row.name for row in command.rows}) == len(command.rows)
    assert len({row.key for row in command.rows}) == len(command.rows)
    assert sum(row.most_used for row in command.rows) <= 13
    for row in command.rows:
        if not row.positional:
            shown = f"  --[no-]{row.name}" if row.kind == "switch" else f"  --{row.name}"
            lines = [line for line in text.splitlines() if line.split(" ")[:3] == shown.split(" ")]
            assert len(lines) == 1, row.name


def test_aliases_lead_to_options_of_commands() -> None:
    """Each means an option of some command; what is said of others is of none that there is."""
    commands = [command_of(module) for module in COMMANDS]
    # not by name: words of one command have options of their own
    tables = [{row.name for row in command.rows} for command in commands]
    everything = set().union(*tables)

    known = alias_tables()
    for targets in known.aliases.values():
        assert {target.partition("=")[0] for target in targets} <= everything
    assert {name for name, _ in known.values} <= everything | set(known.aliases)
    for command, own in zip(commands, tables, strict=True):
        family = known.families[command.family]
        foreign = [family.ignored, family.planned, family.refused, family.only_one]
        for table in foreign:
            assert not set(table) & own, command.name
        assert len(set().union(*foreign)) == sum(map(len, foreign))
        assert family.flags <= set(family.ignored)


def test_words_after_two_hyphens_are_no_options() -> None:
    """A file may be called like an option, and `-o` is one after `--`."""
    words = ["--", "--unknown", "mode=dryrun", "-o", "--"]
    assert normalise(words, SMALL.rows) == (words, [])
