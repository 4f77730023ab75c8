"""Every private name and every patch of torch that memopt uses: one row each (`rows`), and the only
code that uses them.

A missing name is one error that names its row, or a warning that is counted: never another bit or
byte without a word. `python -m memopt doctor` prints the table for the torch that is installed.
"""
