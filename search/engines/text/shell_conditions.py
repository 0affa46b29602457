"""Conditions of a bash script: `[[ ]]`, and patterns against values."""

from __future__ import annotations

import re

from search.engines.text.shell_builtins import SET_KEPT, SET_NAMES, Builtins
from search.engines.text.shell_patterns import UnreadPatternError, groups_of, regular_pattern
from search.engines.text.shell_syntax import Test
from search.engines.text.shell_values import COMPARED, Shell, Variable, in_order, is_open, nonempty
from search.engines.text.shell_words import NAME, Word


class Conditions(Builtins):
    """Conditions of one interpretation; None is a result known only at run time."""

    def _unary(self, shell: Shell, how: str, word: str) -> bool | None:
        if how in ("-n", "-z"):
            full = nonempty(word)
            return None if full is None else full == (how == "-n")
        if how == "-o" and (flag := SET_NAMES.get(word)) in SET_KEPT:
            return flag in shell.options
        match = re.fullmatch(rf"({NAME})(?:\[(.*)\])?", word)
        if how == "-v" and match is not None and match[2] not in ("@", "*"):
            value = self._named(shell, match[1], match[2])
            if value is not None:
                return None if any(hole.why for hole in self.holes.of(value)) else True
            found = self._missing(shell, match[1], f"${word}", "")
            return None if is_open(found) else False
        return None

    def run_test(self, shell: Shell, test: Test) -> int | None:
        found = self._test(shell, test)
        return None if found is None else int(not found)

    def _test(self, shell: Shell, test: Test) -> bool | None:
        how, parts = test.how, test.parts
        if how in ("&&", "||"):
            found: bool | None = how == "&&"
            for part in parts:
                value = self._test(shell, part) if isinstance(part, Test) else None
                if value == (how == "||"):
                    return value
                found = None if value is None else found
            return found
        if how == "!":
            inner = self._test(shell, parts[0]) if isinstance(parts[0], Test) else None
            return None if inner is None else not inner
        words = [word for word in parts if isinstance(word, Word)]
        # Inside [[ ]], words are not split.
        one = self._text(shell, words[0], unset="")
        if how == "":
            return nonempty(one)
        if len(words) == 1:
            return self._unary(shell, how, one)
        if how in ("=", "==", "!="):
            same = self._matches_glob(shell, one, words[1], extended=True)
            return None if same is None else same == (how != "!=")
        if how == "=~":
            return self._matches_regular(shell, one, words[1])
        other = self._text(shell, words[1], unset="")
        if how in COMPARED:
            sums = self.sum(shell, one), self.sum(shell, other)
            return None if any(map(is_open, sums)) else COMPARED[how](int(sums[0]), int(sums[1]))
        if how in ("<", ">") and not is_open(one + other):
            found = in_order(one, other) if how == "<" else in_order(other, one)
            if found is None and "e" in shell.options:
                raise self.refuse(f"the order of {one[:20]} and {other[:20]}")
            return found
        return None

    def _matches_regular(self, shell: Shell, value: str, word: Word) -> bool | None:
        """Return True if `[[ value =~ word ]]`; `BASH_REMATCH` is set to what matched."""
        text = self.pattern_text(shell, word, unset="")
        shell.variables["BASH_REMATCH"] = Variable(self.unread("${BASH_REMATCH}"))
        if is_open(text) or is_open(value):
            return None
        try:
            pattern = regular_pattern(text)
        except UnreadPatternError as error:
            raise self.refuse(f"{error} in the pattern {word.written[:40]}") from None
        place = self.matcher(shell, value).found(pattern)
        if place is None:
            shell.variables["BASH_REMATCH"] = Variable({}, "a")
        elif (groups := groups_of(text, value, place)) is not None:
            shell.variables["BASH_REMATCH"] = Variable(dict(enumerate(groups)), "a")
        return place is not None

    def _matches_glob(
        self, shell: Shell, value: str, word: Word, *, extended: bool | None
    ) -> bool | None:
        if word.bare == "*":
            return True
        text = self.pattern_text(shell, word, unset="")
        if extended is None and "extglob" not in shell.options and re.search(r"[?*+@!]\(", text):
            raise self.refuse(f"the pattern {word.written[:40]} without `shopt -s extglob`")
        pattern = self.compiled(shell, text, word.written, extended=extended)
        if isinstance(pattern, str) or is_open(value):
            return None
        return self.matcher(shell, value).whole(pattern)
