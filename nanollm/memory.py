"""The cache that transformers sees: the caches of each text, and checks of each call."""

from collections.abc import Callable, Iterator
from copy import copy

import torch
from torch import Tensor, nn
from transformers import Cache

from nanollm.cache import Method, Slots, begin_turn, compress, copied, crop
from nanollm.check import check_tokens
from nanollm.sliding import SlidingSlots, full_layers

DRAFT = 128  # tokens out of sight that layers that slide keep for drafts
PAST = "does not go through transformers' attention interface; take another model"


def new_positions(seen: int, end: int, pads: list[int], device: torch.device) -> Tensor:
    """Return the positions (B, end − seen) of new tokens: each text counts without its padding.

    Padding has positions below 0.
    """
    places = torch.arange(seen, end, device=device)
    return places - torch.tensor(pads, device=device)[:, None]


class Memory(Cache):
    """A transformers cache. `texts` has the caches of each text, one per layer.

    make returns new caches for one text. Without it, the given caches hold a whole batch; any
    objects with `attend`, `seen` and `slots` may stand for them.
    """

    _is_user_defined = False  # `generate` of transformers sets it

    def __init__(self, model, caches: list[Slots], make: Callable | None = None):
        # no layers of transformers, which would store keys and values
        super().__init__(layers=[])
        self.model = model
        self.make = make
        self.texts = [caches]
        self.pads = [0]  # padding on the left of each text
        self.seen = caches[0].seen if caches else 0  # tokens, padding included
        self.expected = None  # during a call: `seen` when it ends
        self.ids = None  # during a call: its tokens' ids
        # ids (B, seen); after `compress` also the forgotten token, which must come again. None if
        # they are not known; () before the first call
        self.tokens = None if self.seen else ()
        self.shift = None  # how far the model's positions are ahead of ours
        model.attach()

    @property
    def caches(self) -> list[Slots]:
        """Return the first text's caches, one per layer."""
        return self.texts[0]

    def compress(self, tokens: Tensor):
        """Compress the prompt, or the conversation so far: tokens (B, T) that the model has read.

        First the last token's entry is forgotten, because `generate` goes on by feeding that token
        again; the method has seen its query, and its second reading attends to the compressed
        cache.
        """
        self.check_whole()
        check_tokens(tokens, "the prompt's tokens")
        B, T = tokens.shape
        if self.caches[0].prompt_done:
            raise ValueError(
                "this memory is compressed already; call begin_turn and read the next turn"
            )
        if self.seen != T or len(self.texts) != B:
            raise ValueError(
                f"the memory has seen {self.seen} tokens of {len(self.texts)} texts, but the "
                f"prompt has {T} of {B}; call the model with past_key_values=memory first"
            )
        model = self.model
        if self.tokens is None:
            model = copy(model)
            model.reads_again = False
        elif not tokens.equal(self.tokens):
            raise ValueError(
                "the memory has read another text than these tokens; give the ids that it has read"
            )
        for caches, text, pad in zip(self.texts, tokens.split(1), self.pads):
            compress(model, text[:, pad:], caches, again=True)
        self.seen -= 1

    def begin_turn(self):
        """Begin a conversation's next turn; call `compress` again when the model has read it."""
        for caches in self.texts:
            begin_turn(caches)

    def parts(self, T: int) -> Iterator[tuple[slice, list[Slots], int]]:
        """Yield rows of the batch, their caches, and how many of their T new tokens are padding."""
        for i, (caches, pad) in enumerate(zip(self.texts, self.pads)):
            rows = slice(i, i + 1) if self.make else slice(None)
            padding = min(max(pad - self.seen, 0), T)
            yield rows, caches, padding

    # ---- checks: of a call before the first layer and after the last, and of `generate` ----

    def begin(self, decoder: nn.Module, call: dict):
        """Check a call before the first layer runs.

        Raise ValueError, and change nothing, if a check fails.
        """
        if decoder is not self.model.decoder:
            raise ValueError(
                "this memory belongs to another model; make one by attach(model, …)"
            )
        if decoder.training:
            raise ValueError(
                "the model is being trained, with dropout or checkpoints; call model.eval()"
            )
        if call.get("use_cache") is False:
            raise ValueError(
                "use_cache=False feeds the whole text anew at every step; set it to True"
            )
        if call.get("output_attentions") or decoder.config.output_attentions:
            raise ValueError(
                "a memory returns no attention weights; leave output_attentions out"
            )
        self.check_whole()
        ids = call.get("input_ids")
        new = call.get("inputs_embeds") if ids is None else ids
        if new is None or not new.shape[1]:
            raise ValueError(
                f"the call has no tokens beyond the {self.seen} that the memory has seen; "
                "give some"
            )
        B, T = new.shape[:2]
        end = self.seen + T
        longest = self.model.config.max_len
        if self.model.positions and end > longest:
            raise ValueError(
                f"{end} tokens exceed the model's {longest} positions; shorten the text"
            )
        # if the first layer slides but has no SlidingSlots, so it is in all layers
        window = self.model.windows[0]
        slides = getattr(self.caches[0], "sliding", None) == window
        if window and end > window.size and not slides:
            raise ValueError(
                f"all layers attend to the last {window.size} tokens alone, and the text has "
                f"{end}; shorten the text, take another model, or full attention"
            )
        n = len(self.texts)
        if self.seen and self.make and B % n:
            raise ValueError(
                f"{B} texts do not fit a memory that has read {n}; make a new one for a batch"
            )
        self.check_last(ids, B)
        mask = call.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 4:
            past = mask[..., :-T]
            shown = past if past.dtype == torch.bool else past == 0
            if not shown.all():
                raise ValueError(
                    "the mask hides tokens that the memory has read; leave it out"
                )
        pads = self.pads_of(mask, B, end)
        shift = self.shift_of(call.get("position_ids"), pads, end)
        if self.make and not self.seen:
            self.texts = self.texts[:B] + [self.make() for _ in range(B - n)]
        elif self.make and B > n:  # several texts go on from one
            self.batch_repeat_interleave(B // n)
        self.pads = pads
        self.shift = shift
        self.expected = end
        self.ids = ids

    def check_last(self, ids: Tensor | None, B: int):
        """Raise ValueError unless ids (B, T) begin with the token that `compress` has forgotten."""
        if ids is None or not self.make or not torch.is_tensor(self.tokens):
            return
        again = self.tokens[:, self.seen :]
        again = again.repeat_interleave(B // len(again), 0)
        if not again.equal(ids[:, : again.shape[1]]):
            raise ValueError(
                "a compressed memory has forgotten the prompt's last token, "
                f"{again[0].tolist()}; feed it again first, as `generate` does"
            )

    def shift_of(self, given: Tensor | None, pads: list[int], end: int) -> int | None:
        """Return how far position_ids (B or 1, T) are ahead of ours, None if not yet known.

        A few models count from 1. Raise ValueError unless it is the same everywhere and always.
        """
        if given is None and not self.seen:
            return 0
        if given is None or given.dim() != 2:
            return self.shift  # images have positions in three dimensions
        own = new_positions(self.seen, end, pads, given.device)
        own, given = torch.broadcast_tensors(own, given)
        ahead = (given - own)[own >= 0]
        known = [self.shift] if self.shift is not None else ahead[:1].tolist()
        if any((ahead != shift).any() for shift in known):
            raise ValueError(
                f"position_ids must go on from the {self.seen} tokens that the memory has seen, "
                "without padding; leave them out"
            )
        return known[0] if known else None

    def pads_of(self, mask: Tensor | None, B: int, end: int) -> list[int]:
        """Return the padding of each of B texts; end: the tokens seen after the call.

        Raise ValueError if an attention_mask (B, at least `end`) hides more than padding.
        """
        if self.make and self.seen:
            pads = [pad for pad in self.pads for _ in range(B // len(self.pads))]
        else:
            pads = [0] * B
        if isinstance(mask, Tensor) and mask.dim() == 2:
            hidden = mask[:, :end] == 0
            given = hidden.sum(1)
            place = torch.arange(hidden.shape[1], device=mask.device)
            on_the_left = torch.equal(hidden, place < given[:, None])
            as_before = not self.seen or given.clamp(max=self.seen).tolist() == pads
            covers = len(mask) == B and mask.shape[1] >= end
            if not covers or not on_the_left or not as_before:
                raise ValueError(
                    f"attention_mask must show all {end} tokens, those in the memory included, "
                    "but for padding on the left, the same in each call; set "
                    'tokenizer.padding_side = "left"'
                )
            pads = given.tolist()
        if self.make:
            return pads
        if any(pads):
            raise ValueError(
                "these caches hold a batch without padding; use attach(model, …) for one with it"
            )
        return [0]

    def check_prompt(self, ids: Tensor | None):
        """Raise ValueError unless `generate` may go on from this memory with the prompt ids.

        It must be compressed (but for full attention), and the prompt begin with what it has read.
        """
        seen = self.seen
        first = full_layers(self.caches)[0]
        if type(first.method) is not Method and not first.prompt_done:
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
        if self.tokens is None:
            return
        # a memory may hold each text several times, or one text that several prompts go on from
        read = self.tokens
        ids = ids[:, : read.shape[1]]
        more = max(len(ids) // len(read), 1)
        fewer = max(len(read) // len(ids), 1)
        read = read.repeat_interleave(more, 0)
        if not read.equal(ids.repeat_interleave(fewer, 0)):
            raise ValueError(
                "this memory has read another text than the prompt; make a new one by "
                "attach(model, …)"
            )

    def end(self):
        """Check a call after the last layer, and count its tokens as seen.

        Raise ValueError unless every layer has read the new tokens once.
        """
        for caches, pad in zip(self.texts, self.pads):
            for layer, cache in enumerate(caches):
                if cache.seen != max(self.expected - pad, 0):
                    raise ValueError(f"layer {layer} {PAST}")
        if self.ids is None or self.tokens is None:
            self.tokens = None
        elif self.seen:
            self.tokens = torch.cat((self.tokens[:, : self.seen], self.ids), 1)
        else:
            self.tokens = self.ids.clone()  # the caller may change its own
        self.seen = self.expected
        self.expected = None

    def check_whole(self):
        """Raise ValueError if an earlier call was broken off after a layer had read its tokens."""
        for caches, pad in zip(self.texts, self.pads):
            if {cache.seen for cache in caches} != {max(self.seen - pad, 0)}:
                raise ValueError(
                    "an earlier call stopped after some layers had read its tokens; "
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
        """Return (length, offset) of a mask of the new tokens.

        new is their number, or a tensor of their positions.
        """
        length = len(new) if isinstance(new, Tensor) else new
        return length, self.seen

    @property
    def is_linear(self) -> list[bool]:
        """Return False for each layer: none has linear attention.

        From 5.24 on, `generate` asks `all(cache.is_linear)`. If that is true, it feeds the whole
        prompt again. It would be true of this cache's empty list of `layers`.
        """
        return [False] * len(self)

    def __len__(self) -> int:
        return len(self.texts[0])

    def __deepcopy__(self, _) -> "Memory":
        """Return an independent copy. Both refer to the same model."""
        memory = Memory(self.model, [], self.make)
        vars(memory).update(vars(self))
        memory.texts = [copied(caches) for caches in self.texts]
        return memory

    def batch_select_indices(self, indices: Tensor):
        """Keep the texts of these indices, in this order; one may be taken several times."""
        rows = indices.tolist()
        texts = []
        for i, row in enumerate(rows):
            taken_before = row in rows[:i]
            texts.append(copied(self.texts[row]) if taken_before else self.texts[row])
        self.texts = texts
        self.pads = [self.pads[row] for row in rows]
        if torch.is_tensor(self.tokens):
            self.tokens = self.tokens[indices]

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int):
        rows = torch.arange(len(self.texts))
        self.batch_select_indices(rows.repeat_interleave(repeats))

    def expect_drafts(self):
        """Let layers that slide keep more. Raise ValueError if tokens cannot be taken back."""
        if not self.is_croppable:
            self.refuse()
        for layer in self.caches:
            if isinstance(layer, SlidingSlots):
                layer.spare = DRAFT

    @property
    def is_croppable(self) -> bool:
        layers = full_layers(self.caches)
        evicted = any(layer.length < layer.seen for layer in layers)
        return not (layers[0].prompt_done or evicted)

    def crop(self, tokens: int):
        """Take the newest tokens back, as drafts need it; not after `compress`.

        tokens: how many go, as a number below 0. Before transformers 5.23 also: how many stay.
        """
        if not tokens:
            return
        if not self.is_croppable:
            self.refuse()
        n = self.seen + tokens if tokens < 0 else min(tokens, self.seen)
        for caches, pad in zip(self.texts, self.pads):
            crop(caches, n - pad)
        self.seen = n
        if torch.is_tensor(self.tokens):
            self.tokens = self.tokens[:, :n]

    def refuse(self, *_, **__):
        raise ValueError(
            "a compressed memory cannot take tokens back, and none can be reset; use greedy "
            "decoding, beams or sampling, and attach(model, …) for a new memory"
        )

    reset = refuse

    def activate_past_recording(self, *_, **__):
        """Do nothing: `crop` needs no record of the past."""
