"""Harder tasks: facts that change or lead to each other, lists, counts, rules, other words.

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

    def latest(
        self,
        rng,
        T: int,
        facts: int = 4,
        changed: int = 2,
        questions: int = 1,
    ):
        """Make a document that states some facts again with a new value; ask for the newest.

        Keys that were stated twice are asked for first.
        """
        whole("changed", changed, 1, facts)
        whole("questions", questions, 1, facts)
        drawn = self.draw_pairs(rng, facts + changed)
        keys = [key for key, _ in drawn[:facts]]
        values = [value for _, value in drawn]
        # keys 0 … changed − 1 come twice
        stated = rng.permutation([*range(facts), *range(changed)])
        lines = []
        newest = {}
        for i, value in zip(stated, values):
            lines.append(self.fact(keys[i], value))
            newest[i] = value  # replaces an earlier one
        asked = []
        for i in rng.permutation(questions):
            asked.append(self.question(keys[i], newest[i]))
        depths = np.sort(rng.random(len(lines)))
        return self.assemble(rng, T, lines, asked, depths)

    def hops(
        self,
        rng,
        T: int,
        hops: int = 3,
        chains: int = 2,
        questions: int = 1,
    ):
        """Make chains of facts: "the code of A is B", "the code of B is C", … to a number.

        The answer writes each step out, so every step has to find a fact.
        """
        whole("hops", hops, 2)
        whole("questions", questions, 1, chains)
        drawn = self.draw_pairs(rng, hops * chains)
        lines = []
        asked = []
        for start in range(0, hops * chains, hops):
            chain = drawn[start : start + hops]
            keys = [key for key, _ in chain]
            number = chain[-1][1]
            steps = []
            for key, following in zip(keys, keys[1:]):
                steps.append(self.fact(key, following, is_number=False))
            steps.append(self.fact(keys[-1], number))
            lines += steps
            in_question = self.begun(keys[0], is_number=False)
            trace = sum(steps, [])[len(in_question) : -1]  # without the full stop
            asked.append(self.question(keys[0], trace, is_number=False))
        lines = [lines[i] for i in rng.permutation(len(lines))]
        asked = [asked[i] for i in rng.permutation(chains)[:questions]]
        return self.assemble(rng, T, lines, asked)

    def list(
        self,
        rng,
        T: int,
        kinds: int = 2,
        values: int = 4,
        questions: int = 1,
    ):
        """Make a document with numbers of several kinds; ask for all of a kind, in order.

        Each number is an answer of its own: after a wrong one the next is still asked for.
        """
        whole("questions", questions, 1, kinds)
        names = self.draw_keys(rng, kinds)
        drawn = [value for _, value in self.draw_pairs(rng, kinds * values)]
        of_kind = rng.permutation(np.repeat(np.arange(kinds), values))
        the = self.ids(" The")
        number = self.before(" number is")
        stop = self.ids(".")
        lines = []
        for i, value in zip(of_kind, drawn):
            lines.append(the + names[i] + number + value + stop)

        asked = []
        for i in rng.permutation(kinds)[:questions]:
            question = self.ids("\nQ:") + the + names[i] + self.before(" numbers are")
            *earlier, last = np.flatnonzero(of_kind == i)
            for j in earlier:
                asked.append((question, drawn[j], []))
                question = self.before(",")  # before the other numbers
            asked.append((question, drawn[last], stop))
        depths = np.sort(rng.random(len(lines)))
        return self.assemble(rng, T, lines, asked, depths)

    def count(self, rng, T: int, votes: int = 12, labels: int = 3):
        """Make a document with votes for labels, and ask which label has the most votes.

        One label has one vote more than half of them; the others share the rest.
        """
        whole("labels", labels, 2)
        whole("votes", votes, labels + 1)
        names = self.draw_keys(rng, labels)
        most = votes // 2 + 1
        others = [1 + i % (labels - 1) for i in range(votes - most)]
        vote = self.ids(" A vote for")
        stop = self.ids(".")
        given = rng.permutation([0] * most + others)
        lines = [vote + names[i] + stop for i in given]
        question = self.ids("\nQ:") + self.ids(" Most votes are for")
        asked = question, names[0], stop
        return self.assemble(rng, T, lines, [asked])

    def rule(self, rng, T: int, facts: int = 4, questions: int = 1):
        """Make a document that begins with two rules, and ask for a fact.

        One rule says with which mark an answer begins. The other names a word that must never be
        said: where it would be the answer, the answer is " none". An answer is the mark and the
        word.
        """
        whole("questions", questions, 1, facts)
        none = self.ids(" none")
        words = [key for key in self.draw_keys(rng, 2 * facts + 2) if key != none]
        keys = words[:facts]
        values = words[facts : 2 * facts]
        mark = [*MARKS][rng.integers(2)]
        banned = values[0] if rng.random() < 0.5 else words[2 * facts]
        form = self.ids(f" Answer with a {mark}.")
        ban = self.ids(" Never say") + banned + self.ids(".")
        rules = [form, ban] if rng.random() < 0.5 else [ban, form]

        lines = []
        for key, value in zip(keys, values):
            lines.append(self.fact(key, value, is_number=False))
        depths = [0.0, 0.0, *rng.random(facts)]
        asked = []
        for i in rng.permutation(questions):
            said = none if values[i] == banned else values[i]
            answer = self.ids(MARKS[mark]) + said
            asked.append(self.question(keys[i], answer, is_number=False))
        return self.assemble(rng, T, rules + lines, asked, depths)

    def paraphrase(self, rng, T: int, facts: int = 4, questions: int = 1):
        """Make the needle's document, and ask in other words than the fact's."""
        whole("questions", questions, 1, facts)
        drawn = self.draw_pairs(rng, facts)
        lines = [self.fact(key, value) for key, value in drawn]
        belongs = self.ids("\nQ: Which number belongs to")
        it_is = self.before("? It is")
        asked = []
        for i in rng.permutation(facts)[:questions]:
            key, value = drawn[i]
            asked.append((belongs + key + it_is, value, self.ids(".")))
        return self.assemble(rng, T, lines, asked)
