"""`python -m furlong`, which `torchrun -m furlong` starts as well: the command `furlong`."""

from furlong.cli.main import command

if __name__ == "__main__":
    command()
