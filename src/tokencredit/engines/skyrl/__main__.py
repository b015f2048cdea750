"""``python -m tokencredit.engines.skyrl key=value ...``: SkyRL's main job, with credit."""

from tokencredit.engines.skyrl.entrypoint import main

if __name__ == "__main__":
    main()
