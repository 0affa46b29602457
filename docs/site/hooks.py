"""Pages of the site from files outside docs/, and links that work on the site.

mkdocs calls these functions. Links in the files of the repository do not change. On the site they
lead to the page of the file, or become plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
ELSEWHERE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "tests/golden/bad_input.md": "reference/bad-input.md",
}
"""File of the repository -> page of the site."""
_CONTENTS = 2
"""Number of headings from which a page has a table of contents."""
_LINK = re.compile(r"(?<!!)\[([^\]\n]*(?:\[[^\]\n]*\][^\]\n]*)*)\]\(([^)\s]+)\)")


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages from files outside docs/."""
    from mkdocs.structure.files import File

    for name, page in ELSEWHERE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Return a page whose links work on the site; a short page has no table of contents."""
    if len(re.findall("^## ", markdown, re.MULTILINE)) < _CONTENTS:
        page.meta.setdefault("hide", ["toc"])
    there = {page: name for name, page in ELSEWHERE.items()}
    uri = page.file.src_uri
    source = there.get(uri, f"docs/{uri}")
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
