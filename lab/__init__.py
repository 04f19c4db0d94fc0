"""Longer measurements: one script each, with its rows in stored/. They may import all other folders."""

import nanollm  # noqa: F401  it makes Ctrl-C silent while modules load
