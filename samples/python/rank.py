"""Ranks movies for a returning user: rank.py FOLDER, which has a model and visits.txt (samples/movielens/prepare.py).

Each visit sends only what the user did since the last one. What the model made of everything before that is in the
engine's cache, so a visit costs what is new, however long the history is.
"""

import sys
from pathlib import Path

import numpy as np
import pagoda


def read_visits(path: Path) -> tuple[int, list[dict[str, list[int]]], list[int], list[str]]:
    """The user, the events of each visit, and the candidates with their titles."""
    lines = iter(path.read_text(encoding="utf-8").splitlines())
    try:
        user, visits = int(next(lines).removeprefix("user ")), []
        what, count = next(lines).split()
        while what == "visit":
            pairs = [tuple(map(int, next(lines).split())) for _ in range(int(count))]
            visits.append({"movie": [movie for movie, _ in pairs], "rating": [rating for _, rating in pairs]})
            what, count = next(lines).split()
        candidates = [next(lines).split(" ", 1) for _ in range(int(count))]
        return user, visits, [int(movie) for movie, _ in candidates], [title for _, title in candidates]
    except (StopIteration, ValueError):
        raise ValueError(f"{path} is not what prepare.py writes; make it anew") from None


def rank(folder: Path) -> None:
    user, visits, movies, titles = read_visits(folder / "visits.txt")
    with pagoda.Engine(folder / "model") as engine:
        print("User", user)
        start = 0
        for number, events in enumerate(visits, 1):
            answer = engine.rank(user=user, events=events, start=start, candidates={"movie": movies})
            new, rows = len(events["movie"]), (answer.cached_rows, answer.computed_rows)
            print(f"  visit {number}: {new} new events, {rows[0]} rows remembered, {rows[1]} computed")
            start += new
    # A candidate has a score for each task; this is the first task's.
    scores = answer.scores[:, 0]
    print(f"Top ten of {len(movies)} movies:")
    for place, candidate in enumerate(np.argsort(-scores, kind="stable")[:10], 1):
        print(f"  {place:2}. {scores[candidate]:.6f}  {titles[candidate]}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print(f"usage: {sys.argv[0]} FOLDER", file=sys.stderr)
        sys.exit(2)
    try:
        rank(Path(sys.argv[1]))
    except (pagoda.PagodaError, OSError, ValueError) as error:
        print("rank:", error, file=sys.stderr)
        sys.exit(1)
