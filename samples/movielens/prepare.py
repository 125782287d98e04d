"""Makes what `pagoda demo` reads, without torch: python prepare.py target/demo/movielens/data target/demo/movielens

model/            the trained weights beside this file, exported
evaluation.jsonl  a line for each user of the test: their events, and the moments of dataset.py at which they are
                  asked about: [how many events are known, how many follow in that second, the second, [others]]
movies.json       titles by number
visits.txt        a few visits of one user, and movies to rank at each: what the samples called `rank` read
trained.json      the results of training, a copy of the file beside this one
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import numpy as np

import dataset

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "bindings/python"))

from pagoda.export import ExportError, export  # noqa: E402


def prepare(data, out, trained=HERE / "trained.json"):
    """Writes the files of the evaluation, and returns how many users and moments there are."""
    movies, users = dataset.read_movies(data), dataset.read_events(data)
    all_movies = np.array(sorted(movies))
    split = json.loads(trained.read_text())["split"]
    lines, count, asked = [], 0, []
    for user in users:
        moments = dataset.moments(user, split["time"], all_movies, split["seed"], split["others"])
        if moments:
            lines.append(json.dumps(line(user, moments), separators=(",", ":")))
            count += len(moments)
            asked.append((user, moments))
    out.mkdir(parents=True, exist_ok=True)
    titles = {number: titled(movie) for number, movie in movies.items()}
    (out / "movies.json").write_text(json.dumps(titles, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    (out / "visits.txt").write_text(visits(asked, titles, split["seed"]), encoding="utf-8")
    shutil.copyfile(trained, out / "trained.json")
    # Last: make takes this file as the sign that all are there.
    (out / "evaluation.jsonl").write_text("\n".join(lines) + "\n")
    return len(lines), count


def line(user, moments):
    return {
        "user": user.user,
        "movies": user.movies.tolist(),
        "ratings": user.ratings.tolist(),
        "times": user.times.tolist(),
        "moments": [[moment.events, moment.rated, moment.time, moment.others.tolist()] for moment in moments],
    }


def visits(asked, titles, seed, most=4, candidates=100):
    """Of the users who come that often, the one with the longest history: it is the first visit, and each later one
    brings what was rated since. To be ranked are movies that the user has not rated by the last."""
    most = min(most, max(len(moments) for _, moments in asked))
    user, moments = max((one for one in asked if len(one[1]) >= most), key=lambda one: one[1][0].events)
    ends = [moment.events for moment in moments[:most]]
    text = [f"user {user.user}"]
    for begin, end in zip([0, *ends], ends):
        text.append(f"visit {end - begin}")
        text += [f"{movie} {rating}" for movie, rating in zip(user.movies[begin:end], user.ratings[begin:end])]
    left = np.setdiff1d(np.array(sorted(titles)), user.movies[: ends[-1]])
    drawn = dataset.draw(left, candidates, seed, user.user)
    text += [f"candidates {len(drawn)}", *(f"{movie} {titles[movie]}" for movie in drawn.tolist())]
    return "\n".join(text) + "\n"


def titled(movie):
    return f"{movie.title} ({movie.year})" if movie.year else movie.title


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description="Makes what `pagoda demo` reads out of the data and the trained weights."
    )
    parser.add_argument("data", type=Path, help="the folder with ml-100k.inter and ml-100k.item (fetch.py)")
    parser.add_argument("out", type=Path, help="the folder to write to")
    given = parser.parse_args(arguments)
    try:
        export(HERE / "weights.safetensors", HERE / "config.json", given.out / "model", force=True)
        users, moments = prepare(given.data, given.out)
    except (ExportError, OSError, ValueError) as error:
        print(f"prepare.py: {error}", file=sys.stderr)
        return 1
    print(f"{given.out}: the model, and {moments:,} moments of {users} users to judge it by")
    return 0


if __name__ == "__main__":
    sys.exit(main())
