"""MovieLens-100K as events of users, split by time, and the predictions that the model is judged by. NumPy alone.

A *moment* is a second in which a user rated one or more movies. At a moment all ratings of this user from earlier
seconds are known, and nothing else: neither what happens in this second or later, nor any later rating of other users. To
be predicted are the movies rated in this second (`rated`: positive for "will rate", and their stars for "rated 4 or
more") among movies drawn at random from those that the user has not rated up to and in this second (`others`: negative
for "will rate"). Moments before the split train the model; those at the split and after test it.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Of all ratings in their order of time, this part is for training.
TRAIN_PART = 0.8
# Movies drawn at a moment of the test.
OTHERS = 20
TASKS = ("rated 4 or more", "will rate")


@dataclass(frozen=True)
class Events:
    """The ratings of one user, in order of time; within one second in the order of the file, which has no meaning."""

    user: int
    movies: np.ndarray
    ratings: np.ndarray
    times: np.ndarray


@dataclass(frozen=True)
class Moment:
    """One prediction of a user: `events` ratings are known, the next `rated` are to be predicted among `others`."""

    events: int
    rated: int
    time: int
    others: np.ndarray


@dataclass(frozen=True)
class Movie:
    title: str
    year: int | None
    genres: tuple[str, ...]


def read_movies(folder):
    """The movies by their number."""
    movies = {}
    for number, fields in rows(Path(folder) / "ml-100k.item", 4):
        movie, title, year, genres = fields
        year = int(year) if year.isdigit() else None
        movies[whole(movie, number)] = Movie(title, year, tuple(genres.split()))
    return movies


def read_events(folder):
    """The events of every user, by ascending user."""
    table = []
    for number, fields in rows(Path(folder) / "ml-100k.inter", 4):
        table.append([whole(field, number) for field in fields])
    table = np.array(table, np.int64)
    made = []
    for user in np.unique(table[:, 0]):
        own = table[table[:, 0] == user]
        own = own[np.argsort(own[:, 3], kind="stable")]
        made.append(Events(int(user), own[:, 1], own[:, 2], own[:, 3]))
    return made


def rows(path, columns):
    """The lines of a file of tabs after its first, which names the columns; each with its number."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines[1:], 2):
        fields = line.split("\t")
        if len(fields) != columns:
            raise ValueError(f"{path}, line {number}: {len(fields)} columns, where {columns} were expected")
        yield f"{path}, line {number}", fields


def whole(text, where):
    value = float(text)
    if value != int(value):
        raise ValueError(f"{where}: {text} is not a whole number")
    return int(value)


def split_time(users, part=TRAIN_PART):
    """The second from which on everything is for the test."""
    times = np.sort(np.concatenate([user.times for user in users]))
    return int(times[int(len(times) * part)])


def before(users, time):
    """The users with their ratings before that second, without users that have none."""
    made = []
    for user in users:
        count = int(np.searchsorted(user.times, time))
        if count:
            made.append(Events(user.user, user.movies[:count], user.ratings[:count], user.times[:count]))
    return made


def moments(user, start, all_movies, seed, others=OTHERS):
    """The moments of a user from the second `start` on, but for one without any rating before it."""
    made = []
    times, begins, counts = np.unique(user.times, return_index=True, return_counts=True)
    for time, begin, count in zip(times, begins, counts):
        if time >= start and begin > 0:
            rated = np.zeros(all_movies.max() + 1, bool)
            rated[user.movies[: begin + count]] = True
            drawn = draw(all_movies[~rated[all_movies]], others, seed, user.user, int(time))
            made.append(Moment(int(begin), int(count), int(time), drawn))
    return made


def known(user):
    """For each rating of a user, how many are from earlier seconds: all that may be known when it is predicted."""
    return np.searchsorted(user.times, user.times, side="left")


def rated_by_then(user, movies):
    """For each rating of a user and a row of movies each, which of the movies the user has rated up to that second."""
    when = np.full(max(movies.max(), user.movies.max()) + 1, np.iinfo(np.int64).max)
    when[user.movies] = user.times
    return when[movies] <= user.times[:, None]


def draw(items, count, *seeds):
    """Some of the items, each at most once: always the same for the same seeds, with any version of NumPy."""
    state = 0
    for seed in seeds:
        state = int(mix(np.array([(state + seed) % 2**64], np.uint64))[0])
    keys = mix(np.uint64(state) + np.arange(len(items), dtype=np.uint64))
    return items[np.argsort(keys, kind="stable")[:count]]


def mix(x):
    """The mixing step of splitmix64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def labels(user, moment):
    """The labels of a moment's candidates by task, the rated ones first; NaN where a task has none."""
    stars = user.ratings[moment.events : moment.events + moment.rated]
    made = np.zeros([moment.rated + len(moment.others), len(TASKS)])
    made[: moment.rated] = np.stack([stars >= 4, np.ones_like(stars)], axis=1)
    made[moment.rated :, 0] = np.nan
    return made


def candidates(user, moment):
    """The movies that are scored at a moment, the rated ones first."""
    return np.concatenate([user.movies[moment.events : moment.events + moment.rated], moment.others])


def auc(positive, scores):
    """How probable it is that a positive sample scores higher than a negative one; a tie counts half."""
    positive, scores = np.asarray(positive, bool), np.asarray(scores)
    # Ranks, with equal scores sharing the middle of theirs.
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    good, bad = int(positive.sum()), int((~positive).sum())
    if not good or not bad:
        raise ValueError(f"an AUC needs samples of both kinds: there are {good} positive and {bad} negative ones")
    return float((ranks[positive].sum() - good * (good + 1) / 2) / (good * bad))


def task_aucs(all_labels, all_scores):
    """Per task the AUC over all samples that it asks about, and how many of them are positive and negative."""
    made = {}
    for index, task in enumerate(TASKS):
        asked = ~np.isnan(all_labels[:, index])
        positive = all_labels[asked, index] == 1
        value = auc(positive, all_scores[asked, index])
        made[task] = {"auc": value, "positive": int(positive.sum()), "negative": int((~positive).sum())}
    return made


def popularity(train, count):
    """What is known without a history: per movie the share of 4 and 5 stars, smoothed, and how often it was rated."""
    movies, ratings = (np.concatenate([getattr(user, name) for user in train]) for name in ("movies", "ratings"))
    rated = np.bincount(movies, minlength=count)
    liked = np.bincount(movies, weights=ratings >= 4, minlength=count)
    return np.stack([(liked + 5 * (ratings >= 4).mean()) / (rated + 5), rated], axis=1)
