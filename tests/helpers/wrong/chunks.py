"""Wrong solutions of `chunks`: (problem, the mistake, a piece of our function, its wrong replacement)."""

WRONG = [
    ("grid", "takes the remainder, not the quotient", "place // size", "place % size"),
    (
        "grid",
        "uses slots, not places",
        "place // size",
        "torch.arange(place.shape[-1]).expand(place.shape) // size",
    ),
    (
        "grid",
        "puts empty slots into chunk 1",
        "torch.where(place < 0, 0, place // size + 1)",
        "place.clamp(min=0) // size + 1",
    ),
    ("chunk_scores", "divides by 0 in empty chunks", "length.clamp(min=1)", "length"),
    ("chunk_scores", "takes the minimum for the maximum", '"amax"', '"amin"'),
    (
        "chunk_scores",
        "uses head 0's chunks for all heads",
        "scatter_add(-1, chunk, scores)",
        "scatter_add(-1, chunk[..., :1, :].expand_as(chunk) if chunk.dim() > 1 else chunk, scores)",
    ),
    ("ranking", "ranks the lowest first", "descending=True", "descending=False"),
    ("ranking", "sorts over heads", "dim=-1", "dim=0"),
    (
        "ranking",
        "returns ranks, not the order",
        "stable=True)",
        "stable=True).argsort(-1)",
    ),
    ("cut_to", "keeps one token too many", "place < torch", "place <= torch"),
    (
        "cut_to",
        "sorts by scores, so that chunks with equal scores mix",
        "ranking(score).argsort(-1).gather(-1, chunk)",
        "(-score).gather(-1, chunk)",
    ),
    (
        "cut_to",
        "uses head 0's budget for all heads",
        "torch.as_tensor(budget, device=chunk.device)[..., None]",
        "torch.as_tensor(budget, device=chunk.device).flatten()[0]",
    ),
    ("fit", "refuses a chunk that fits exactly", "length <= room", "length < room"),
    (
        "fit",
        "does not sort the lengths by score",
        "length = length.gather(-1, order)",
        "pass",
    ),
    (
        "fit",
        "uses head 0's budget for all heads",
        ".expand(score.shape[:-1])[..., None]",
        ".flatten()[0]",
    ),
    (
        "reuse",
        "lets every layer choose",
        "caches[i:i + reuse] for i in range(0, len(caches), reuse)",
        "[x] for x in caches",
    ),
    (
        "reuse",
        "lets the highest layer of a group choose",
        "lowest, *others in",
        "*others, lowest in",
    ),
    ("reuse", "always takes two layers", "reuse = caches[0].reuse", "reuse = 2"),
    (
        "reuse",
        "chooses within the budget",
        "lowest.seen > lowest.budget",
        "lowest.seen >= lowest.budget",
    ),
]
