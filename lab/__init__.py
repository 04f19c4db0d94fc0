"""All that measures, and the commands. stored/ has the measured rows."""
