"""The site: its pages are in its menu, what is generated is of today, what they name exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import ClassVar
from xml.etree import ElementTree as ET

import pytest
import yaml

from autopar.cli import SUBCOMMANDS
from autopar.command.aliases import alias_tables
from autopar.command.options import Command
from docs import make_answers, make_pictures, make_reference
from docs.site import hooks

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
LONG = {
    "guides/gallery.md",
    "guides/fastest.md",
    "guides/fine-tuning.md",
    "guides/small-gpus.md",
}
"""Pages whose searches take more than a few seconds."""
TABLES = ("Galvatron", "PaddleNLP", "Calculon", "SimuMax", "AIConfigurator")
"""Sections of guides/coming-from.md."""
_OPTION = re.compile(r"--[a-z][\w-]*")
_OURS = ("autopar", "profile-", "torchrun")


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose names of functions mean nothing here."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def menu() -> dict[str, object]:
    """Return the configuration of the site."""
    with (ROOT / "mkdocs.yml").open(encoding="utf-8") as file:
        found = yaml.load(file, Loader=_Loader)
    assert isinstance(found, dict)
    return found


def paths(item: object) -> Iterator[str]:
    """Yield the pages of the menu."""
    if isinstance(item, str):
        yield item
    for one in item if isinstance(item, list) else item.values() if isinstance(item, dict) else ():
        yield from paths(one)


def test_every_page_is_in_the_menu() -> None:
    """A page that no menu leads to is not found; `make docs` refuses it, too."""
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    listed = list(paths(menu()["nav"]))

    assert len(listed) == len(set(listed))
    assert pages - set(listed) == set(), "add these pages to `nav` of mkdocs.yml"
    assert set(listed) - pages == set(hooks.ELSEWHERE.values())


def test_the_site_asks_nobody() -> None:
    """Neither fonts nor scripts come from elsewhere: it is read without a network."""
    site = menu()
    theme = site["theme"]
    assert isinstance(theme, dict)
    assert theme["font"] is False
    assert site["extra"] == {"generator": False, "polyfills": ["assets/iframe-worker.js"]}
    for path in (DOCS / "assets").iterdir():
        text = re.sub(r"^\s*//.*$", "", path.read_text("utf-8"), flags=re.MULTILINE)
        # the name of the namespace of SVG is no address that is loaded
        assert "//" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "", 1), path.name


def test_former_pages_lead_to_their_new_places() -> None:
    """Each redirect names a page of the menu and, for a part of it, a section."""
    listed = set(paths(menu()["nav"]))
    assert set(hooks.MOVED) & listed == set(), "a page and its redirect have one address"
    assert {target.partition("#")[0] for target in hooks.MOVED.values()} <= listed
    for target in hooks.MOVED.values():
        page, _, section = target.partition("#")
        text = (DOCS / page).read_text("utf-8")
        heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        assert not section or section in {
            re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads
        }, target
    found = hooks.redirects()
    assert 'url=../guides/fastest.html"' in found["questions/fastest.html"]
    assert 'url=guides/other-gpus.html#what-if"' in found["explore.html"]


def test_llms_text_lists_every_page(tmp_path: Path) -> None:
    """llms.txt has a line for each page of the menu, with a sentence; the build writes it."""
    site = menu()
    hooks.on_post_build(config={**site, "site_dir": tmp_path})
    lines = (tmp_path / "llms.txt").read_text("utf-8").splitlines()
    found = [re.fullmatch(r"- \[.+\]\((.+)\.html\): \S.*[.?!:]", line) for line in lines[3:]]
    assert lines[0] == "# autopar"
    assert [f"{row[1]}.md" for row in found if row] == list(paths(site["nav"]))
    assert [line for line in lines if line.startswith("## ")] == [
        "## Start",
        "## Guides",
        "## Concepts",
        "## Reference",
        "## Development",
    ]
    assert (tmp_path / "cli.html").is_file()


@pytest.mark.parametrize(
    ("page", "link", "there"),
    [
        ("a.md", "[x](../tests/golden/bad_input.md)", "[x](reference/bad-input.md)"),
        ("guides/a.md", "[x](../b.md#c)", "[x](../b.md#c)"),
        ("changelog.md", "[x](docs/guides/b.md)", "[x](guides/b.md)"),
        ("reference/bad-input.md", "[x](../../README.md)", "[x](../index.md)"),
        ("a.md", "[x](../tests/data/README.md)", "x (`tests/data/README.md`)"),
        ("a.md", "[x](https://example.org/y)", "[x](https://example.org/y)"),
        ("a.md", "```\n[x](../README.md)\n```", "```\n[x](../README.md)\n```"),
        ("a.md", "| `a\\|b` \\| c |", "| `a|b` \\| c |"),
        ("a.md", "1. x\n   ```\n   y\n   ```\n2. z", "1. x\n    ```\n    y\n    ```\n\n2. z"),
        ("a.md", "said:\n- x\n- y", "said:\n\n- x\n- y"),
        ("a.md", "<!-- of -->\n| a |\n|---|\n| b |", "<!-- of -->\n\n| a |\n|---|\n| b |"),
    ],
)
def test_links_lead_to_pages_of_the_site(page: str, link: str, there: str) -> None:
    """Files outside of docs/ are pages of it, or words."""

    class Page:
        class file:  # noqa: N801 - as mkdocs has it
            src_uri = page

        meta: ClassVar[dict[str, object]] = {}

    assert hooks.on_page_markdown(link, page=Page, config=None, files=None) == there


def test_golden_reference_is_of_today(request: pytest.FixtureRequest) -> None:
    """docs/reference says what the code says; `make docs-reference` brings it up to date."""
    if request.config.getoption("--update-golden"):
        make_reference.main()
    found = {path.name: path.read_text("utf-8") for path in make_reference.FOLDER.glob("*.md")}
    expected = make_reference.pages()

    assert set(found) == set(expected) | make_reference.HAND_WRITTEN
    stale = [name for name, text in expected.items() if found[name] != text]
    assert stale == [], "run `make docs-reference`"


def listed_options(page: str) -> set[str]:
    """Return the options in the first column of the tables of a page, without `no-`."""
    rows = re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)
    return {name.replace("[no-]", "") for name in rows}


def shared_options(page: str) -> set[str]:
    """Return the options that a page names as those of a section of another page."""
    found = set[str]()
    for target, text in re.findall(r"^- (?:\[.*?\]\((.*?)\)|[^`]*?): (.*)$", page, re.MULTILINE):
        named = set(re.findall(r"`([^`]+)`", text))
        if not text.startswith("all"):
            found |= named
            continue
        name, _, anchor = target.partition("#")
        other = (make_reference.FOLDER / name).read_text("utf-8")
        parts = re.split(r"^##+ ", other, flags=re.MULTILINE)
        (part,) = (one for one in parts if one.lower().replace(" ", "-").startswith(f"{anchor}\n"))
        found |= listed_options(part) - named
    return found


def test_reference_has_every_option() -> None:
    """Each command has a page, which lists each option or names the page that lists it."""
    for _, module, _ in SUBCOMMANDS.values():
        for command in vars(import_module(module)).values():
            if not isinstance(command, Command):
                continue
            page = next(
                text
                for text in (path.read_text("utf-8") for path in make_reference.FOLDER.glob("*.md"))
                if f"```bash\n{command.name} {command.usage}\n```" in text
            )
            known = listed_options(page) | shared_options(page)
            assert {row.label for row in command.rows} - known == set(), command.name


def test_reference_lists_a_shared_option_once() -> None:
    """The pages of commands that search list few options of their own."""
    for name, most in (("explain", 8), ("compare", 8), ("export", 12), ("explore", 60)):
        page = (make_reference.FOLDER / f"autopar-{name}.md").read_text("utf-8")
        own = page.partition("## Other spellings")[0]
        assert 0 < len(listed_options(own)) <= most, name
        assert "autopar-search.md#degrees" in page


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow) if page in LONG else page
        for page in (*make_answers.PAGES, *make_pictures.PICTURES)
    ],
)
def test_golden_answers_are_of_today(page: str, request: pytest.FixtureRequest) -> None:
    """Pages show what commands print, pictures what is computed; `make gallery` writes both."""
    text = (DOCS / page).read_text("utf-8")
    today = make_answers.page_of_today(page)
    if request.config.getoption("--update-golden"):
        (DOCS / page).write_text(today, "utf-8")
        return
    assert text == today, f"docs/{page} shows another answer; run `make gallery`"


@pytest.mark.parametrize("name", make_pictures.PICTURES)
def test_a_picture_follows_the_colours_of_its_reader(name: str) -> None:
    """It is small, has words for who cannot see it, defines all of its colours, and is shown."""
    path = DOCS / name
    text = path.read_text("utf-8")
    assert path.stat().st_size < 100_000
    root = ET.fromstring(text)
    space = {"svg": "http://www.w3.org/2000/svg"}
    style = root.findtext("svg:style", namespaces=space) or ""
    light, dark = re.findall(r":root \{([^}]*)\}", style)
    assert "@media (prefers-color-scheme: dark)" in style
    colours = [dict(re.findall(r"(--\w+): (#\w+);", one)) for one in (light, dark)]
    assert set(re.findall(r"var\((--\w+)\)", style)) <= set(colours[0])
    assert {"--paper", "--ink", "--quiet", "--rule"} <= set(colours[1])
    assert colours[0]["--paper"] != colours[1]["--paper"]
    classes = {word for one in root.iter() for word in one.get("class", "").split()}
    assert {one for one in classes if not re.search(rf"\.{one}\b", style)} == set()
    for tag in ("svg:title", "svg:desc"):
        assert len(root.findtext(tag, namespaces=space) or "") > 20
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    shown = rf"!\[[^\]]{{20,}}\]\([\w./]*{path.name}\)"
    assert any(re.search(shown, page.read_text("utf-8")) for page in pages)


def test_answers_are_written_below_their_commands() -> None:
    """The shell, its files, a cut answer, an error; a text block elsewhere is left alone."""
    page = (
        '# t\n\n```text\nkept\n```\n\n## a\n\n```json title="x/a.json"\n{"a": 1}\n```\n\n'
        "```\ncat x/a.json | head -1\necho no >&2\n```\n\n```text\nold\n```\n\n"
        "```\nautopar no-such\n```\n\n```text\n```\n"
    )
    found = "".join(map(make_answers.answered, make_answers.sections(page)))

    assert "```text\nkept\n```" in found
    assert 'head -1\necho no >&2\n```\n\n```text\n{"a": 1}\n```\n' in found, "stdout alone"
    assert "```text\nautopar: unknown command 'no-such'" in found
    with pytest.raises(make_answers.FailedError, match="exit code 1"):
        make_answers.answered("```\nfalse\n```\n\n```text\n```\n")


def known_options() -> dict[str, set[str]]:
    """Return the names of commands -> the options that each takes."""
    found: dict[str, set[str]] = {}
    for word, (own, module, _) in SUBCOMMANDS.items():
        names = {f"autopar {word}", own, f"torchrun -m {module.rpartition('.')[0]}"}
        for command in vars(import_module(module)).values():
            if isinstance(command, Command):
                options = {row.name for row in command.rows}
                aliases = alias_tables().aliases.items()
                options |= {alias for alias, own in aliases if options & {*own}}
                for name in names:
                    found.setdefault(name, set()).update(f"--{option}" for option in options)
    return found


@pytest.mark.parametrize("tool", TABLES)
def test_tables_name_what_there_is(tool: str) -> None:
    """Each command and option of ours in the tables for who comes from elsewhere exists."""
    known = known_options()
    page = (DOCS / "guides" / "coming-from.md").read_text("utf-8")
    (text,) = (part for part in make_answers.sections(page) if part.startswith(f"## {tool}\n"))
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    said = [code for row in rows if len(row) > 1 for code in re.findall(r"`([^`]+)`", row[1])]
    ours = [code for code in said if code.startswith(_OURS)]
    assert len(ours) > 5, "the pattern above finds what it must"

    for code in ours:
        name = max((name for name in known if code.startswith(name)), key=len, default=None)
        assert name is not None, f"{code}: no command of ours"
        unknown = set(_OPTION.findall(code)) - known[name]
        assert unknown == set(), f"{code}: {unknown}"


def test_answered_sections_name_options_that_exist() -> None:
    """Words around shown answers that look like options of ours are options of some command."""
    known = {option for options in known_options().values() for option in options}
    found = [
        (path, section)
        for path in (DOCS / "guides").glob("*.md")
        if path.name not in {"coming-from.md", "gallery.md"}
        for section in make_answers.sections(path.read_text("utf-8"))
        if make_answers.shows_answers(section)
    ]
    assert len(found) > 5, "the pages of the guides show answers"
    for path, section in found:
        prose = make_answers._BLOCK.sub("", section)
        codes = re.findall(r"`([^`]+)`", prose)
        words = {word for code in codes for word in _OPTION.findall(code)}
        assert words - known == set(), path.name
        assert all(shlex.split(code) for code in codes)
