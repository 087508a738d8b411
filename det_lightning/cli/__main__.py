"""``python -m det_lightning.cli``: the program ``det-lightning``."""

from det_lightning.cli import main

if __name__ == "__main__":
    main()
