"""`python -m memopt`: the command line."""

from memopt.cli import app

if __name__ == "__main__":
    app(prog_name="memopt")
