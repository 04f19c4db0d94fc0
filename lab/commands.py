"""The commands of python -m nanollm; without a name, compare."""

from lab import command_line

COMMANDS = "ask", "claims", "compare", "compress", "explore", "generate"


def main(argv: list[str]):
    """Run the command that argv names. Only its own modules are imported, so --help answers at once."""
    name, rest = (
        (argv[0], argv[1:])
        if argv and not argv[0].startswith("-")
        else ("compare", argv)
    )
    if name not in COMMANDS:
        command_line.fail(f"unknown command {name!r}; known are {', '.join(COMMANDS)}")
    try:
        run = command_of(name)
    # a student's copy of the course lacks most commands
    except ModuleNotFoundError as error:
        if not error.name.startswith("lab."):
            raise
        command_line.fail(f"this copy of the repository has no command {name!r}")
    command_line.command(run, rest)


def command_of(name: str):
    """Return the function that runs a command."""
    if name == "ask":
        from lab.ask import main
    elif name == "claims":
        from lab.claims.claims_command import main
    elif name == "compare":
        from lab.compare import main
    elif name == "compress":
        from lab.compress import main
    elif name == "explore":
        from lab.explore import main
    else:
        from lab.generate import main
    return main
