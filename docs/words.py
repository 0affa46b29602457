"""Count wording that is awkward or unclear, per kind and per file.

    python docs/words.py                            all tracked files
    python docs/words.py search/planning --show all every hit in one folder
    python docs/words.py --base origin/main         changed files, with the difference
    python docs/words.py --check                    fail if a count is above docs/words.json
    python docs/words.py --write                    write docs/words.json

It reads Python, C++ comments and Markdown. `--base` also reads the commits since that revision.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_name("words.json")
SUFFIXES = frozenset({".py", ".md", ".cpp", ".hpp"})
SKIP = frozenset({"third_party", "build", ".venv", "golden", "data", "gallery"})
OWN = frozenset({"docs/words.py", "tests/unit/house/test_words.py"})
"""Files that quote the wording."""
MAX_SENTENCE_WORDS = 35
MAX_FIRST_SENTENCE = 100
"""Characters of the first sentence of a docstring."""
MAX_SUBJECT = 72
"""Characters of a commit subject."""
MAX_LINES_WITHOUT_BODY = 50
"""Changed lines above which a commit needs a body."""


class Kind(NamedTuple):
    """A kind of wording: what to write, and the pattern of it in prose, if it has one."""

    remedy: str
    pattern: str = ""


KINDS: Mapping[str, Kind] = {
    "somebody": Kind(
        "name the actor: the user, the caller, the engine",
        r"\b(some|no|any)body('s)?\b",
    ),
    "program-says": Kind(
        "print, report, raise; contain, set",
        r"\b(is|are|was|were|be|been) said\b|\bsays?\b|\bsaid\b|\baloud\b",
    ),
    "beside": Kind("next to, with, alongside, concurrent with, in addition to", r"\bbeside\b"),
    "of-today": Kind("current, or the date or version", r"\b(of|as) today\b|\btoday's\b"),
    "what-has": Kind(
        "a noun: the memory of, the cost of, the options that",
        r"\bwhat (an?|the|all|each|every|of|any|it|some|those|one|is|was|no|has|have|would"
        r"|differs|changes|costs?|fits?|takes?)\b(?![^.\n]{0,60}\?)",
    ),
    "as-has-it": Kind(
        "in the format of X, as in X",
        r"\bas (\S+ ){1,4}(has|have|had|does|do|is|are) (it|them|theirs|one)\b",
    ),
    "stands": Kind("is, is in, is listed", r"\b(stands?|stood)\b(?!-)(?! for\b)"),
    "rests-on": Kind("is based on", r"\brests? on\b"),
    "odds": Kind("probability; for 'at odds': contradicts", r"\bodds\b"),
    "left-out": Kind("not searched, ignored, excluded, not given", r"\bleft out\b|\bleaves? out\b"),
    "so-many": Kind("a number or a name: n ranks", r"\bso (many|much|few)\b(?! (that|as)\b)"),
    "of-which": Kind("split the sentence", r"\b(of|by|from|on|beside|behind) (which|whom|whose)\b"),
    "ways-out": Kind(
        "suggestion, path, repository, equals, confirms",
        r"\bways? out\b|\bgoes? the way\b|\bthe house\b|\bcomes? to\b|\bbears? out\b",
    ),
    "ownership": Kind("X defines Y, see X", r"\b(is|are) [`'\w.]+'s\b(?! \w)"),
    "one-s-own": Kind(
        "custom, separate", r"\bone's own\b|\bof (one's|its own|their own|your own|our own)\b"
    ),
    "doc-opening": Kind("start with a verb (Return, Raise) or with the noun"),
    "note-opening": Kind("quantity, unit, range, meaning of None"),
    "doc-first-long": Kind("first sentence of a docstring: at most 100 characters"),
    "long-sentence": Kind("at most 35 words, aim at 20"),
    "subject-long": Kind("commit subject: at most 72 characters"),
    "subject-form": Kind('commit subject: "area: what changes"'),
    "no-body": Kind("explain why in commits of more than 50 lines"),
}
_PHRASES = {
    name: re.compile(kind.pattern, re.IGNORECASE) for name, kind in KINDS.items() if kind.pattern
}
_OPENING = re.compile(r"^(?:Of|What|Whose|As|Whether|Who|Where|Which|Those|Till|Nothing|Both)\b")
_SUBJECT = re.compile(r"^(?:[a-z0-9_./-]+(?:\([^)]*\))?!?: \S|Merge |Revert |Release )")
_CODE = re.compile(r"^```.*?^```|<!--.*?-->", re.DOTALL | re.MULTILINE)
_SPANS = re.compile(r"`[^`\n]*`|\[([^\]]*)\]\([^)]*\)|https?://\S+")
_END = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`*\"(])|\n\s*\n|\n\s*[-*] |\n#+ |\|")


class Hit(NamedTuple):
    """One place: its kind, its line (the hash of a commit), and the text around it."""

    kind: str
    where: int | str
    excerpt: str


def sentences(text: str) -> list[str]:
    """Split prose into sentences of plain words; code spans become the word `code`."""
    plain = _SPANS.sub(lambda found: found[1] or "code", text)
    return [" ".join(part.split()) for part in _END.split(plain) if part and part.strip()]


def hits_of_prose(text: str, line: int) -> Iterator[Hit]:
    """Yield the phrases and the long sentences of a text that starts at `line`."""
    for kind, pattern in _PHRASES.items():
        for found in pattern.finditer(text):
            around = text[max(0, found.start() - 40) : found.end() + 40]
            yield Hit(kind, line + text.count("\n", 0, found.start()), " ".join(around.split()))
    for sentence in sentences(text):
        if len(sentence.split()) > MAX_SENTENCE_WORDS:
            yield Hit("long-sentence", line, sentence[:110])


def _bare_string(node: ast.AST) -> str | None:
    """Return the text of a statement that is a string alone, else None."""
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def hits_of_python(source: str) -> Iterator[Hit]:
    """Yield the hits of docstrings, attribute notes, comments and strings of three words or more.

    Raises SyntaxError where the source is not Python.
    """
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        # the body of a lambda is an expression
        statements = body if isinstance(body, list) else []
        for before, after in itertools.pairwise(statements):
            note = _bare_string(after) if isinstance(before, ast.AnnAssign | ast.Assign) else None
            if note and _OPENING.match(note.strip()):
                yield Hit("note-opening", after.lineno, note.strip()[:110])
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and statements:
            doc = _bare_string(statements[0])
            if doc:
                first = (sentences(doc.strip()) or [""])[0]
                line = statements[0].lineno
                if _OPENING.match(doc.strip()):
                    yield Hit("doc-opening", line, first[:110])
                if len(first) > MAX_FIRST_SENTENCE:
                    yield Hit("doc-first-long", line, first[:110])
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and text.count(" ") >= 2 and isinstance(node, ast.expr):
            yield from hits_of_prose(text, node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from hits_of_prose(token.string.lstrip("# "), token.start[0])


def hits_of_file(name: str, text: str) -> list[Hit]:
    """Return the hits of a file by its suffix."""
    if name.endswith(".py"):
        return list(hits_of_python(text))
    if name.endswith(".md"):
        # code blocks are left empty, so that lines keep their numbers
        text = _CODE.sub(lambda found: "\n" * found[0].count("\n"), text)
        blocks = re.finditer(r"(?:.+\n?)+", text)
        prose = ((block[0], block.start()) for block in blocks)
    else:
        prose = ((one[1], one.start()) for one in re.finditer(r"//[/!]?<?\s*(.*)", text))
    return [hit for words, at in prose for hit in hits_of_prose(words, 1 + text.count("\n", 0, at))]


def hits_of_commits(log: str) -> Iterator[Hit]:
    """Yield the hits of commits; log : of `git log --shortstat` in the format of `_LOG_FORMAT`."""
    for entry in log.split("\x1e")[1:]:
        name, subject, body, stat = entry.split("\x1f")[:4]
        changed = sum(map(int, re.findall(r"(\d+) (?:insertion|deletion)", stat)))
        if len(subject) > MAX_SUBJECT:
            yield Hit("subject-long", name, subject)
        if not _SUBJECT.match(subject):
            yield Hit("subject-form", name, subject)
        if changed > MAX_LINES_WITHOUT_BODY and not body.strip():
            yield Hit("no-body", name, subject)


_LOG_FORMAT = "--format=%x1e%h%x1f%s%x1f%b%x1f"


def _git(*words: str) -> str:
    """Return the standard output of a git command; exits with its message where it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"words.py: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode(errors="replace")


def _in_revision(revision: str, name: str) -> str:
    """Return the text of a file in a revision, empty where it was not there."""
    there = _git("ls-tree", "--name-only", revision, "--", name).strip()
    return _git("show", f"{revision}:{name}") if there else ""


def _read(path: str) -> bool:
    there = Path(path)
    return path not in OWN and there.suffix in SUFFIXES and not SKIP & set(there.parts)


def hits_of_tree(paths: Sequence[str], base: str | None = None) -> dict[str, list[Hit]]:
    """Return the hits of tracked files by name; base : only those changed since this revision."""
    listing = ["ls-files"] if base is None else ["diff", "--name-only", base]
    names = filter(_read, _git(*listing, "--", *paths).splitlines())
    there = [(name, ROOT / name) for name in names if (ROOT / name).is_file()]
    return {name: hits_of_file(name, path.read_text(encoding="utf-8")) for name, path in there}


def counted(hits: Mapping[str, Sequence[Hit]]) -> Counter[str]:
    """Return the number of hits by kind."""
    return Counter(hit.kind for found in hits.values() for hit in found)


def risen(now: Mapping[str, int], allowed: Mapping[str, int]) -> list[str]:
    """Return a line for every kind with more hits than allowed."""
    return [
        f"{kind}: {number} places, {allowed.get(kind, 0)} allowed; write: {KINDS[kind].remedy}"
        for kind, number in sorted(now.items())
        if number > allowed.get(kind, 0)
    ]


def _check(now: Counter[str]) -> int:
    """Print the kinds that rose and return the exit code."""
    lines = risen(now, json.loads(TABLE.read_text(encoding="utf-8")))
    for line in lines:
        print(f"words.py: {line}")
    if lines:
        print("words.py: `python docs/words.py --base HEAD --show all` lists what a change adds")
    return 1 if lines else 0


def _show(hits: Mapping[str, Sequence[Hit]], kind: str) -> None:
    """Print every hit of one kind, or of all."""
    for name, found in hits.items():
        for hit in found:
            if kind in (hit.kind, "all"):
                print(f"{name}:{hit.where}: {hit.kind}: {hit.excerpt}")


def _summarize(
    hits: Mapping[str, Sequence[Hit]], before: Counter[str] | None, num_files: int
) -> None:
    """Print the counts by kind, with the difference to `before`, and the worst files."""
    now = counted(hits)
    for kind, number in now.most_common():
        change = "" if before is None else f"{number - before[kind]:+6}"
        print(f"{number:6}{change}  {kind:15} {KINDS[kind].remedy}")
    print(f"{now.total():6}  in {len(hits)} files")
    for name in sorted(hits, key=lambda one: -len(hits[one]))[:num_files]:
        kinds = Counter(hit.kind for hit in hits[name]).most_common(3)
        most = ", ".join(f"{kind} {number}" for kind, number in kinds)
        print(f"{len(hits[name]):6}  {name}: {most}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the counts, or check them; return the exit code."""
    form: Any = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("paths", nargs="*", help="files or folders [all tracked files]")
    parser.add_argument("--top", type=int, default=15, metavar="N", help="files printed [15]")
    parser.add_argument("--show", metavar="KIND", help="print every hit of one kind, or of all")
    parser.add_argument("--base", metavar="REV", help="only files and commits since REV")
    parser.add_argument("--check", action="store_true", help="fail if a count rises")
    parser.add_argument("--write", action="store_true", help="write the table of counts")
    asked = parser.parse_args(arguments)
    if (asked.check or asked.write) and (asked.paths or asked.base):
        parser.error("--check and --write count the whole repository")
    hits = hits_of_tree(asked.paths, asked.base)
    if asked.check:
        return _check(counted(hits))
    if asked.write:
        TABLE.write_text(json.dumps(dict(sorted(counted(hits).items())), indent=2) + "\n")
        return 0
    before = None
    if asked.base:
        old = {name: hits_of_file(name, _in_revision(asked.base, name)) for name in hits}
        before = counted(old)
        log = _git("log", "--no-merges", "--shortstat", _LOG_FORMAT, f"{asked.base}..HEAD")
        hits["(commits)"] = list(hits_of_commits(log))
    if asked.show:
        _show(hits, asked.show)
    _summarize(hits, before, asked.top)
    return 0


if __name__ == "__main__":
    sys.exit(main())
