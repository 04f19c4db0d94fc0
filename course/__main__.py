"""python -m course COMMAND [options]: make, check or grade a student's copy of this repository."""
import sys

from course.command import main
from lab.command_line import command

if __name__ == "__main__":
    command(main, sys.argv[1:])
