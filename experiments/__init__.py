"""What was measured: a script each, and what it found in stored/. Needs everything else here."""
import nanollm  # noqa: F401  Ctrl-C while the rest is imported is silent
