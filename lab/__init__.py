"""All that measures, and the commands. stored/ has the measured rows."""

import nanollm  # noqa: F401  it makes Ctrl-C silent while modules load
