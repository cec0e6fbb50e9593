"""`python -m rpe3d`."""

from rpe3d.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
