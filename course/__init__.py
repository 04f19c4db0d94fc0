"""Six assignments on the methods of this repository: handouts, tests and a grader."""
