"""Audits of the method: exact laws, tiny problems, and trainings broken on purpose.

`dpsur audit` audits one training. What is here compares the accountings of the library with
problems that are built for it; `python -m reproduction audit` makes the table.
"""
