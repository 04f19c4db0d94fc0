"""The papers' numbered claims: in words (*.md), by rules on measurements, as a command and as CLAIMS.md."""
