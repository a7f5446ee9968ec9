"""`python -m furlong` runs the command `furlong`; so does `torchrun -m furlong`."""

from furlong.cli.main import command

if __name__ == "__main__":
    command()
