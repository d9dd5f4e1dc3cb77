"""`python -m mps_trainer` is the `mps-trainer` command."""

from mps_trainer.cli import main

if __name__ == "__main__":
    main()
