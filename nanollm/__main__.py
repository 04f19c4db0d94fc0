"""python -m nanollm COMMAND [options]: the front door of the commands in lab/."""

import sys

from lab.commands import main

if __name__ == "__main__":
    main(sys.argv[1:])
