"""Additions of the site: pages from other files, links, redirects of former pages, llms.txt.

mkdocs calls these functions. Links in the files of the repository do not change. On the site they
lead to the page of the file, or become plain text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
ELSEWHERE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "tests/golden/bad_input.md": "reference/bad-input.md",
}
"""File of the repository -> page of the site."""
MOVED = {
    "accuracy.md": "concepts/accuracy.md",
    "analytic.md": "concepts/closed-form.md",
    "benchmarks.md": "concepts/accuracy.md",
    "check.md": "guides/check.md",
    "cli.md": "guides/quickstart.md#commands",
    "coming-from/aiconfigurator.md": "guides/coming-from.md#aiconfigurator",
    "coming-from/calculon.md": "guides/coming-from.md#calculon",
    "coming-from/galvatron.md": "guides/coming-from.md#galvatron",
    "coming-from/index.md": "guides/coming-from.md",
    "coming-from/paddlenlp.md": "guides/coming-from.md#paddlenlp",
    "coming-from/simumax.md": "guides/coming-from.md#simumax",
    "compare.md": "guides/why-not.md#two-plans-side-by-side",
    "cost-model.md": "concepts/cost-model.md",
    "estimates.md": "concepts/estimates.md",
    "explore.md": "guides/other-gpus.md#what-if",
    "export-deepspeed.md": "guides/export.md#deepspeed-and-accelerate",
    "export-torchtitan.md": "guides/export.md#torchtitan",
    "export.md": "guides/export.md",
    "formats.md": "reference/files.md",
    "gallery.md": "guides/gallery.md",
    "hardware.md": "guides/measure-cluster.md",
    "json.md": "reference/json.md",
    "launches.md": "guides/fastest.md",
    "memory.md": "concepts/memory.md",
    "model.md": "guides/measure-model.md",
    "pictures.md": "guides/pictures.md",
    "plan.md": "guides/check-a-plan.md",
    "planner.md": "concepts/search.md",
    "python.md": "guides/python.md",
    "questions/check-my-launch.md": "guides/check.md",
    "questions/fastest.md": "guides/fastest.md",
    "questions/how-sure.md": "guides/how-sure.md",
    "questions/index.md": "guides/index.md",
    "questions/launch.md": "guides/launch.md",
    "questions/measured.md": "guides/measured.md",
    "questions/memory.md": "guides/memory.md",
    "questions/other-gpus.md": "guides/other-gpus.md",
    "questions/own-cluster.md": "guides/own-cluster.md",
    "questions/own-model.md": "guides/own-model.md",
    "questions/small-gpus.md": "guides/small-gpus.md",
    "questions/why-not-mine.md": "guides/why-not.md",
    "quickstart.md": "guides/quickstart.md",
    "running-job.md": "guides/launch.md",
    "tuners.md": "concepts/closed-form.md#tuners",
    "verify.md": "guides/verify.md",
}
"""Former page of the site -> its page, with the section if it is a part of that page."""
_CONTENTS = 2
"""Number of headings from which a page has a table of contents."""
_REDIRECT = """<!doctype html>
<meta charset="utf-8">
<title>Moved</title>
<link rel="canonical" href="{path}">
<meta http-equiv="refresh" content="0; url={path}{anchor}">
<a href="{path}{anchor}">This page has moved.</a>
"""
_LINK = re.compile(r"(?<!!)\[([^\]\n]*(?:\[[^\]\n]*\][^\]\n]*)*)\]\(([^)\s]+)\)")


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages from files outside docs/."""
    from mkdocs.structure.files import File

    for name, page in ELSEWHERE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_post_build(*, config: Any) -> None:
    """Write the redirects of former pages, and llms.txt."""
    site = Path(config["site_dir"])
    for name, text in redirects().items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    text = llms_text(config["site_name"], config["site_description"], config["nav"])
    (site / "llms.txt").write_text(text, encoding="utf-8")


def redirects() -> dict[str, str]:
    """Return the files that lead from former pages to the present ones: name -> HTML."""
    found = {}
    for former, target in MOVED.items():
        page, hash_, section = target.partition("#")
        path = posixpath.relpath(_html(page), posixpath.dirname(former) or ".")
        found[_html(former)] = _REDIRECT.format(path=path, anchor=f"{hash_}{section}")
    return found


def llms_text(name: str, description: str, nav: Any) -> str:
    """Return llms.txt: each page of the menu with its title and first sentence, by group."""
    lines = [f"# {name}", "", f"> {description}"]
    for group in nav:
        ((title, item),) = group.items()
        lines += ["", f"## {title}", ""]
        for uri in _uris(item):
            heading, sentence = _first(source_of(uri).read_text(encoding="utf-8"), uri)
            lines.append(f"- [{heading}]({_html(uri)}): {sentence}")
    return "\n".join(lines) + "\n"


def source_of(uri: str) -> Path:
    """Return the file of the repository that a page of the site is made from."""
    there = {page: name for name, page in ELSEWHERE.items()}
    return ROOT / there.get(uri, f"docs/{uri}")


def _uris(item: Any) -> Iterator[str]:
    """Yield the pages below an entry of the menu."""
    if isinstance(item, str):
        yield item
        return
    for one in item if isinstance(item, list) else item.values():
        yield from _uris(one)


def _html(uri: str) -> str:
    return uri.removesuffix(".md") + ".html"


def _first(markdown: str, uri: str) -> tuple[str, str]:
    """Return the title of a page and the first sentence of its first paragraph."""
    text = "".join(text for is_code, text in _pieces(markdown) if not is_code)
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    paragraph = next(
        (
            " ".join(block.split())
            for block in re.split(r"\n\s*\n", text[title.end() :] if title else text)
            if re.match(r"[^\s#|<>\-]", block.strip())
        ),
        None,
    )
    if title is None or paragraph is None:
        raise ValueError(f"{uri}: a page needs a title and a first paragraph")
    words = _LINK.sub(lambda found: found[1], paragraph).replace("**", "")
    sentence = re.match(r".*?[.?!](?=\s|$)|.*", words)
    assert sentence is not None
    return title[1], sentence[0]


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Return a page whose links work on the site; a short page has no table of contents."""
    if len(re.findall("^## ", markdown, re.MULTILINE)) < _CONTENTS:
        page.meta.setdefault("hide", ["toc"])
    uri = page.file.src_uri
    source = source_of(uri).relative_to(ROOT).as_posix()
    if uri == ELSEWHERE["CHANGELOG.md"]:
        # it contains every word, and would be the first result of every search
        page.meta.setdefault("search", {"exclude": True})
    return "".join(
        text if is_code else _LINK.sub(lambda found: _link(found, source, uri), _apart(text))
        for is_code, text in _pieces(_numbered(markdown))
    )


def _numbered(markdown: str) -> str:
    """Return a page whose continuation lines in numbered lists are indented by four spaces."""
    lines: list[str] = []
    inside = fenced = False
    for line in markdown.split("\n"):
        fenced ^= line.startswith("```")
        is_point = not fenced and re.match(r"\d+\. ", line) is not None
        if is_point and lines and lines[-1].startswith("   "):
            lines.append("")
        inside = is_point or (inside and (not line or line.startswith("   ")))
        lines.append(" " + line if inside and line.startswith("   ") else line)
    return "\n".join(lines)


def _apart(text: str) -> str:
    """Return a text that Python-Markdown renders like GitHub.

    Tables and lists need blank lines around them; in the code of a table a bar needs no backslash.
    """
    text = re.sub(
        r"^\|.*$",
        lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0]),
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(r"^(?!\|)(\S.*)\n(?=\|)", r"\1\n\n", text, flags=re.MULTILINE)
    return re.sub(
        r"^(?!- |\d+\. |\|)(\S.*)\n(?=(?:- |\d+\. )\S)", r"\1\n\n", text, flags=re.MULTILINE
    )


def _pieces(markdown: str) -> list[tuple[bool, str]]:
    """Return the page as pieces (True if a block of code, text)."""
    found, end = [], 0
    for block in re.finditer(r"^( *)(```+).*?^\1\2 *$", markdown, re.DOTALL | re.MULTILINE):
        found += [(False, markdown[end : block.start()]), (True, block[0])]
        end = block.end()
    return [*found, (False, markdown[end:])]


def _link(found: re.Match[str], source: str, uri: str) -> str:
    """Return a link in the form of the site; only its text if it leads out of the site."""
    words, target = found.groups()
    path, hash_, anchor = target.partition("#")
    if "://" in target or not path:
        return found[0]
    name = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if name in ELSEWHERE:
        there = ELSEWHERE[name]
    elif name == "README.md":
        there = "index.md"
    elif PurePosixPath(name).is_relative_to("docs") and not (ROOT / name).is_dir():
        there = name.removeprefix("docs/")
    else:
        return words if words.startswith("`") or words == name else f"{words} (`{name}`)"
    return f"[{words}]({posixpath.relpath(there, posixpath.dirname(uri) or '.')}{hash_}{anchor})"
