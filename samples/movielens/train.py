"""Trains the model of the demo: python train.py target/demo/movielens/data

Writes weights.safetensors and trained.json beside this file. Needs torch, NumPy and safetensors, and a few minutes of
one core. `--validate` trains on the earlier part of the training set and evaluates on its later part. The settings below
were chosen by it, without the test set. README.md describes the recipe.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional

import dataset
from model import Ranker

HERE = Path(__file__).parent
SEED = 7
EPOCHS = 12
NEGATIVES = 4  # drawn for each rating, again in each epoch
BATCH = 3000  # candidates at most, where one user has fewer
RATE, DECAY, DROPOUT = 2e-3, 0.05, 0.2


def content(movies, count):
    """The features of each movie: its genres and its half decade."""
    genres = sorted({genre for movie in movies.values() for genre in movie.genres})
    made = torch.zeros(count, len(genres) + 16)
    for number, movie in movies.items():
        for genre in movie.genres:
            made[number, genres.index(genre)] = 1 / len(movie.genres) ** 0.5
        if movie.year:
            made[number, len(genres) + min(max((movie.year - 1920) // 5, 0), 15)] = 1
    return made


class Batches:
    """The training set, a user's ratings and the movies drawn for each, in batches of users of about one length."""

    def __init__(self, users, all_movies, generator):
        self.users, self.all_movies, self.generator = users, all_movies, generator

    def epoch(self):
        keys = [len(user.movies) * self.generator.uniform(0.8, 1.25) for user in self.users]
        batches, batch, rows = [], [], 0
        for index in np.argsort(keys):
            more = len(self.users[index].movies) * (1 + NEGATIVES)
            if batch and rows + more > BATCH:
                batches.append(batch)
                batch, rows = [], 0
            batch.append(index)
            rows += more
        batches.append(batch)
        self.generator.shuffle(batches)
        return [self.padded(batch) for batch in batches]

    def padded(self, batch):
        longest = max(len(self.users[index].movies) for index in batch)
        shape = len(batch), longest, 1 + NEGATIVES
        movies, ratings = np.zeros(shape[:2], np.int64), np.zeros(shape[:2], np.int64)
        scored, seen = np.zeros(shape, np.int64), np.zeros(shape[:2], np.int64)
        labels = np.full([*shape, 2], np.nan, np.float32)
        for row, index in enumerate(batch):
            user = self.users[index]
            count = len(user.movies)
            movies[row, :count], ratings[row, :count] = user.movies, user.ratings
            seen[row, :count] = dataset.known(user)
            scored[row, :count, 0] = user.movies
            drawn = self.all_movies[self.generator.integers(len(self.all_movies), size=[count, NEGATIVES])]
            scored[row, :count, 1:] = drawn
            labels[row, :count, 0] = np.stack([user.ratings >= 4, np.ones(count)], axis=1)
            # Drawn movies that the user has rated by then are not negatives.
            labels[row, :count, 1:, 1] = np.where(dataset.rated_by_then(user, drawn), np.nan, 0)
        tensors = movies, ratings, scored.reshape(len(batch), -1), seen.repeat(1 + NEGATIVES, axis=1)
        return *map(torch.from_numpy, tensors), torch.from_numpy(labels.reshape(len(batch), -1, 2))


def train(model, batches, epochs):
    decayed = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    schedule = None
    for epoch in range(epochs):
        model.train()
        total, count, start = 0.0, 0, time.monotonic()
        made = batches.epoch()
        if schedule is None:
            steps = int(epochs * len(made) * 1.05) + 1
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
        for movies, ratings, candidates, seen, labels in made:
            asked = ~labels.isnan()
            logits = model(movies, ratings, candidates, seen)
            loss = functional.binary_cross_entropy_with_logits(logits[asked], labels[asked])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total, count = total + float(loss.detach()), count + 1
        yield epoch, total / count, time.monotonic() - start


def judge(model, users, start, all_movies):
    """Labels and scores of every candidate of the users' moments from `start` on, in their order."""
    model.eval()
    labels, scores = [np.zeros([0, 2])], [np.zeros([0, 2])]
    with torch.no_grad():
        for user in users:
            moments = dataset.moments(user, start, all_movies, SEED)
            if not moments:
                continue
            candidates = np.concatenate([dataset.candidates(user, moment) for moment in moments])
            seen = np.concatenate([[moment.events] * (moment.rated + len(moment.others)) for moment in moments])
            arrays = user.movies, user.ratings, candidates, seen
            logits = model(*(torch.from_numpy(array)[None] for array in arrays))[0]
            labels += [dataset.labels(user, moment) for moment in moments]
            scores.append(torch.sigmoid(logits).numpy())
    return np.concatenate(labels), np.concatenate(scores)


def rounded(model):
    """The weights as they are saved, in half precision; from here on the model computes with these."""
    state = {name: value.to(torch.float16).contiguous() for name, value in model.state().items()}
    with torch.no_grad():
        model.movies.weight.copy_(state["tables.movies.rows"])
        model.of_content.zero_()
        model.ratings.weight.copy_(state["tables.ratings.rows"])
    model.load_state_dict({name: value for name, value in state.items() if name in model.state_dict()}, strict=False)
    return state


def samples(model, all_movies, count=20):
    """Made-up users, not from the data, with their scores here: for tests of the exported model."""
    generator, made = np.random.default_rng(SEED), []
    for number in range(count):
        # None at first, and up to 60.
        events = 3 * number
        movies, candidates = (generator.choice(all_movies, size, replace=False) for size in (events, 4))
        ratings = generator.integers(1, 6, events)
        arrays = movies, ratings, candidates, np.full(len(candidates), events)
        with torch.no_grad():
            scores = torch.sigmoid(model(*(torch.from_numpy(array)[None] for array in arrays))[0])
        sample = {"movies": movies.tolist(), "ratings": ratings.tolist(), "candidates": candidates.tolist()}
        made.append(sample | {"scores": [[round(score, 7) for score in row] for row in scores.tolist()]})
    return made


def main():
    parser = argparse.ArgumentParser(description="Trains the model of the demo.")
    parser.add_argument("data", type=Path, help="the folder with ml-100k.inter and ml-100k.item (fetch.py)")
    parser.add_argument(
        "--validate", action="store_true", help="judge by the later part of the training set; write nothing"
    )
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    given = parser.parse_args()
    start = time.monotonic()
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    config = json.loads((HERE / "config.json").read_text())
    movies, users = dataset.read_movies(given.data), dataset.read_events(given.data)
    all_movies, split = np.array(sorted(movies)), dataset.split_time(users)
    if given.validate:
        users = dataset.before(users, split)
        split = dataset.split_time(users)
    known = dataset.before(users, split)
    model = Ranker(config, content(movies, config["tables"]["movies"]["rows"]), DROPOUT)
    batches = Batches(known, all_movies, np.random.default_rng(SEED))
    for epoch, loss, seconds in train(model, batches, given.epochs):
        print(f"epoch {epoch + 1:2} of {given.epochs}: loss {loss:.4f}, {seconds:.0f} s", flush=True)
    trained = time.monotonic() - start
    state = rounded(model)
    tasks = results(model, users, known, split, all_movies)
    for task, result in tasks.items():
        print(f"{task}: AUC {result['auc']:.4f}, by popularity {result['popularity_auc']:.4f}")
    if given.validate:
        return
    save_file(state, HERE / "weights.safetensors")
    about = {
        "tasks": tasks,
        "auc": "over all candidates of all test moments that the task asks about, together; a tie counts half",
        "split": {"time": split, "train_part": dataset.TRAIN_PART, "others": dataset.OTHERS, "seed": SEED},
        "training": {
            "ratings": sum(len(user.movies) for user in known),
            "users": len(known),
            "epochs": given.epochs,
            "seconds": round(trained),
            "torch": torch.__version__,
            "threads": 1,
        },
        "samples": samples(model, all_movies),
    }
    (HERE / "trained.json").write_text(written(about))


def written(about):
    """As JSON, with each sample on a line of its own."""
    lines = ",\n".join(f"    {json.dumps(sample)}" for sample in about["samples"])
    return json.dumps(about | {"samples": "HERE"}, indent=2).replace('"HERE"', f"[\n{lines}\n  ]") + "\n"


def results(model, users, known, split, all_movies):
    """Per task the AUC and that of popularity, with the numbers of samples."""
    labels, scores = judge(model, users, split, all_movies)
    asked = [(user, moment) for user in users for moment in dataset.moments(user, split, all_movies, SEED)]
    candidates = np.concatenate([dataset.candidates(*one) for one in asked])
    popular = dataset.task_aucs(labels, dataset.popularity(known, all_movies.max() + 1)[candidates])
    judged = dataset.task_aucs(labels, scores)
    return {task: result | {"popularity_auc": popular[task]["auc"]} for task, result in judged.items()}


if __name__ == "__main__":
    main()
