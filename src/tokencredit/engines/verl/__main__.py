"""``python -m tokencredit.engines.verl check [CONFIG.yaml | overrides ...]``."""

from tokencredit.engines.verl.checking import main

raise SystemExit(main())
