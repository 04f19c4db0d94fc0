"""The papers' numbered claims: words (*.md), rules on measurements, the command, and CLAIMS.md."""
