"""Wrong solutions of `sketch`: (problem, mistake, piece of our code, what replaces it)."""

WRONG = [
    (
        "hash",
        "takes the modulo only at the end, after an overflow",
        "f = (f * token + c) % PRIME",
        "f = f * token + c\n        f = f % PRIME",
    ),
    (
        "hash",
        "computes in 32 bits",
        "for c in coefficients:",
        "f, token = f.int(), token.int()\n        for c in coefficients.int():",
    ),
    (
        "hash",
        "adds each coefficient after the modulo",
        "(f * token + c) % PRIME",
        "f * token % PRIME + c",
    ),
    ("slots", "leaves out the start of the row", "return first + ", "return "),
    (
        "slots",
        "starts rows one slot apart",
        "torch.arange(self.rows, device=J.device) * self.width",
        "torch.arange(self.rows, device=J.device)",
    ),
    (
        "slots",
        "divides instead of taking the remainder",
        "% self.width",
        "// self.width",
    ),
    (
        "insert",
        "overwrites when tokens share a slot",
        "total.scatter_add_(",
        "total.scatter_(",
    ),
    (
        "insert",
        "multiplies by times twice",
        "signed.to(total)",
        "(signed * times).to(total)",
    ),
    (
        "insert",
        "uses head 0's slots for all heads",
        "self.bucket(J)",
        "self.bucket(J[:, :1].expand(J.shape))",
    ),
    ("median", "signs unsigned keys", "x * self.flip", "-x"),
    (
        "median",
        "never signs keys",
        "torch.cat((x, x * self.flip), 2)",
        "torch.cat((x, torch.cat((x.chunk(2, -1)[0], -x.chunk(2, -1)[1]), -1)), 2)",
    ),
    (
        "median",
        "uses head 0's slots for all heads",
        "torch.cat((x, x * self.flip), 2)",
        "torch.cat((x, x * self.flip), 2)[:, :1].expand(-1, x.shape[1], -1, -1)",
    ),
    ("variance", "counts the token itself", "(a - 1)", "a"),
    (
        "variance",
        "takes the mean's variance, not the median's",
        "MEDIAN[rows]",
        "1 / rows",
    ),
    ("variance", "leaves out MEDIAN", "MEDIAN[rows] * ", ""),
    (
        "load",
        "puts exact tokens into the sketch as well",
        "1 + (1 - budget) / (vague * budget)",
        "1 / (vague * budget)",
    ),
    ("load", "leaves out the 1", "1 + (1", "(1"),
    (
        "load",
        "returns the lower bound 1/budget",
        "1 + (1 - budget) / (vague * budget)",
        "1 / budget",
    ),
    ("means", "counts one token too many", "count.clamp(min=1)", "(count + 1)"),
    (
        "means",
        "counts in 16 bits",
        "count.scatter_add_(2, slot, torch.ones_like(slot, dtype=count.dtype))",
        "for one in slot.split(1, 2):\n            count = count.to(self.x)"
        ".scatter_add(2, one, torch.ones_like(one, dtype=self.x.dtype)).float()",
    ),
    (
        "means",
        "counts row 0 only",
        "self.bucket(J).flatten(2)",
        "self.bucket(J)[..., 0]",
    ),
    ("shrink", "leaves out MEDIAN", "MEDIAN[self.rows] * ", ""),
    (
        "shrink",
        "subtracts the mean once per slot, not once per token",
        "signs.scatter_add_(",
        "signs.scatter_(",
    ),
    (
        "shrink",
        "returns the mean in another dtype",
        ".unsqueeze(2).to(self.x)",
        ".unsqueeze(2)",
    ),
]
