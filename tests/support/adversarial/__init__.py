"""The table of programs, most of them hard to run twice, and that of their contexts.

Each module in `programs` is a theme; `configurations.py` is the table of contexts, with
which it is crossed. A program of one function is text (`program.Text`); one of a table,
as that of `holders.py`, is a row crossed with what is done to it (`family`). A test
whose point is that values are those of plain code, and that something ran again, is a
row here. `python -m support.adversarial`, from `tests/`, runs all programs in all
configurations and prints a table.

Invariant: a program makes all that it changes when it is built, and returns all that it
can observe: outputs, gradients, and what the user's own state is in the end.
Rejected: one large random generator of programs. A failure of a program of five lines
says what is wrong.
"""
