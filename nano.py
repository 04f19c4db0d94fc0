"""KV-cache compression in one file: a decoder, its cache, and four ways to make it smaller.

    python nano.py             the page as SnapKV keeps it, then every method's answer
    python nano.py KVzip 55    another method, another budget

A decoder stores an entry, a key and a value, for each token in each head. Four methods here evict
entries. If they do so before the question comes, the answer is often lost.
"""

from argparse import ArgumentParser, RawTextHelpFormatter
from base64 import b64decode
from dataclasses import dataclass
import os
from pathlib import Path
import sys

from safetensors.torch import load_file
import tiktoken
import torch
from torch import inf
from torch.nn.functional import linear, max_pool1d, pad, rms_norm, silu
from torch.nn.utils.rnn import pad_sequence

FOLDER = Path(__file__).parent / "nanollm"
PAGE = (FOLDER / "page.txt").read_text()  # four facts among other sentences
QUESTION = "\nQ: The code of table is "
ANSWER = "2356"

# ---- the decoder: a Llama of 2.8 M parameters ----
L = 6  # layers
H = 3  # key/value heads; G = 2 query heads share each of them
D = 32  # dimensions of a head
WIDTH = 192  # dimensions of a token between the layers
weights = load_file(FOLDER / "tiny/model.safetensors")
weights = {name: x.float() for name, x in weights.items()}  # stored in 16 bits

# the tokenizer: each line of its file is a token, in base64, and the token's number
ranks = {}
for line in open(FOLDER / "tiny/tokenizer.tiktoken"):
    token, number = line.split()
    ranks[b64decode(token)] = int(number)
tokenizer = tiktoken.Encoding(
    "nano",
    pat_str=r" ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|[0-9]{1,2}|\s+(?!\S)|\s+",
    mergeable_ranks=ranks,
    special_tokens={},
)


def norm(x, name):
    return rms_norm(x, (WIDTH,), weights[f"{name}.weight"], 1e-5)


def project(x, name):
    return linear(x, weights[f"{name}.weight"])


def split_heads(x):
    return x.unflatten(1, (-1, D)).transpose(0, 1)  # (T, heads·D) → (heads, T, D)


def rotate(x, pos):
    """Rotate x (heads, T, D) by the tokens' positions (T,): rotary embeddings (RoPE)."""
    angle = pos[:, None] / 500_000 ** (torch.arange(0, D, 2) / D)  # (T, D/2)
    cos = angle.cos()
    sin = angle.sin()
    a, b = x.chunk(2, -1)  # dimensions i and i + D/2 turn together
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def forward(tokens, caches, start):
    """Read tokens (T,) from position `start` on, and return the most likely next token (1,)."""
    pos = torch.arange(start, start + len(tokens))
    x = weights["model.embed_tokens.weight"][tokens]  # (T, WIDTH)
    for i, cache in enumerate(caches):
        layer = f"model.layers.{i}"
        # attention: each layer stores k and v in its own cache
        y = norm(x, f"{layer}.input_layernorm")
        q = split_heads(project(y, f"{layer}.self_attn.q_proj"))  # (H·G, T, D)
        k = split_heads(project(y, f"{layer}.self_attn.k_proj"))  # (H, T, D)
        v = split_heads(project(y, f"{layer}.self_attn.v_proj"))  # (H, T, D)
        y = cache.attend(rotate(q, pos), rotate(k, pos), v, pos)
        x = x + project(y, f"{layer}.self_attn.o_proj")

        # feed-forward network
        y = norm(x, f"{layer}.post_attention_layernorm")
        gate = silu(project(y, f"{layer}.mlp.gate_proj"))
        up = project(y, f"{layer}.mlp.up_proj")
        x = x + project(gate * up, f"{layer}.mlp.down_proj")

    x = norm(x[-1:], "model.norm")
    logits = project(x, "model.embed_tokens")  # the embedding is the output matrix, too
    return logits.argmax(-1)


# ---- the cache: where the entries of one layer are kept ----
class Cache:
    """S slots in each of H heads. A slot holds one entry or is empty."""

    def __init__(self, method):
        self.method = method  # decides which entries stay; all layers share it
        self.prompt_done = False  # True after the compression
        self.k = self.v = torch.zeros(H, 0, D)
        self.pos = torch.zeros(H, 0).long()  # the position of each entry's token
        self.score = torch.zeros(H, 0)  # a number for each entry, set by the method

    def attend(self, q, k, v, pos):
        """Store T new tokens, and return the attention output (T, H·G·D)."""
        # write: append the new entries
        self.k = torch.cat((self.k, k), 1)
        self.v = torch.cat((self.v, v), 1)
        self.pos = torch.cat((self.pos, pos.expand(H, -1)), 1)
        self.score = pad(self.score, (0, len(pos)))  # 0 for the new entries

        # attend: a query does not see later positions
        q = q.unflatten(0, (H, -1)) / D**0.5  # (H, G, T, D)
        logits = q @ self.k[:, None].mT  # (H, G, T, S)
        later = self.pos[:, None, None] > pos[:, None]  # (H, 1, T, S)
        p = logits.masked_fill_(later, -inf).softmax(-1)
        y = p @ self.v[:, None]  # (H, G, T, D)

        # observe: the method sees which entries the new queries attend to
        self.method.observe(self, p)

        # evict: not while the prompt is read, but after each later token
        if self.prompt_done:
            self.method.evict(self)
        return y.permute(2, 0, 1, 3).flatten(1)

    def keep(self, mask):
        """Keep the entries in mask (H, S). Heads that keep fewer get empty slots at the end."""

        def kept(x, empty=0):
            rows = [row[chosen] for row, chosen in zip(x, mask)]
            return pad_sequence(rows, batch_first=True, padding_value=empty)

        self.k = kept(self.k)
        self.v = kept(self.v)
        self.score = kept(self.score)
        self.pos = kept(self.pos, 10**9)  # later than every query, so never seen


# ---- the methods: which entries stay ----
@dataclass
class Method:
    """Full attention: every entry stays. A method overrides what it needs."""

    budget: int  # entries that a head may keep; with KVzip, on average

    def observe(self, cache, p):
        """Look at the attention probabilities p (H, G, T, S) of T new queries."""

    def compress(self, caches, prompt):
        """Evict in all layers, which have just read the prompt (T,)."""
        for cache in caches:
            self.evict(cache)

    def evict(self, cache):
        """Evict in one layer: at the end of the prompt, and after each later token."""


def top(score, n):
    """Return a mask of the n highest scores in each row of score (..., S)."""
    # newest first, because a stable sort keeps equal scores in this order
    order = score.flip(-1).argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(-1)  # 0 for the highest score
    return (rank < n).flip(-1)


class StreamingLLM(Method):
    """Keep the first four entries and the newest (arXiv 2309.17453)."""

    def evict(self, cache):
        score = cache.pos.float().masked_fill(cache.pos < 4, inf)
        cache.keep(top(score, self.budget))


class H2O(Method):
    """Keep the newest entries, and those that received most attention (arXiv 2306.14048)."""

    def observe(self, cache, p):
        cache.score += p.sum((1, 2))  # the attention of all queries so far

    def evict(self, cache):
        newest = cache.pos > cache.pos.max() - self.budget // 2  # half of the budget
        score = cache.score.masked_fill(newest, inf)
        cache.keep(top(score, self.budget))


class SnapKV(Method):
    """Keep the entries that the prompt's last 8 queries attend to (arXiv 2404.14469)."""

    def observe(self, cache, p):
        # the mean attention of the last 8 queries to each entry before them
        score = p[:, :, -8:, :-8].mean((1, 2))
        # the maximum over 7 neighbours, so that the text around a high score stays
        score = max_pool1d(score, 7, stride=1, padding=3)
        cache.score = pad(score, (0, 8), value=inf)  # the last 8 entries always stay

    def compress(self, caches, prompt):
        for cache in caches:  # only now: `evict` does nothing after later tokens
            cache.keep(top(cache.score, self.budget))


class KVzip(Method):
    """Keep the entries that a reread of the prompt attends to (arXiv 2505.23416)."""

    def observe(self, cache, p):
        cache.score = p.amax((1, 2))

    def compress(self, caches, prompt):
        # the reread: the same tokens again, after the prompt; `observe` sets the scores
        forward(prompt, caches, len(prompt))
        for cache in caches:
            cache.keep(cache.pos < len(prompt))  # drop the reread's entries

        # all heads of all layers compete; on average a head keeps `budget` entries
        score = torch.stack([cache.score for cache in caches])  # (L, H, S)
        masks = top(score.flatten(), L * H * self.budget).view_as(score)
        for cache, mask in zip(caches, masks):
            cache.keep(mask)


# ---- a question: known before the compression (aware), or asked after it (agnostic) ----
def answer(method, aware):
    """Return the answer, and the positions (H, S) that each layer kept."""
    page = tokenizer.encode(PAGE)
    tokens = torch.tensor(page + tokenizer.encode(QUESTION))

    # Compress the first n tokens. The question's last token comes later: the answer follows it.
    n = len(tokens) - 1 if aware else len(page)

    # An aware method observes the last token, too. Then its entry is dropped.
    caches = [Cache(method) for _ in range(L)]
    forward(tokens if aware else tokens[:n], caches, 0)
    for cache in caches:
        cache.keep(cache.pos < n)

    method.compress(caches, tokens[:n])
    kept = [cache.pos for cache in caches]
    for cache in caches:
        cache.prompt_done = True

    # Read the rest of the question token by token, then write two more tokens.
    for i in range(n, len(tokens)):
        first = forward(tokens[i : i + 1], caches, i)
    second = forward(first, caches, len(tokens))
    return tokenizer.decode([int(first), int(second)]), kept


def marked(kept, dim):
    """Return the page. Tokens that no head keeps are dimmed or, without `dim`, in [brackets]."""
    positions = torch.cat([pos.flatten() for pos in kept]).tolist()
    text = ""
    for i, token in enumerate(tokenizer.encode(PAGE)):
        word = tokenizer.decode([token])
        text += word if i in positions else f"[{word}]"
    text = text.replace("][", "")  # one pair of brackets around neighbours
    if dim:
        text = text.replace("[", "\033[2m").replace("]", "\033[0m")
    return text


if __name__ == "__main__":
    methods = {
        "Cache": Method,  # the full cache
        "StreamingLLM": StreamingLLM,
        "H2O": H2O,
        "SnapKV": SnapKV,
        "KVzip": KVzip,
    }
    parser = ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("method", nargs="?", default="SnapKV", choices=methods)
    parser.add_argument(
        "budget", nargs="?", default=32, type=int, help="entries per head, at least 9"
    )
    args = parser.parse_args()
    budget = args.budget
    if budget <= 8:
        parser.error(f"budget {budget} must be above SnapKV's observation window, 8")

    torch.set_num_threads(1)  # the tensors are too small to share among threads
    results = {}
    for name, kind in methods.items():
        for aware in (True, False):
            results[name, aware] = answer(kind(budget), aware)

    dim = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    gone = "dimmed tokens are gone" if dim else "tokens in [brackets] are gone"
    for aware in (True, False):
        when = "is compressed with the page" if aware else "comes after the compression"
        print(f"The question {when}. {args.method}, {budget} entries a head; {gone}.\n")
        digits, kept = results[args.method, aware]
        print(marked(kept, dim))
        print()

    print(f"The page says {ANSWER}. With {budget} entries a head:\n")
    print(f"{'':15}aware   agnostic")
    for name in methods:
        print(f"{name:14} {results[name, True][0]:7} {results[name, False][0]:7}")
