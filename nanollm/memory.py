"""The cache that transformers sees: a LayerCache for each layer of each text, and checks of each call."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import Cache

from nanollm.cache import LayerCache, begin_turn, compress, copied, crop

PAST = "does not go through transformers' attention interface; take another model"


class Memory(Cache):
    """A transformers cache. `texts` has the caches of each text, one per layer.

    make returns new caches for one text. Without it, the given caches hold a whole batch; any
    objects with `attend`, `seen` and `slots` may stand for them.
    """

    def __init__(self, model, caches: list[LayerCache], make: Callable | None = None):
        # those of transformers, which would store keys and values
        super().__init__(layers=[])
        self.model, self.make, self.texts = model, make, [caches]
        self.pads = [0]  # padding on the left of each text
        self.seen = caches[0].seen if caches else 0  # tokens, padding included
        # during a call: `seen` when it ends, and its tokens' ids
        self.expected, self.ids = None, None
        # (B, seen); None if the model was not given ids
        self.tokens = None if self.seen else ()
        model.attach()

    @property
    def caches(self) -> list[LayerCache]:
        """Return the first text's caches, one per layer."""
        return self.texts[0]

    def compress(self, tokens: Tensor):
        """Compress the prompt, tokens (B, T), which the model has read, or the conversation so far.

        First the last token's entry is forgotten, because `generate` goes on by feeding that token
        again; the method has seen its query, and its second reading attends to the compressed
        cache.
        """
        self.check_whole()
        if (self.seen, len(self.texts)) != (tokens.shape[1], len(tokens)):
            raise ValueError(
                f"the memory has seen {self.seen} tokens of {len(self.texts)} texts, but the "
                f"prompt has {tokens.shape[1]} of {len(tokens)}; call the model with "
                "past_key_values=memory first"
            )
        for caches, text, pad in zip(self.texts, tokens.split(1), self.pads):
            crop(caches, tokens.shape[1] - pad - 1)
            compress(self.model, text[:, pad:-1], caches)
        self.seen -= 1
        self.tokens = self.tokens[:, :-1] if torch.is_tensor(self.tokens) else None

    def begin_turn(self):
        """Read on as in a prompt: a conversation's next turn, after which `compress` is called again."""
        for caches in self.texts:
            begin_turn(caches)

    def parts(self, T: int) -> Iterator[tuple[slice, list[LayerCache], int]]:
        """Yield rows of the batch, their caches, and how many of their T new tokens are padding."""
        for i, (caches, pad) in enumerate(zip(self.texts, self.pads)):
            rows = slice(i, i + 1) if self.make else slice(None)
            yield rows, caches, min(max(pad - self.expected + T, 0), T)

    # ---- checks: of a call before the first layer and after the last, and of `generate` ----

    def begin(self, decoder: nn.Module, call: dict):
        """Check a call before the first layer runs: ValueError if the bridge cannot serve it."""
        if decoder is not self.model.decoder:
            raise ValueError(
                "this memory belongs to another model; make one by attach(model, …)"
            )
        if decoder.training:
            raise ValueError(
                "the model is being trained, with dropout or checkpoints; call model.eval()"
            )
        if call.get("output_attentions") or decoder.config.output_attentions:
            raise ValueError(
                "a memory returns no attention weights; leave output_attentions out"
            )
        self.check_whole()
        ids, seen, n = call.get("input_ids"), self.seen, len(self.texts)
        new = call.get("inputs_embeds") if ids is None else ids
        if new is None or not new.shape[1]:
            raise ValueError(
                f"the call has no tokens beyond the {seen} that the memory has seen; give some"
            )
        B, end = len(new), seen + new.shape[1]
        if self.model.positions and end > (longest := self.model.config.max_len):
            raise ValueError(
                f"{end} tokens exceed the model's {longest} positions; shorten the text"
            )
        for layer, window in enumerate(self.model.windows):
            if window is not None and end > window:
                raise ValueError(
                    f"layer {layer} attends to the last {window} tokens alone, and the text has "
                    f"{end}; shorten the text, or take another model"
                )
        if seen and self.make and B % n:
            raise ValueError(
                f"{B} texts do not fit a memory that has read {n}; make a new one for a batch"
            )
        pads = self.pads_of(call.get("attention_mask"), B, seen, end)
        if self.make and not seen:
            self.texts = self.texts[:B] + [self.make() for _ in range(B - n)]
        elif self.make and B > n:  # several texts go on from one
            self.batch_repeat_interleave(B // n)
        self.pads, self.expected, self.ids = pads, end, ids

    def pads_of(self, mask: Tensor | None, B: int, seen: int, end: int) -> list[int]:
        """Return each text's padding. ValueError if an attention_mask (B, T) hides more than that."""
        n = B // len(self.pads) if seen and self.make else 0
        pads = [pad for pad in self.pads for _ in range(n)] or [0] * B
        if isinstance(mask, Tensor) and mask.dim() == 2:
            hidden = mask[:, :end] == 0
            given, place = (
                hidden.sum(1),
                torch.arange(hidden.shape[1], device=mask.device),
            )
            padded = mask.shape[1] >= end and torch.equal(
                hidden, place < given[:, None]
            )
            if not padded or seen and given.clamp(max=seen).tolist() != pads:
                raise ValueError(
                    f"attention_mask must show all {end} tokens, those in the memory included, "
                    "but for padding on the left, the same in each call; set "
                    'tokenizer.padding_side = "left"'
                )
            pads = given.tolist()
        return pads if self.make else [0]

    def check_prompt(self, ids: Tensor | None):
        """Raise ValueError, before `generate`, if this memory has not read and compressed its prompt."""
        seen, first = self.seen, self.texts[0][0]
        if type(first) is not LayerCache and not first.prompt_done:
            raise ValueError(
                "generate begins to decode, but the prompt has not been compressed; call first "
                "model(prompt, past_key_values=memory), then memory.compress(prompt)"
            )
        if ids is None or not seen:
            return
        if ids.shape[1] <= seen:
            raise ValueError(
                f"the prompt has {ids.shape[1]} tokens, and the memory has seen {seen}; give "
                "the whole text, with a token that the memory has not seen"
            )
        # a memory may hold each text several times
        if self.tokens is not None and not self.tokens.equal(
            ids[:, :seen].repeat_interleave(max(len(self.tokens) // len(ids), 1), 0)
        ):
            raise ValueError(
                "this memory has read another text than the prompt; make a new one by "
                "attach(model, …)"
            )

    def end(self):
        """Check after the last layer: ValueError unless every layer has read the new tokens once."""
        for caches, pad in zip(self.texts, self.pads):
            for layer, cache in enumerate(caches):
                if cache.seen != max(self.expected - pad, 0):
                    raise ValueError(f"layer {layer} {PAST}")
        known = self.ids is not None and self.tokens is not None
        self.tokens = (
            torch.cat((*[self.tokens][: self.seen], self.ids), 1) if known else None
        )
        self.seen, self.expected = self.expected, None

    def check_whole(self):
        """Raise ValueError if an earlier call stopped after only some layers had read its tokens."""
        if any(len({cache.seen for cache in caches}) > 1 for caches in self.texts):
            raise ValueError(
                "an earlier call stopped after only some layers had read its tokens; "
                "make another memory by attach(model, …) and feed the prompt again"
            )

    # ---- what transformers asks of a cache ----

    def update(self, k: Tensor, v: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        """Return k and v as they are. The attention function, which is called next, stores them."""
        if not self.expected or not self.model.attached:
            raise ValueError(
                "the model was detached, or never attached; "
                "call attach(model, …) before using a memory"
            )
        return k, v

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_mask_sizes(self, new, layer_idx: int) -> tuple[int, int]:
        """Return (length, offset) of a mask of the new tokens; new: their number, or their positions."""
        return len(new) if isinstance(new, Tensor) else new, self.seen

    def __len__(self) -> int:
        return len(self.texts[0])

    def __deepcopy__(self, _) -> "Memory":
        """Return an independent copy. Both refer to the same model."""
        memory = Memory(self.model, [], self.make)
        vars(memory).update(vars(self), texts=[*map(copied, self.texts)])
        return memory

    def batch_select_indices(self, indices: Tensor):
        """Keep the texts of these indices, in this order; a text may be taken more than once."""
        rows = indices.tolist()
        self.texts = [
            copied(self.texts[j]) if j in rows[:i] else self.texts[j]
            for i, j in enumerate(rows)
        ]
        self.pads = [self.pads[j] for j in rows]
        self.tokens = (
            self.tokens[indices] if torch.is_tensor(self.tokens) else self.tokens
        )

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int):
        self.batch_select_indices(
            torch.arange(len(self.texts)).repeat_interleave(repeats)
        )

    def refuse(self, *_):
        raise ValueError(
            "a memory cannot take tokens back; use greedy decoding, beams or sampling"
        )

    crop = activate_past_recording = reset = refuse
