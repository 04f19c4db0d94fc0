"""Tables of `python -m nanollm --questions`: means over contexts, and paired errors.

A frame has a record of each question, setting, method and keep ratio: its score, the mean −log p of
its right answer, and the size of the cache.
"""

from os.path import commonprefix

import pandas as pd

SETTINGS = {
    "agnostic": "the context is compressed before the question comes",
    "aware": "the question is part of the prompt that is compressed",
}
TERMS = """\
keep       keep ratio: a head's mean budget, as a percentage of the prompt's tokens
KiB        size of one text's compressed cache, with 16 bits a number; with @4, as stored
a task     mean over contexts of their mean scores, ± one standard error (of one context: none)
mean       over the tasks of which the full cache answers half or more
- full     difference to the full cache, paired by context
-log p     of the right answer, in nats a token, over all tasks"""
FULL = "full", 100.0
ROW = ["setting", "method", "keep", "task"]
EACH = ["context", "line", "score", "surprise"]


def frame_of(records: list[dict]) -> pd.DataFrame:
    """Return records as a frame. A method without a budget keeps 100 %."""
    frame = pd.DataFrame(records)
    share = frame.pop("keep_ratio").astype(float)
    percent = 100 * share.fillna(1)
    return frame.assign(keep=percent.round(6))


def rows_of(frame: pd.DataFrame) -> list[dict]:
    """Return rows for storing, one for each value of ROW, with lists over its questions."""
    groups = frame.groupby(ROW, sort=False)
    rows = groups[EACH].agg(list).assign(kib=groups.kib.mean().round(1))
    return rows.reset_index().to_dict("records")


def without(rows: list[dict], earlier: list[dict]) -> list[dict]:
    """Return the rows of which there is no earlier one; each command measures the full cache."""

    def place(row: dict) -> list:
        return [row[name] for name in ROW]

    known = [place(row) for row in earlier]
    return [row for row in rows if place(row) not in known]


def frame_of_rows(rows: list[dict]) -> pd.DataFrame:
    """Return the frame of stored rows."""
    return pd.DataFrame(rows).explode(EACH, ignore_index=True)


def beside(ours: pd.DataFrame, theirs: pd.DataFrame) -> pd.DataFrame:
    """Return our rows at their keep ratios and on their questions, and below them theirs."""
    names = {name.removeprefix("kvpress ") for name in theirs.method}
    same = (
        ours.method.isin(names | {"full"})
        & ours.setting.isin(theirs.setting)
        & ours.line.isin(theirs.line)
        & ours.keep.isin([*theirs.keep, 100])
    )
    return pd.concat((ours[same], theirs))


def wide(frame: pd.DataFrame, of: str) -> pd.DataFrame:
    """Return one number of all questions (a row each) and methods at keep ratios (a column)."""
    order = frame[["method", "keep"]].drop_duplicates()
    columns = [*order.itertuples(index=False, name=None)]
    table = frame.pivot(
        index=["task", "context", "line"],
        columns=["method", "keep"],
        values=of,
    )
    return table[columns].astype(float)


def means(x: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Return the means over tasks, which count alike, and their standard errors.

    Contexts count alike in a task, because questions on one context err together; tasks are taken
    as independent.
    """
    contexts = x.groupby(["task", "context"]).mean()
    tasks = contexts.groupby("task")
    if len(contexts) == tasks.ngroups:  # one of each: the tasks are the sample
        return contexts.mean(), contexts.sem()
    squares = tasks.sem() ** 2
    error = squares.sum(skipna=False) ** 0.5
    return tasks.mean().mean(), error / tasks.ngroups


def shares(x: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Return the means as shares of the full cache's, and their errors, paired by context."""
    # a method's own questions may be fewer
    full = x.apply(lambda mine: x[FULL].where(mine.notna()))
    base, _ = means(full)
    share = means(x)[0] / base
    _, error = means(x - full * share)
    return share, error / base


def judging(x: pd.DataFrame) -> list[str]:
    """Return the tasks of which the full cache answers half or more."""
    return [task for task, mine in x.groupby("task") if means(mine)[0][FULL] >= 0.5]


def points(frame: pd.DataFrame) -> list[dict]:
    """Return each method's mean score at a keep ratio, as lab/plot.py draws rows."""
    rows = []
    for setting, mine in frame.groupby("setting", sort=False):
        scores = wide(mine, "score")
        mean, error = means(scores.loc[judging(scores)])
        kib = mine.groupby(["method", "keep"]).kib.mean()
        for key in scores:
            row = {
                "method": key[0],
                "live_16": 1024 * kib[key],
                setting: mean[key],
                f"mean_{setting}_se": error[key],
            }
            rows.append(row)
    return rows


# ---- as text ----


def show(
    frame: pd.DataFrame,
    against: str | None = None,
    short: bool = False,
) -> str:
    """Return the tables of each setting: shares of the full cache's mean, then all numbers.

    short: of several keep ratios, all numbers at 12.5 and 100 % only.
    """
    parts = []
    for setting, mine in frame.groupby("setting", sort=False):
        scores = wide(mine, "score")
        judges = judging(scores)
        n = len(scores)
        parts.append(f"{setting}: {SETTINGS[setting]}; {n} questions")
        if judges:
            matrix = shown(percentages(scores.loc[judges]))
            parts.append(f"Mean in percent of the full cache's:\n{matrix}")
        if short and mine.keep.nunique() > 2:
            mine = mine[mine.keep.isin([100, 12.5])]
        parts.append(shown(numbers(mine, judges, against)))
        unfit = [task for task in mine.task.unique() if task not in judges]
        if unfit:
            parts.append(
                f"The full cache answers less than half of {', '.join(unfit)}: with this model "
                "the mean leaves that out."
            )
    return "\n\n".join(parts)


def percentages(x: pd.DataFrame) -> pd.DataFrame:
    """Return the shares of the full cache's mean in percent, a row a method, a column a ratio."""
    share, error = shares(x)
    cells = texts(100 * share, 100 * error, "z.0f")
    matrix = pd.Series(cells, x.columns).unstack("keep")
    matrix = matrix.reindex(x.columns.unique("method"))
    columns = sorted(matrix, reverse=True)
    return matrix[columns].fillna("")


def numbers(
    frame: pd.DataFrame,
    judges: list[str],
    against: str | None,
) -> pd.DataFrame:
    """Return a line for each method at each keep ratio."""
    scores = wide(frame, "score")
    tasks = [*frame.task.unique()]
    # without the words that all tasks begin with: niah_single_1 → single_1
    n = commonprefix(tasks).rfind("_") + 1 if len(tasks) > 1 else 0
    kib = frame.groupby(["method", "keep"]).kib.mean()
    cells = pd.DataFrame(index=scores.columns)
    cells["KiB"] = [f"{kib[key]:.0f}".replace("nan", "") for key in scores]
    for task in tasks:
        cells[task[n:]] = texts(*means(scores.loc[[task]]))
    if judges:
        mine = scores.loc[judges]
        cells["mean"] = texts(*means(mine))
        cells["- full"] = texts(*means(mine.sub(mine[FULL], axis=0)))
        if against:
            same = {}
            for key in mine:
                same[key] = rival(mine, key, against)
            less = mine - pd.DataFrame(same)
            cells[f"- {against}"] = texts(*means(less))
    surprise = wide(frame, "surprise")
    cells["-log p"] = texts(*means(surprise))
    more = surprise.sub(surprise[FULL], axis=0)
    cells["-log p - full"] = texts(*means(more))
    return cells


def rival(x: pd.DataFrame, key: tuple[str, float], against: str) -> pd.Series:
    """Return the other method's numbers at the same keep ratio, or its only ones; else NaN."""
    columns = [other for other in x if other[0] == against]
    for other in columns:
        if other[1] == key[1] or len(columns) == 1:
            return x[other]
    return x[key] * float("nan")


def texts(mean: pd.Series, error: pd.Series, form: str = "z.2f") -> list[str]:
    """Return means and errors as text; "" if there is no mean."""
    cells = []
    for m, e in zip(mean, error):
        text = f"{m:{form}}"
        if e == e:  # NaN if there is one context
            text = f"{text} ±{e:{form}}"
        cells.append(text if m == m else "")
    return cells


def shown(cells: pd.DataFrame) -> str:
    """Return a table as text; keep ratios in percent."""

    def percent(x):
        return f"{x:g} %" if isinstance(x, float) else x

    cells = cells.rename(index=percent, columns=percent)
    text = cells.rename_axis(columns=lambda name: None).to_string()
    return "\n".join(line.rstrip() for line in text.splitlines())
