"""The papers' numbered claims: words (*.md), rules on measurements, and a command."""
