"""A benchmark of any size: documents and texts are read a few at a time, once for all methods or for each.

A recording is what the decoder tells its caches: queries, keys and values of every layer. If the recordings
of all documents fit, each is made once. If not, each is made again for every row and forgotten.
"""
from nanollm.measure.evaluate import TASKS, Benchmark, Make, check_size, summary
from nanollm.measure.tasks import Batch


class Slices:
    """Benchmarks of at most `batch` documents of one task, or texts; recordings of at most `keep` bytes stay.

    Rows are those of one Benchmark of all documents, but for the last digits.
    """

    def __init__(self, model, tasks, T: int, documents: int, seed: int, batch: int, keep: float):
        check_size(model, documents, 2, T)
        self.pieces = [({task: part}, None) for task, knobs in TASKS.items()
                       for whole in tasks.batches(task, seed, documents, T, **knobs)
                       for part in cut(whole, batch)]
        text = Benchmark.text(model, tasks, T, documents)
        self.pieces += [({}, part) for part in text.split(batch)]
        self.recorded = {}  # by number of the piece, if they stay

        c, tokens = model.config, T * (documents * len(TASKS) + len(text))
        numbers = c.n_layers * (c.n_heads + 2 * c.n_kv_heads) * c.head_dim
        self.bytes = tokens * numbers * model.embed.weight.element_size()
        self.keeps = self.bytes <= keep

    def run(self, model, make: Make) -> dict:
        """A row of `evaluate.summary`."""
        return summary([self.benchmark(model, i).measured(model, make) for i in range(len(self.pieces))])

    def benchmark(self, model, i: int) -> Benchmark:
        if i in self.recorded:
            return self.recorded[i]
        made = Benchmark.read(model, *self.pieces[i])
        if self.keeps:
            self.recorded[i] = made
        return made

    def __str__(self):
        size = f"recordings of all prompts take {self.bytes / 1e9:.2g} GB"
        return size if self.keeps else f"{size}, more than may stay; so prompts are read again for each row"


def cut(batch: Batch, n: int) -> list[Batch]:
    """The same documents, n at a time."""
    rows = range(0, len(batch.tokens), n)
    return [Batch(batch.tokens[i:i + n], batch.roles[i:i + n], batch.question, batch.answers) for i in rows]
