"""Small programs that are hard to run twice, and a way to run them in configurations.

Each module beside this one is a theme. `python -m support.adversarial`, from `tests/`,
runs all programs in all configurations and prints a table.

Invariant: a program makes all that it changes when it is built, and returns all that it
can observe: outputs, gradients, and what the user's own state is in the end.
Rejected: one large random generator of programs. A failure of a program of five lines
says what is wrong.
"""
