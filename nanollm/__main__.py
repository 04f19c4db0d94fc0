"""python -m nanollm COMMAND [options]: run a command; without one, run compare."""
from importlib import import_module
from pathlib import Path
import sys

from nanollm.commands import shell

COMMANDS = dict(
    ask="nanollm.commands.ask",
    claims="experiments.claims.claims_command",
    compare="nanollm.commands.compare",
    compress="nanollm.commands.compress",
    course="course.command",
    explore="nanollm.commands.explore",
    generate="nanollm.commands.write",
    plan="nanollm.commands.plan",
    record="experiments.record.command",
    train="nanollm.training.train",
)


def main(argv: list[str]):
    name, rest = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("compare", argv)
    root = Path(__file__).parents[1]
    known = [command for command, module in COMMANDS.items()  # a student's copy lacks some
             if (root / f"{module.replace('.', '/')}.py").exists()]
    if name not in known:
        shell.fail(f"unknown command {name!r}; known are {', '.join(known)}")
    shell.command(import_module(COMMANDS[name]).main, rest)


if __name__ == "__main__":
    main(sys.argv[1:])
