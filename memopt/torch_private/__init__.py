"""Every private name and every patch of torch that memopt uses: one row each (`rows`), and the only
code that uses them.

A missing name raises one error that names its row, or a counted warning: results never change
silently. `python -m memopt doctor` prints the table for the installed torch.
"""
