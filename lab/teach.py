"""python -m nanollm teach: teach question_gates the kind of questions in a file.

Half of the file's contexts teach, but those on which the full cache answers nothing. Contexts of
the recipe (lessons.py) are mixed in, so that the gates do not forget. The other half judges, and so
do questions made by rule from other text, and plain text.
"""

import argparse
from pathlib import Path

from lab import command_line

KEEP = 0.125, 0.0625
LEAST = 24  # contexts of the recipe
JUDGES = 16  # contexts made by rule; plain texts


def main(argv: list[str]):
    """Teach, write the gates, and print what was won and lost."""
    args = read_options(argv)
    file = args.calibration / "QuestionGates.safetensors"
    if file.exists():
        raise ValueError(f"{file} is there already; name a new folder")

    from lab.loading import calibrated, loaded, save_learned, training_tasks
    from lab.lessons import length_of, of_questions
    from lab.made_questions import Maker
    from lab.methods_by_name import pick
    from lab.question_file import Encoder, contexts, read
    from methods.ours.question_gates import learn_from, taught

    groups = contexts(read(args.questions))
    if len(groups) < 4:
        raise ValueError(
            f"{args.questions} has {len(groups)} contexts, of which half would judge; give 4 or "
            "more"
        )
    model, encoding = loaded(args)
    variant = pick(["question_gates"])["question_gates"]
    before = calibrated(variant, model, encoding, args.start)
    encoder = Encoder(encoding, model.config)
    longest = max(length_of(of_questions(encoder, some)) for some in groups)
    if longest > model.config.max_len:
        raise ValueError(
            f"a context of {args.questions} has {longest} tokens with its questions, and the "
            f"decoder reads {model.config.max_len}; shorten it"
        )
    asked = []
    for i, some in enumerate(groups[::2]):
        context = of_questions(encoder, some, known=i % 3 == 2)
        if learn_from(model, context):
            asked.append(context)
    if not asked:
        raise ValueError(
            f"the full cache answers none of the questions of {args.questions} that would teach; "
            "give easier ones"
        )
    recipe = training_tasks(encoding).asked(model.config)
    others = recipe[:: max(len(recipe) // max(len(asked), LEAST), 1)]
    print(
        f"{len(asked)} contexts of {args.questions}, some of whose questions the full cache "
        f"answers, teach, and {len(others)} others"
    )
    after = taught(model, asked + others, **before, steps=args.steps, seed=args.seed)
    args.calibration.mkdir(parents=True, exist_ok=True)
    save_learned(after, file, model)
    print(f"The gates are in {args.calibration}: use --calibration {args.calibration}")

    options = dict(before=before, taught=after)
    maker = Maker(encoding, "test", args.seed)
    made = [maker.context(400) for _ in range(JUDGES)]
    judges = {
        f"held out of {args.questions}": groups[1::2],
        "made by rule from other text": made,
    }
    for title, some in judges.items():
        judged(model, encoder, variant.kind, options, title, some)
    plain(model, encoding, variant.kind, options)


def judged(model, encoder, kind, options: dict, title: str, groups: list):
    """Ask questions of the full cache and behind both gates, and print the table."""
    from tqdm import tqdm

    from lab import question_table
    from lab.answering import Job, answered
    from lab.retrieval import maker
    from nanollm.cache import Method

    jobs = [Job("full", None, maker(model, Method, None))]
    for name, learned in options.items():
        for ratio in KEEP:
            jobs.append(Job(name, ratio, maker(model, kind, ratio, **learned)))
    records = []
    for some in tqdm(groups, title, leave=False, disable=None):
        records += answered(model, encoder, some, dict(agnostic=jobs))
    for record in records:
        if "error" in record:
            raise ValueError(f"{title}: {record['method']}: {record['error']}")
    frame = question_table.frame_of(records)
    print(f"\nQuestions {title}:\n{question_table.show(frame, 'before')}")


def plain(model, encoding, kind, options: dict):
    """Print the KL divergence of plain text behind both gates."""
    import torch

    from lab.continuation import continuation, reference
    from lab.retrieval import maker
    from lab.tasks import Tasks

    n = min(512, model.config.max_len)
    tokens = Tasks(encoding, "test").batch("plain", 0, JUDGES, n).tokens
    full = reference(model, torch.from_numpy(tokens).to(model.embed.weight.device), 64)
    print("\nPlain text, KL(full ‖ compressed) in nats a token:")
    for name, learned in options.items():
        make = maker(model, kind, KEEP[0], **learned)
        kl = continuation(model, full, make, full.recording)["kl"]
        error = kl.std() / len(kl) ** 0.5
        print(f"{name:8} {kl.mean():.3f} ±{error:.3f} at {100 * KEEP[0]:g} %")


def read_options(argv: list[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m nanollm teach",
        description="Teach question_gates a file of questions; --calibration FOLDER is required.",
    )
    option = parser.add_argument
    option("--questions", type=Path, required=True, metavar="FILE", help="as in README")
    option(
        "--start",
        type=Path,
        metavar="FOLDER",
        help="folder of the gates to begin with; default: those that ship, or new ones",
    )
    option("--steps", type=int, default=200, help="steps of the training; default 200")
    option(
        "--seed",
        type=int,
        default=0,
        help="seed of the training, and of the made questions that judge; default 0",
    )
    command_line.model_options(parser)
    args = parser.parse_args(argv)
    if args.calibration is None:
        raise ValueError("teach needs --calibration FOLDER, where it writes the gates")
    return args
