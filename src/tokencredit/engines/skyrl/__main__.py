"""``python -m tokencredit.engines.skyrl key=value ...``: SkyRL's main job, with credit."""

import sys

try:
    from tokencredit.engines.skyrl.entrypoint import main
except Exception as error:  # pydantic's, while SkyRL is imported
    if sys.version_info >= (3, 12) or "TypedDict" not in str(error):
        raise
    print(
        "tokencredit: SkyRL cannot be imported on Python 3.11 with this pydantic "
        "(typing.TypedDict); use Python 3.12 or newer",
        file=sys.stderr,
    )
    raise SystemExit(2) from None

if __name__ == "__main__":
    main()
