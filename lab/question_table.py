"""Tables of `python -m nanollm --questions`: means over documents, and paired errors.

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
keep       keep ratio: the budget of each head, as a percentage of the prompt's tokens
KiB        size of one text's compressed cache, with 16-bit numbers
of a task  share of the answers that the reply contains, ± one standard error
mean       over the tasks of which the full cache answers half or more
- full     difference to the full cache, paired by question
-log p     of the right answer, in nats a token, over the same tasks"""
FULL = "full", 100.0
ROW = ["setting", "method", "keep", "task"]


def frame_of(records: list[dict]) -> pd.DataFrame:
    """Return records as a frame. A method without a budget keeps 100 %."""
    frame = pd.DataFrame(records)
    percent = 100 * frame.pop("keep_ratio").astype(float).fillna(1)
    return frame.assign(keep=percent.round(6))


def rows_of(frame: pd.DataFrame) -> list[dict]:
    """Return rows for storing: of each method and task, the lists of all its questions."""
    kib = frame.groupby(ROW, sort=False).kib.mean().round(1)
    lists = frame.groupby(ROW, sort=False)[["line", "score", "surprise"]].agg(list)
    return lists.assign(kib=kib).reset_index().to_dict("records")


def frame_of_rows(rows: list[dict]) -> pd.DataFrame:
    """Return the frame of stored rows."""
    return pd.DataFrame(rows).explode(["line", "score", "surprise"], ignore_index=True)


def wide(frame: pd.DataFrame, of: str) -> pd.DataFrame:
    """Return one number of all questions (a row each) and methods at keep ratios (a column)."""
    order = frame[["method", "keep"]].drop_duplicates().itertuples(index=False)
    table = frame.pivot(index=["task", "line"], columns=["method", "keep"], values=of)
    return table[[*map(tuple, order)]].astype(float)


def means(x: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Return the means over tasks, which count alike, and their standard errors."""
    tasks = x.groupby("task")
    error = (tasks.sem() ** 2).sum(skipna=False) ** 0.5 / tasks.ngroups
    return tasks.mean().mean(), error


def shares(x: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Return the means as shares of the full cache's, and their errors, paired by question."""
    mean = means(x)[0]
    share = mean / mean[FULL]
    expected = pd.DataFrame({key: x[FULL] * share[key] for key in x})
    return share, means(x - expected)[1] / mean[FULL]


def judging(x: pd.DataFrame) -> list[str]:
    """Return the tasks of which the full cache answers half or more."""
    full = x[FULL].groupby("task").mean()
    return [*full[full >= 0.5].index]


def texts(mean: pd.Series, error: pd.Series, form: str = ".2f") -> list[str]:
    """Return means and errors as text; "" if there is no mean."""
    cells = []
    for m, e in zip(mean, error):
        cells.append("" if m != m else f"{m:{form}} ±{e:{form}}")
    return cells


def show(frame: pd.DataFrame, against: str | None = None) -> str:
    """Return the tables of each setting: shares of the full cache's mean, then all numbers."""
    parts = []
    for setting, mine in frame.groupby("setting", sort=False):
        scores = wide(mine, "score")
        judges = judging(scores)
        n = len(scores)
        parts.append(f"{setting}: {SETTINGS[setting]}; {n} questions")
        if judges:
            share = pd.Series(
                texts(*(100 * x for x in shares(scores.loc[judges])), ".0f")
            )
            share.index = scores.columns
            matrix = share.unstack("keep").fillna("")
            matrix = matrix.reindex(scores.columns.unique("method"))
            matrix = matrix[sorted(matrix, reverse=True)]
            parts.append(f"Mean in percent of the full cache's:\n{shown(matrix)}")
        parts.append(shown(numbers(mine, scores, judges, against)))
        for task in {*mine.task} - {*judges}:
            parts.append(
                f"The full cache answers only {scores.loc[task][FULL].mean():.2f} of {task}: "
                "with this model it cannot compare methods, and the mean leaves it out."
            )
    return "\n\n".join(parts)


def percentages(x: pd.DataFrame) -> pd.DataFrame:
    """Return the shares of the full cache's mean in percent, a row a method, a column a ratio."""
    share, error = shares(x)
    cells = pd.Series(texts(100 * share, 100 * error, ".0f"), x.columns)
    matrix = cells.unstack("keep").fillna("")
    matrix = matrix.reindex(x.columns.unique("method"))
    return matrix[sorted(matrix, reverse=True)]


def numbers(
    frame: pd.DataFrame, scores: pd.DataFrame, judges: list[str], against: str | None
) -> pd.DataFrame:
    """Return a line for each method at each keep ratio."""
    tasks = [*frame.task.unique()]
    # without the words that all tasks begin with: niah_single_1 → single_1
    n = commonprefix(tasks).rfind("_") + 1 if len(tasks) > 1 else 0
    kib = frame.groupby(["method", "keep"]).kib.mean()[scores.columns]
    cells = pd.DataFrame({"KiB": kib.map("{:.0f}".format)}, scores.columns)
    for task in tasks:
        cells[task[n:]] = texts(*means(scores.loc[[task]]))
    if judges:
        mine = scores.loc[judges]
        cells["mean"] = texts(*means(mine))
        cells["- full"] = texts(*means(mine.sub(mine[FULL], axis=0)))
        if against:
            same = {key: rival(mine, key, against) for key in mine}
            cells[f"- {against}"] = texts(*means(mine - pd.DataFrame(same)))
        surprise = wide(frame, "surprise").loc[judges]
        cells["-log p"] = texts(*means(surprise))
        cells["-log p - full"] = texts(*means(surprise.sub(surprise[FULL], axis=0)))
    return cells


def rival(x: pd.DataFrame, key: tuple[str, float], against: str) -> pd.Series:
    """Return the other method's numbers at the same keep ratio, or its only ones; else NaN."""
    columns = [other for other in x if other[0] == against]
    same = [other for other in columns if other[1] == key[1] or len(columns) == 1]
    return x[same[0]] if same else x[key] * float("nan")


def shown(cells: pd.DataFrame) -> str:
    """Return a table as text; keep ratios in percent."""

    def percent(x):
        return f"{x:g} %" if isinstance(x, float) else x

    return cells.rename(index=percent, columns=percent).to_string()
