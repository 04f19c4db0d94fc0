"""KV-cache compression in one file: a decoder, its cache, four ways to make it smaller, and a late question.

    python nano.py             the page below as SnapKV keeps it, then every method's answer
    python nano.py KVzip 55    another method, another budget

A decoder stores an entry, a key and a value, for each token in each head. A method keeps `budget` entries a
head. If the question comes after the compression, most methods have lost the answer.
"""
import argparse
import base64
import json
from pathlib import Path

from safetensors.torch import load_file
import tiktoken
import torch
from torch import Tensor, inf
from torch.nn.functional import linear, max_pool1d, rms_norm, silu

PAGE = """\
In the lighthouse stand four boxes, and on the lid of each something is painted: a star, a table, a
cookie and a building. The keeper wrote their numbers into his diary, where they stand between the
weather and the ships. In January the wind came from the north for nine days, and no boat left the
harbour. The code of star is 6098. He read by the lamp in the evening and mended the nets that the
last storm had torn. When the ice broke, two ships passed within an hour; one of them was carrying
timber, the other coal and letters. The code of table is 2356. In spring the stairs were painted,
which took longer than he had expected, since every step has to dry before the next one can be
reached. The code of cookie is 7623. Visitors came in May and asked how far the light can be seen.
On a clear night it is about twenty miles, and less than one when there is fog, which is why there
is a horn as well. The glass is cleaned each morning with a soft cloth. The code of building is
4490. He wrote little in summer. The nights are short then, and the lamp has to burn for only a few
hours; so he slept, and counted the birds."""
QUESTION, ANSWER = "\nQ: The code of table is ", "2356"

# ---- the decoder: a Llama of 2.8 M parameters, six layers ----
FOLDER = Path(__file__).parent / "nanollm" / "tiny"
config = json.loads((FOLDER / "config.json").read_text())
weights = {name: x.float() for name, x in load_file(FOLDER / "model.safetensors").items()}
L, H, D = (config[name] for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
ranks = {base64.b64decode(a): int(b) for a, b in map(str.split, open(FOLDER / "tokenizer.tiktoken"))}
pattern = r" ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|[0-9]{1,2}|\s+(?!\S)|\s+"
tokenizer = tiktoken.Encoding("nano", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def norm(x: Tensor, name: str) -> Tensor:
    return rms_norm(x, x.shape[-1:], weights[name], config["rms_norm_eps"])


def rotate(x: Tensor, pos: Tensor) -> Tensor:
    """Turn x (heads, T, D) by its positions (RoPE): dimension i pairs with i + D/2."""
    angle = pos[:, None] * config["rope_theta"] ** -(torch.arange(0, D, 2) / D)  # (T, D/2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def forward(tokens: Tensor, caches: list["Cache"], start: int) -> Tensor:
    """Return the next-token logits (T, vocabulary) of tokens (T,) at the positions start, start + 1, …"""
    pos = torch.arange(start, start + len(tokens))
    x = weights["model.embed_tokens.weight"][tokens]  # (T, width)
    for i, cache in enumerate(caches):
        layer = f"model.layers.{i}."
        y = norm(x, layer + "input_layernorm.weight")
        q, k, v = (linear(y, weights[f"{layer}self_attn.{name}_proj.weight"]).unflatten(1, (-1, D))
                   .transpose(0, 1) for name in "qkv")  # q (H·G, T, D), k and v (H, T, D)
        y = cache.attend(rotate(q, pos), rotate(k, pos), v, pos)
        x = x + linear(y.transpose(0, 1).flatten(1), weights[layer + "self_attn.o_proj.weight"])
        y = norm(x, layer + "post_attention_layernorm.weight")
        gate, up = (linear(y, weights[f"{layer}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        x = x + linear(silu(gate) * up, weights[layer + "mlp.down_proj.weight"])
    return linear(norm(x, "model.norm.weight"), weights["model.embed_tokens.weight"])


# ---- the cache of one layer, and four methods ----
def top(score: Tensor, n: int) -> Tensor:
    """Return a mask of the n highest scores in each row of score (..., S). Ties go to the newest."""
    newest_first = score.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :n]
    return torch.zeros_like(score, dtype=torch.bool).scatter(-1, score.shape[-1] - 1 - newest_first, True)


class Cache:
    """Full attention: every entry stays. A method overrides `observe`, `evict` or `compress`."""
    def __init__(self, budget: int):
        self.budget, self.prompt_done = budget, False
        self.k = self.v = torch.zeros(H, 0, D)
        self.pos = torch.zeros(H, 0).long()  # the position of each entry's token
        self.received = torch.zeros(H, 0)    # the attention that each entry received from all queries so far

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """Write the entries of T new tokens; return the attention output (H·G, T, D)."""
        self.k, self.v = torch.cat((self.k, k), 1), torch.cat((self.v, v), 1)
        self.pos = torch.cat((self.pos, pos.expand(H, -1)), 1)
        score = q.unflatten(0, (H, -1)) @ self.k[:, None].mT / D ** 0.5  # (H, G, T, S): G queries share a key
        p = score.masked_fill(self.pos[:, None, None] > pos[:, None], -inf).softmax(-1)  # no later token
        self.received = torch.cat((self.received, torch.zeros(k.shape[:2])), 1) + p.sum((1, 2))
        y = (p @ self.v[:, None]).flatten(0, 1)
        self.observe(p)
        if self.prompt_done:
            self.evict()
        return y

    def observe(self, p: Tensor):
        """A method may look at the attention probabilities p (H, G, T, S) of the new queries."""

    def evict(self):
        """A method throws entries out here: when the prompt ends, and after each later token."""

    @classmethod
    def compress(cls, caches: list["Cache"], prompt: Tensor):
        """The prompt (T,) has ended: evict in all layers."""
        for cache in caches:
            cache.evict()
            cache.prompt_done = True

    def keep(self, kept: Tensor):
        """Keep the entries of a mask (H, S). A head that keeps few gets empty slots: position 10**9."""
        i = (~kept).long().argsort(dim=-1, stable=True)[:, :int(kept.sum(1).max())]  # kept slots first
        self.k, self.v = (x.gather(1, i[..., None].expand(-1, -1, D)) for x in (self.k, self.v))
        self.pos, self.received = self.pos.masked_fill(~kept, 10**9).gather(1, i), self.received.gather(1, i)


class StreamingLLM(Cache):
    """Keep the first four entries and the newest (arXiv 2309.17453)."""
    def evict(self):
        self.keep(top(self.pos.float().masked_fill(self.pos < 4, inf), self.budget))


class H2O(Cache):
    """Keep the newest (half of the budget) and those that received most attention (arXiv 2306.14048)."""
    def evict(self):
        newest = self.pos > self.pos.max() - self.budget // 2
        self.keep(top(self.received.masked_fill(newest, inf), self.budget))


class SnapKV(Cache):
    """Keep the entries that the prompt's last queries attend to, chosen once (arXiv 2404.14469)."""
    WINDOW, POOL = 8, 7  # queries, and the width of the max-pool
    def observe(self, p: Tensor):
        self.window = p[:, :, -self.WINDOW:]  # (H, G, w, S): the attention of the observation window

    def evict(self):
        if not self.prompt_done:
            score = self.window.mean((1, 2))[:, :-self.WINDOW]  # mean over group and window
            score = max_pool1d(score, self.POOL, 1, self.POOL // 2)  # the neighbours of an entry stay, too
            n = self.k.shape[1] - score.shape[1]  # the window's own entries, which stay
            self.keep(torch.cat((top(score, self.budget - n), torch.ones(H, n).bool()), 1))


class KVzip(Cache):
    """Keep the entries that a reread of the prompt attends to, ranked over all layers (arXiv 2505.23416)."""
    def observe(self, p: Tensor):
        self.highest = p.amax((1, 2))  # (H, S)

    @classmethod
    def compress(cls, caches: list["Cache"], prompt: Tensor):
        forward(prompt, caches, len(prompt))  # the reread: the same tokens again, after the prompt
        score = torch.stack([cache.highest[:, :len(prompt)] for cache in caches])  # (L, H, T)
        kept = top(score.flatten(), L * H * caches[0].budget).view_as(score)
        for cache, mask in zip(caches, kept):
            cache.keep(torch.cat((mask, torch.zeros_like(mask)), 1))  # without the reread's entries


# ---- a question, before or after the compression ----
def answer(Method: type[Cache], budget: int, aware: bool) -> tuple[str, list[Tensor]]:
    """Return the answer, and the positions (H, slots) that each layer kept right after the compression."""
    page, question = (torch.tensor(tokenizer.encode(text)) for text in (PAGE, QUESTION))
    tokens, caches = torch.cat((page, question)), [Method(budget) for _ in range(L)]
    n = len(tokens) - 1 if aware else len(page)
    forward(tokens[:n + aware], caches, 0)
    for cache in caches:  # the window saw the last token; now it is forgotten, and comes again below
        cache.keep(cache.pos < n)
    Method.compress(caches, tokens[:n])
    kept = [cache.pos for cache in caches]
    for i in range(n, len(tokens) + 1):  # the rest of the question, then the answer: one token at a time
        logits = forward(tokens[i:i + 1], caches, i)
        if i >= len(page) + len(question) - 1:
            tokens = torch.cat((tokens, logits.argmax(-1)))
    return tokenizer.decode(tokens[-2:].tolist()), kept  # two digits are one token


def shown(kept: list[Tensor]) -> str:
    """Return the page, dimming the tokens that no head keeps."""
    still_kept = set(torch.cat([pos.flatten() for pos in kept]).tolist())
    words = enumerate(tokenizer.decode([token]) for token in tokenizer.encode(PAGE))
    return "".join(word if i in still_kept else f"\033[2m{word}\033[0m" for i, word in words)


if __name__ == "__main__":
    methods = {Method.__name__: Method for Method in (Cache, StreamingLLM, H2O, SnapKV, KVzip)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("method", nargs="?", default="SnapKV", choices=methods)
    parser.add_argument("budget", nargs="?", default=32, type=int, help="entries a head keeps, more than 8")
    name, budget = vars(parser.parse_args()).values()
    if budget <= SnapKV.WINDOW:
        parser.error(f"budget {budget} must be more than SnapKV's observation window, {SnapKV.WINDOW}")
    for aware, when in (True, "is compressed with the page"), (False, "comes after the compression"):
        page = shown(answer(methods[name], budget, aware)[1])
        print(f"The question {when}. {name}, {budget} entries a head; dimmed tokens are gone.\n\n{page}\n")
    print(f"The page says {ANSWER}. With {budget} entries a head:\n\n{'':15}aware   agnostic")
    for name, Method in methods.items():
        print(f"{name:14}", *(f"{answer(Method, budget, aware)[0]:7}" for aware in (True, False)))
