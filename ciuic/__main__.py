"""Entry point of ``python -m ciuic``, the same program as the installed ``ciuic``."""

from ciuic.cli import main

if __name__ == "__main__":
    main()
