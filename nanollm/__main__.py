"""python -m nanollm COMMAND [options]: run a command of lab/; without a name, compare."""

from importlib import import_module
import signal
import sys

from lab import command_line

COMMANDS = "ask claims compare compress explore generate teach".split()


def main(argv: list[str]):
    """Run the command that argv names, or compare."""
    if not argv or argv[0].startswith("-"):
        argv = ["compare", *argv]
    name, *options = argv
    if name not in COMMANDS:
        command_line.fail(f"unknown command {name!r}; known are {', '.join(COMMANDS)}")
    module = "lab.claims.claims_command" if name == "claims" else f"lab.{name}"
    try:
        run = import_module(module).main  # not every command's imports
    except ModuleNotFoundError as error:
        # a student's copy of the course lacks most commands
        if not error.name.startswith("lab."):
            raise
        command_line.fail(f"this copy of the repository has no command {name!r}")
    command_line.command(run, options)


if __name__ == "__main__":
    # Ctrl-C while torch is imported ends the program without a traceback. In a shell's
    # background it is ignored, and stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    main(sys.argv[1:])
