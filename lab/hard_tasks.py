"""Harder retrieval tasks: facts that change, lead to each other, must be listed or counted, and rules.

Facts have word values (" The code of KEY is WORD.") or numbers. As in tasks.py, each task is a
method (rng, T, ...) that returns tokens and roles, (T,) each. The facts determine the answer to
every question.
"""

import numpy as np

from nanollm.check import whole
from lab.tasks import Tasks

HARD = "turns", "latest", "hops", "list", "count", "rule", "paraphrase"
MARKS = {"star": " *", "dash": " -"}  # the two forms of an answer in the task `rule`


class HardTasks(Tasks):
    """The tasks of tasks.py and seven harder ones."""

    KNOWN = (*Tasks.KNOWN, *HARD)

    def turns(self, rng, T: int, facts: int = 6, questions: int = 4):
        """Make a document with facts, and ask several questions, one after another."""
        return self.needle(rng, T, facts, questions)

    def latest(self, rng, T: int, facts: int = 4, changed: int = 2, questions: int = 1):
        """Make a document that states some facts again with a new value, and ask for the newest values.

        Keys that were stated twice are asked for first.
        """
        whole("changed", changed, 1, facts)
        whole("questions", questions, 1, facts)
        drawn = self.draw_pairs(rng, facts + changed)
        keys, values = [key for key, _ in drawn[:facts]], [value for _, value in drawn]
        # keys 0 … changed − 1 come twice
        stated = rng.permutation([*range(facts), *range(changed)])
        # a later value replaces an earlier one
        newest = dict(zip(stated, values))
        lines = [self.fact(keys[i], value) for i, value in zip(stated, values)]
        asked = [
            (self.question(keys[i]), newest[i], self.ids("."))
            for i in rng.permutation(questions)
        ]
        return self.assemble(rng, T, lines, asked, np.sort(rng.random(len(lines))))

    def hops(self, rng, T: int, hops: int = 3, chains: int = 2, questions: int = 1):
        """Make chains of facts, "the code of A is B", "the code of B is C", …; the last value is a number.

        The answer writes each step out, so every step has to find a fact.
        """
        whole("hops", hops, 2)
        whole("questions", questions, 1, chains)
        drawn, lines, asked = self.draw_pairs(rng, hops * chains), [], []
        for i in range(chains):
            chain = drawn[i * hops : (i + 1) * hops]
            values = [key for key, _ in chain[1:]] + [chain[-1][1]]
            steps = [
                self.fact(key, value, is_number=j == hops - 1)
                for j, ((key, _), value) in enumerate(zip(chain, values))
            ]
            lines += steps
            said = self.begun(chain[0][0], is_number=False)  # by the question
            trace = [t for step in steps for t in step][len(said) : -1]
            asked.append(
                (self.question(chain[0][0], is_number=False), trace, self.ids("."))
            )
        lines = [lines[i] for i in rng.permutation(len(lines))]
        return self.assemble(
            rng, T, lines, [asked[i] for i in rng.permutation(chains)[:questions]]
        )

    def list(self, rng, T: int, kinds: int = 2, values: int = 4, questions: int = 1):
        """Make a document with numbers of several kinds, and ask for all numbers of a kind, in order.

        Each number is an answer of its own: after a wrong one the next is still asked for.
        """
        whole("questions", questions, 1, kinds)
        names = [key for key, _ in self.draw_pairs(rng, kinds)]
        drawn = [value for _, value in self.draw_pairs(rng, kinds * values)]
        of_kind = rng.permutation(np.repeat(np.arange(kinds), values))
        number, comma = self.before(" number is"), self.before(",")
        lines = [
            self.ids(" The") + names[i] + number + value + self.ids(".")
            for i, value in zip(of_kind, drawn)
        ]
        asked = []
        for i in rng.permutation(kinds)[:questions]:
            mine = [value for j, value in zip(of_kind, drawn) if i == j]
            ask = (
                self.ids("\nQ:")
                + self.ids(" The")
                + names[i]
                + self.before(" numbers are")
            )
            asked += [
                (
                    ask if j == 0 else comma,
                    value,
                    self.ids(".") if j == values - 1 else [],
                )
                for j, value in enumerate(mine)
            ]
        return self.assemble(rng, T, lines, asked, np.sort(rng.random(len(lines))))

    def count(self, rng, T: int, votes: int = 12, labels: int = 3):
        """Make a document with votes for labels, and ask which label has the most votes.

        One label has one vote more than half of them; the others share the rest.
        """
        whole("labels", labels, 2)
        whole("votes", votes, labels + 1)
        names, most = [key for key, _ in self.draw_pairs(rng, labels)], votes // 2 + 1
        given = [0] * most + [1 + i % (labels - 1) for i in range(votes - most)]
        lines = [
            self.ids(" A vote for") + names[i] + self.ids(".")
            for i in rng.permutation(given)
        ]
        return self.assemble(
            rng,
            T,
            lines,
            [
                (
                    self.ids("\nQ:") + self.ids(" Most votes are for"),
                    names[0],
                    self.ids("."),
                )
            ],
        )

    def rule(self, rng, T: int, facts: int = 4, questions: int = 1):
        """Make a document that begins with two rules, and ask for a fact.

        One rule says with which mark an answer begins. The other names a word that must never be
        said: where it would be the answer, the answer is " none". An answer is the mark and the
        word.
        """
        whole("questions", questions, 1, facts)
        none = self.ids(" none")
        words = [key for key, _ in self.draw_pairs(rng, 2 * facts + 2) if key != none]
        keys, values, other = words[:facts], words[facts : 2 * facts], words[2 * facts]
        mark = ("star", "dash")[rng.integers(2)]
        banned = values[0] if rng.random() < 0.5 else other
        form = self.ids(f" Answer with a {mark}.")
        ban = self.ids(" Never say") + banned + self.ids(".")
        rules = [form, ban] if rng.random() < 0.5 else [ban, form]

        lines = [
            self.fact(key, value, is_number=False) for key, value in zip(keys, values)
        ]
        depths = [0.0, 0.0, *rng.random(facts)]
        asked = [
            (
                self.question(keys[i], is_number=False),
                self.ids(MARKS[mark]) + (none if values[i] == banned else values[i]),
                self.ids("."),
            )
            for i in rng.permutation(questions)
        ]
        return self.assemble(rng, T, rules + lines, asked, depths)

    def paraphrase(self, rng, T: int, facts: int = 4, questions: int = 1):
        """Make the needle's document, and ask in other words than the fact's."""
        whole("questions", questions, 1, facts)
        drawn = self.draw_pairs(rng, facts)
        lines = [self.fact(key, value) for key, value in drawn]
        ask, it_is = self.ids("\nQ: Which number belongs to"), self.before("? It is")
        asked = [
            (ask + drawn[i][0] + it_is, drawn[i][1], self.ids("."))
            for i in rng.permutation(facts)[:questions]
        ]
        return self.assemble(rng, T, lines, asked)
