"""The table of programs, most of them hard to run twice, and that of their contexts.

Each file of text in `programs` is a theme, which `themes.py` reads; `rows.txt` has
programs of one function. `configurations.py` is the table of contexts, with which they
are crossed. A program of a table, as that of `holders.txt`, is a row crossed with what
is done to it. A test whose point is that values are those of plain code, and that
something ran again, is a program here. `python -m support.adversarial`, from `tests/`,
runs all programs in all configurations and prints a table.

Invariant: a program makes all that it changes when it is built, and returns all that it
can observe: outputs, gradients, and what the user's own state is in the end.
Rejected: one large random generator of programs. A failure of a program of five lines
says what is wrong.
"""
