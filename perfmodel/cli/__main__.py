"""`python -m perfmodel.cli`."""

from perfmodel.cli import main

raise SystemExit(main())
