//! Tables whose files were moved, copied, damaged or lost: updates are there, or an error says which file and what to
//! do.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use pagoda::embedding::{EmbeddingTable, Embeddings, Miss, PsJson, Reach};
use pagoda::{Error, Result};
use pagoda_test_support::{Folder, Random};

use crate::files::{DEFAULT, DIM, row, rows};

const KEYS: [i64; 4] = [1, 2, 3, 4];

/// Writes a source of [`KEYS`], whose rows have this version.
fn write_source(path: &Path, version: u64) {
    fs::create_dir_all(path).unwrap();
    fs::write(path.join("key"), KEYS.map(i64::to_le_bytes).concat()).unwrap();
    let rows: Vec<u8> = rows(&KEYS, version).iter().flat_map(|number| number.to_le_bytes()).collect();
    fs::write(path.join("emb_vector"), rows).unwrap();
}

/// Opens a table: its source, the folder of table files, and more members of `persistent_db`.
fn open(source: &Path, disk: &Path, more: &str) -> Result<(Embeddings, EmbeddingTable)> {
    let json = format!(
        r#"{{"supportlonglong": true, "models": [{{"model": "m", "sparse_files": ["{}"], "embedding_table_names": ["t"],
            "embedding_vecsize_per_table": [{DIM}], "default_value_for_each_table": [[-1, -2, -3, -4]],
            "gpucache": false}}], "volatile_db": {{"type": "disabled"}},
            "persistent_db": {{"type": "disk", "path": "{}" {more}}}}}"#,
        source.display(),
        disk.display()
    );
    let embeddings = Embeddings::open_ps_json(&PsJson::from_json(&json, None)?)?;
    let table = embeddings.table("t")?;
    Ok((embeddings, table))
}

/// A folder with a source `t` and a table in `disk`, in which key 1 has version 5, 2 is deleted, and the others are as
/// loaded.
fn updated() -> Folder {
    let folder = Folder::new();
    write_source(&folder.path().join("t"), 0);
    let (_embeddings, table) = open(&folder.path().join("t"), &folder.path().join("disk"), "").unwrap();
    table.upsert(5, &[1], &row(1, 5), Reach::AtOnce).unwrap();
    table.delete(6, &[2], Reach::AtOnce).unwrap();
    folder
}

fn look(table: &EmbeddingTable) -> Result<Vec<f32>> {
    let (mut numbers, mut found) = (vec![f32::NAN; KEYS.len() * DIM], [false; KEYS.len()]);
    table.lookup(&KEYS, &mut numbers, &mut found, Miss::Wait)?;
    Ok(numbers)
}

fn with_updates() -> Vec<f32> {
    [row(1, 5), DEFAULT, row(3, 0), row(4, 0)].concat()
}

/// Opens it and looks at everything.
fn rows_of(source: &Path, disk: &Path, more: &str) -> Result<Vec<f32>> {
    let (_embeddings, table) = open(source, disk, more)?;
    look(&table)
}

/// The one file in a folder whose name ends so.
fn file(folder: &Path, ending: &str) -> PathBuf {
    let files = fs::read_dir(folder).unwrap().map(|item| item.unwrap().path());
    files.filter(|path| path.to_str().unwrap().ends_with(ending)).last().unwrap()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for item in fs::read_dir(from).unwrap() {
        let item = item.unwrap();
        let to = to.join(item.file_name());
        if item.path().is_dir() {
            copy(&item.path(), &to);
        } else {
            fs::copy(item.path(), to).unwrap();
        }
    }
}

#[test]
fn updates_travel_with_the_folder() {
    let folder = updated();
    // All of it is renamed.
    let new = Folder::new();
    let moved = new.path().join("moved");
    fs::rename(folder.path(), &moved).unwrap();
    fs::create_dir_all(folder.path()).unwrap();
    for read_only in ["", r#", "read_only": true"#, ""] {
        assert_eq!(rows_of(&moved.join("t"), &moved.join("disk"), read_only), Ok(with_updates()));
    }
    // Copied, while the first is still there.
    let copied = new.path().join("copied");
    copy(&moved, &copied);
    assert_eq!(rows_of(&copied.join("t"), &copied.join("disk"), ""), Ok(with_updates()));
    // The source alone, and the table files alone.
    fs::rename(moved.join("t"), moved.join("other")).unwrap();
    for read_only in [r#", "read_only": true"#, "", ""] {
        assert_eq!(rows_of(&moved.join("other"), &moved.join("disk"), read_only), Ok(with_updates()));
    }
    fs::create_dir_all(moved.join("deeper")).unwrap();
    fs::rename(moved.join("disk"), moved.join("deeper/disk")).unwrap();
    assert_eq!(rows_of(&moved.join("other"), &moved.join("deeper/disk"), ""), Ok(with_updates()));
    // Changes go on where they were.
    let (embeddings, table) = open(&moved.join("other"), &moved.join("deeper/disk"), "").unwrap();
    table.upsert(7, &[3], &row(3, 7), Reach::AtOnce).unwrap();
    drop((embeddings, table));
    let right = [row(1, 5), DEFAULT, row(3, 7), row(4, 0)].concat();
    assert_eq!(rows_of(&moved.join("other"), &moved.join("deeper/disk"), ""), Ok(right));
    assert_eq!(fs::read_dir(moved.join("deeper/disk")).unwrap().count(), 3, "the table, its note and its updates");
}

#[test]
fn a_copy_of_a_source_is_a_table_of_its_own() {
    let folder = updated();
    let at = |name: &str| folder.path().join(name);
    copy(&at("t"), &at("u"));
    assert_eq!(rows_of(&at("u"), &at("disk"), ""), Ok(rows(&KEYS, 0)));
    assert_eq!(rows_of(&at("t"), &at("disk"), ""), Ok(with_updates()));
    // The first is moved, and another source comes where it was.
    fs::rename(at("t"), at("v")).unwrap();
    assert_eq!(rows_of(&at("v"), &at("disk"), ""), Ok(with_updates()));
    write_source(&at("t"), 9);
    assert_eq!(rows_of(&at("t"), &at("disk"), ""), Ok(rows(&KEYS, 9)));
    for (name, right) in [("t", rows(&KEYS, 9)), ("u", rows(&KEYS, 0)), ("v", with_updates())] {
        assert_eq!(rows_of(&at(name), &at("disk"), ""), Ok(right), "{name}");
    }
}

#[test]
fn a_source_that_was_moved_before_another_was_put_in_its_place_keeps_its_updates() {
    let folder = updated();
    let at = |name: &str| folder.path().join(name);
    fs::rename(at("t"), at("v")).unwrap();
    write_source(&at("t"), 9);
    assert_eq!(rows_of(&at("v"), &at("disk"), ""), Ok(with_updates()));
    assert_eq!(rows_of(&at("t"), &at("disk"), ""), Ok(rows(&KEYS, 9)));
    assert_eq!(rows_of(&at("v"), &at("disk"), ""), Ok(with_updates()));
}

#[test]
fn tables_of_one_name_are_told_apart_when_their_folder_is_moved() {
    let folder = Folder::new();
    let at = |name: &str| folder.path().join(name);
    for version in 0..4 {
        let source = at(&format!("t{version}"));
        write_source(&source, version);
        let (_embeddings, table) = open(&source, &at("disk"), "").unwrap();
        table.upsert(10 + version, &[1], &row(1, 10 + version), Reach::AtOnce).unwrap();
    }
    fs::create_dir_all(at("deeper")).unwrap();
    fs::rename(at("disk"), at("deeper/disk")).unwrap();
    for version in (0..4).rev() {
        let right = [row(1, 10 + version), row(2, version), row(3, version), row(4, version)].concat();
        assert_eq!(rows_of(&at(&format!("t{version}")), &at("deeper/disk"), ""), Ok(right), "{version}");
    }
}

#[test]
fn a_source_that_was_moved_and_changed_says_what_was_found() {
    let folder = updated();
    let at = |name: &str| folder.path().join(name);
    fs::remove_dir_all(at("t")).unwrap();
    write_source(&at("u"), 9);
    let error = rows_of(&at("u"), &at("disk"), "").unwrap_err();
    let table = file(&at("disk"), ".table");
    for part in [table.to_str().unwrap(), at("u").to_str().unwrap(), "../t", "with updates", "remove"] {
        assert!(error.message().contains(part), "{part} in {error}");
    }
    let drop = r#", "drop_updates_on_source_change": true"#;
    assert_eq!(rows_of(&at("u"), &at("disk"), drop), Ok(rows(&KEYS, 9)));
    assert!(table.exists(), "it is left alone");
}

/// What damage may lead to: the updates, or an error that names the file.
fn is_safe(outcome: &Result<Vec<f32>>, damaged: &Path) -> bool {
    match outcome {
        Ok(found) => *found == with_updates(),
        Err(error) => error.message().contains(damaged.to_str().unwrap()),
    }
}

#[test]
fn a_note_that_is_damaged_or_lost_costs_no_update() {
    let folder = updated();
    let (source, disk) = (folder.path().join("t"), folder.path().join("disk"));
    let note = file(&disk, ".source");
    let good = fs::read(&note).unwrap();
    let read = || rows_of(&source, &disk, "");
    for bad in [None, Some(&b""[..]), Some(&good[..good.len() / 2]), Some(b"0123\n4567\n89")] {
        match bad {
            Some(bytes) => fs::write(&note, bytes).unwrap(),
            None => fs::remove_file(&note).unwrap(),
        }
        assert_eq!(read(), Ok(with_updates()), "{bad:?}");
        assert_eq!(fs::read(&note).unwrap(), good, "it is made anew");
    }
    for at in 0..good.len() {
        let mut bytes = good.clone();
        bytes[at] ^= 1 << (at % 8);
        fs::write(&note, bytes).unwrap();
        assert_eq!(read(), Ok(with_updates()), "byte {at}");
    }
    // One that the system can not read.
    fs::remove_file(&note).unwrap();
    fs::create_dir(&note).unwrap();
    let error = read().unwrap_err();
    assert!(error.message().contains(note.to_str().unwrap()) && error.message().contains("remove it"), "{error}");
    fs::remove_dir(&note).unwrap();
    assert_eq!(read(), Ok(with_updates()));
}

#[test]
fn a_table_file_that_is_damaged_or_lost_costs_no_update() {
    let folder = updated();
    let (source, disk) = (folder.path().join("t"), folder.path().join("disk"));
    let (table, updates) = (file(&disk, ".table"), file(&disk, ".updates"));
    let (good, good_updates) = (fs::read(&table).unwrap(), fs::read(&updates).unwrap());
    let read = || rows_of(&source, &disk, "");
    // Damage in the header is never a reason to build the table anew.
    let (mut random, mut refused) = (Random(1), 0);
    for at in (0..80).chain(120..150).chain(190..210).chain(1020..1045).chain(0..30) {
        let file = fs::File::options().write(true).open(&table).unwrap();
        file.write_all_at(&[good[at] ^ 1 << random.below(8)], at as u64).unwrap();
        let outcome = read();
        assert!(is_safe(&outcome, &table), "byte {at}: {outcome:?}");
        assert_eq!(fs::read(&updates).unwrap(), good_updates, "byte {at}");
        refused += usize::from(outcome.is_err());
        fs::write(&table, &good).unwrap();
    }
    assert!(refused >= 80, "{refused}");
    for bad in [&b""[..], b"no table", &good[..4200]] {
        fs::write(&table, bad).unwrap();
        let error = read().unwrap_err();
        assert!(error.message().contains(table.to_str().unwrap()) && error.message().contains("copy"), "{error}");
    }
    fs::remove_file(&table).unwrap();
    for option in ["", r#", "drop_updates_on_source_change": true"#] {
        let error = rows_of(&source, &disk, option).unwrap_err();
        let named = error.message().contains(updates.to_str().unwrap());
        assert!(named && error.message().contains("bring it back"), "{error}");
    }
    fs::write(&table, &good).unwrap();
    assert_eq!(read(), Ok(with_updates()));
}

#[test]
fn times_decide_nothing() {
    let folder = updated();
    let (source, disk) = (folder.path().join("t"), folder.path().join("disk"));
    let day = Duration::from_secs(86_400);
    let now = SystemTime::now();
    for time in [now + 3650 * day, now - day, SystemTime::UNIX_EPOCH - 7 * day, SystemTime::UNIX_EPOCH] {
        for name in ["key", "emb_vector"] {
            fs::File::options().append(true).open(source.join(name)).unwrap().set_modified(time).unwrap();
        }
        assert_eq!(rows_of(&source, &disk, ""), Ok(with_updates()), "{time:?}");
    }
    // Two times before 1970 are different times.
    write_source(&source, 9);
    for name in ["key", "emb_vector"] {
        let time = SystemTime::UNIX_EPOCH - 9 * day;
        fs::File::options().append(true).open(source.join(name)).unwrap().set_modified(time).unwrap();
    }
    let error = rows_of(&source, &disk, "").unwrap_err();
    assert_eq!(error.argument(), Some("persistent_db.drop_updates_on_source_change"), "{error}");
}

#[test]
fn a_folder_that_is_removed_while_it_is_open() {
    let refused = |error: Error| assert!(error.message().contains(".updates"), "{error}");
    for updates in [0, 1] {
        let folder = Folder::new();
        write_source(&folder.path().join("t"), 0);
        let (_embeddings, table) = open(&folder.path().join("t"), &folder.path().join("disk"), "").unwrap();
        for version in 0..updates {
            table.upsert(version + 1, &[1], &row(1, version + 1), Reach::AtOnce).unwrap();
        }
        let before = look(&table).unwrap();
        fs::remove_dir_all(folder.path().join("disk")).unwrap();
        assert_eq!(look(&table).unwrap(), before, "what is open can be read");
        // No update is acknowledged that can not be found again.
        refused(table.upsert(9, &[1], &row(1, 9), Reach::AtOnce).unwrap_err());
        refused(table.delete(9, &[2], Reach::AtOnce).unwrap_err());
        assert_eq!(look(&table).unwrap(), before);
    }
}
