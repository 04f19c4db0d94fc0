"""The two processes of a record: one reads a text into a file, another answers from this file.

Each of them waits for jobs, and forks for each job a process that sees nothing of earlier jobs. That process
locks itself in: it reads the libraries and this repository, and writes nothing. Only bytes leave it. So what
the answering process knows of a text is the file's bytes, and what the reading process knows of the questions
is nothing.
"""
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
import os
from pathlib import Path
import sys
from types import ModuleType
import zlib

import numpy as np
import torch

from course.sandbox import LIMITS, lock_in
from nanollm import saved
from nanollm.cache import make_cache
from nanollm.commands.registry import calibrated, given, load, pick
from nanollm.generate import end_prompt, prefill, tell_chunk_ends
from nanollm.measure.evaluate import budget_for
from nanollm.tokenizer import boundaries

ROOT = Path(__file__).parents[2]
FAILED, FOREIGN = b"error: ", "submission"
TOKENS = 512  # of a document: the text, the questions and the answers
LIMITS_HERE = dict(memory=4 * 2 ** 30, seconds=60, files=64)  # of one text


class Entrant:
    """A method with its keep ratio, on one decoder.

    name: a method of this repository, or None for code from elsewhere, which comes with each job and is run
    only inside the locked process.
    """

    def __init__(self, folder: Path, name: str | None, keep: float | None):
        self.model, self.encoding = load(folder, "cpu")
        self.keep, self.learned = keep, {}
        if name:
            self.Method = pick([name])[name]
            self.module = sys.modules[getattr(self.Method, "func", self.Method).__module__]
            self.learned = calibrated(self.Method, self.model, self.encoding)
            self.caches(TOKENS)  # a method computes its tables, such as a codebook, before the first text

    def prepare(self, code: bytes):
        """Lock this process in, then run the code from elsewhere, if there is any."""
        LIMITS.update(LIMITS_HERE)
        lock_in(str(ROOT))
        if code:
            self.module = sys.modules[FOREIGN] = ModuleType(FOREIGN)
            exec(compile(code, FOREIGN, "exec"), self.module.__dict__)
            (self.Method,) = self.module.variants.values()

    def caches(self, tokens: int) -> list:
        """Return fresh caches for a text of so many tokens."""
        budget = {} if self.keep is None else dict(budget=budget_for(self.keep, tokens))
        options = given(self.Method, window_size=8, **budget) | self.learned
        return make_cache(self.model, self.Method, **options)

    def read(self, text: torch.Tensor) -> bytes:
        """Read a text (1, S), and return its compressed cache as bytes."""
        caches = self.caches(text.shape[1])
        tell_chunk_ends(caches, boundaries(self.encoding, self.model.config.vocab_size)[text])
        prefill(self.model, text, caches)
        end_prompt(self.model, text, caches)
        own = getattr(self.module, "to_bytes", None)
        return own(caches) if own else zlib.compress(saved.to_bytes(caches, half=True), 9)


class Counted:
    """Counts the tokens that go through each part of a decoder."""

    def __init__(self, model):
        self.tokens = {}
        for part in (model.embed, *(m for block in model.blocks for m in block.modules()
                                    if isinstance(m, torch.nn.Linear))):
            part.register_forward_hook(self.count)

    def count(self, part, args, out):
        self.tokens[part] = self.tokens.get(part, 0) + out.shape[:-1].numel()

    def most(self) -> int:
        return max(self.tokens.values(), default=0)


# ---- jobs as bytes: no pickle ever comes from a locked process ---

def numbers(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


def as_bytes(numbers) -> bytes:
    return np.asarray(numbers, "<i4").tobytes()


def serve(pipe: Connection, reads: bool, *entrant):
    """Do jobs until the pipe closes: read texts, or answer questions.

    A job is a list of byte strings. Each message of the locked process is passed on; an empty one ends the
    job.
    """
    torch.set_num_threads(1)
    entrant = Entrant(*entrant)
    pipe.send_bytes(b"")  # ready
    while True:
        try:
            code, *job = pipe.recv()
        except EOFError:
            return
        hear, tell = Pipe(duplex=False)
        child = os.fork()
        if child == 0:
            pipe.close()
            hear.close()
            try:
                entrant.prepare(code)
                read_one(entrant, tell, *job) if reads else answer_one(entrant, tell, *job)
            except BaseException as error:
                tell.send_bytes(FAILED + f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(0)
        tell.close()
        with hear, suppress(EOFError):
            while True:
                pipe.send_bytes(hear.recv_bytes())
        os.waitpid(child, 0)
        pipe.send_bytes(b"")


def read_one(entrant: Entrant, tell: Connection, text: bytes):
    """Send how often the text was read, in 4 bytes, and the file."""
    fed, tokens = Counted(entrant.model), torch.tensor([numbers(text)])
    file = entrant.read(tokens)
    tell.send_bytes(b"+" + as_bytes([-(-fed.most() // tokens.shape[1])]) + file)


@torch.no_grad()
def answer_one(entrant: Entrant, tell: Connection, sizes: bytes, questions: bytes, file: bytes):
    """Ask the questions of a text, one after another, and send each token of an answer.

    sizes: the text's tokens, then for each question its length and that of its answer. Raises ValueError if
    the decoder is fed more than questions and answers.
    """
    tokens, *lengths = numbers(sizes)
    rest, model = torch.tensor([numbers(questions)]), entrant.model
    fed, caches = Counted(model), entrant.caches(tokens)
    own = getattr(entrant.module, "from_bytes", None)
    if own:
        own(file, caches)
    else:
        saved.from_bytes(zlib.decompress(file), caches)
    for n, answer in zip(lengths[::2], lengths[1::2]):
        logits, rest = model(rest[:, :n], caches), rest[:, n:]
        for _ in range(answer):
            said = logits[:, -1].argmax(-1)
            tell.send_bytes(b"+" + as_bytes([int(said)]))
            logits = model(said[:, None], caches)
    if fed.most() != sum(lengths):
        raise ValueError(f"the decoder was fed {fed.most()} tokens, but questions and answers have "
                         f"{sum(lengths)}")
