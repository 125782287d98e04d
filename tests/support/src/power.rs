//! The possible states of a disk after a loss of power, computed from a record of all operations on it. Synced changes
//! are there. Every other change arrives, does not arrive, or arrives in part.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use crate::Random;

/// A sector: it arrives as a whole or not at all.
const SECTOR: usize = 512;

/// One operation on a disk, in order. Names are paths from its root; files have numbers.
#[derive(Clone, Debug)]
pub enum Event<T> {
    /// A file was created.
    Create(String, u64),
    /// A folder was created.
    MakeFolder(String),
    /// A file or an empty folder was removed.
    Remove(String),
    /// A file was renamed, possibly over another one.
    Rename(String, String),
    /// The names in a folder became durable; the root's name is empty.
    SyncFolder(String),
    /// Bytes were written to a file, at an offset.
    Write(u64, u64, Vec<u8>),
    /// A file got another length.
    Truncate(u64, u64),
    /// A file's contents became durable.
    SyncFile(u64),
    /// An update was acknowledged.
    Told(T),
}

/// The files and folders of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    /// The content of each file.
    pub files: BTreeMap<String, Vec<u8>>,
    /// The folders below the root.
    pub folders: BTreeSet<String>,
}

impl Image {
    /// Writes it all below a folder.
    pub fn write(&self, root: &Path) {
        for folder in &self.folders {
            std::fs::create_dir_all(root.join(folder)).expect("a test can write");
        }
        for (name, bytes) in &self.files {
            std::fs::write(root.join(name), bytes).expect("a test can write");
        }
    }
}

#[derive(Clone, Copy)]
enum Entry {
    File(u64),
    Folder,
}

type Names = BTreeMap<String, Entry>;

/// A disk after the process was killed: every change is there.
pub fn killed<T>(events: &[Event<T>]) -> Image {
    let (mut names, mut files) = (Names::new(), HashMap::<u64, Vec<u8>>::new());
    for event in events {
        enact(&mut names, event);
        if let Some(id) = written(event) {
            apply(files.entry(id).or_default(), event, None);
        }
    }
    image(names, |id| files.get(&id).cloned().unwrap_or_default())
}

/// A disk as a loss of power after these events could leave it.
pub fn crash<T>(events: &[Event<T>], random: &mut Random) -> Image {
    let mut durable = Names::new();
    // By folder: the names that changed since its last sync.
    let mut changed: BTreeMap<&str, Vec<&Event<T>>> = BTreeMap::new();
    let mut files: HashMap<u64, (Vec<u8>, Vec<&Event<T>>)> = HashMap::new();
    for event in events {
        match event {
            Event::Create(name, _) | Event::MakeFolder(name) | Event::Remove(name) | Event::Rename(_, name) => {
                changed.entry(folder_of(name)).or_default().push(event);
            }
            Event::SyncFolder(folder) => {
                changed.remove(folder.as_str()).into_iter().flatten().for_each(|event| enact(&mut durable, event));
            }
            Event::Write(id, ..) | Event::Truncate(id, _) => files.entry(*id).or_default().1.push(event),
            Event::SyncFile(id) => {
                let (bytes, pending) = files.entry(*id).or_default();
                pending.drain(..).for_each(|event| apply(bytes, event, None));
            }
            Event::Told(_) => {}
        }
    }
    // Sometimes none of the pending changes arrive, or all of them.
    let mood = random.below(6);
    let keep = |random: &mut Random| mood == 1 || (mood != 0 && random.once_in(2));
    for event in changed.into_values().flatten() {
        if keep(random) {
            enact(&mut durable, event);
        }
    }
    image(durable, |id| {
        let (mut bytes, pending) = files.remove(&id).unwrap_or_default();
        let longest = pending.iter().map(|event| reach(event)).max().unwrap_or(0);
        for event in pending {
            if keep(random) {
                let whole = mood == 1 || random.once_in(2);
                apply(&mut bytes, event, if whole { None } else { Some(random) });
            }
        }
        if longest > bytes.len() && mood > 1 && random.once_in(4) {
            // The length arrived and the data did not.
            bytes.resize(longest, 0);
        }
        bytes
    })
}

/// All files with a name, except below a folder whose name is lost.
fn image(names: Names, mut contents: impl FnMut(u64) -> Vec<u8>) -> Image {
    let mut image = Image::default();
    // A folder sorts before its content.
    for (name, entry) in names {
        let folder = folder_of(&name);
        if !folder.is_empty() && !image.folders.contains(folder) {
            continue;
        }
        match entry {
            Entry::Folder => drop(image.folders.insert(name)),
            Entry::File(id) => drop(image.files.insert(name, contents(id))),
        }
    }
    image
}

fn folder_of(name: &str) -> &str {
    name.rsplit_once('/').map_or("", |(folder, _)| folder)
}

fn enact<T>(names: &mut Names, event: &Event<T>) {
    match event {
        Event::Create(name, id) => drop(names.insert(name.clone(), Entry::File(*id))),
        Event::MakeFolder(name) => drop(names.insert(name.clone(), Entry::Folder)),
        Event::Remove(name) => drop(names.remove(name)),
        Event::Rename(from, to) => {
            if let Some(entry) = names.remove(from) {
                names.insert(to.clone(), entry);
            }
        }
        _ => {}
    }
}

/// Which file an event changed.
fn written<T>(event: &Event<T>) -> Option<u64> {
    match event {
        Event::Write(id, ..) | Event::Truncate(id, _) => Some(*id),
        _ => None,
    }
}

fn reach<T>(event: &Event<T>) -> usize {
    match event {
        Event::Write(_, offset, bytes) => *offset as usize + bytes.len(),
        _ => 0,
    }
}

/// Applies an event to a file; in part if there is a random source.
pub fn apply<T>(bytes: &mut Vec<u8>, event: &Event<T>, torn: Option<&mut Random>) {
    match event {
        Event::Truncate(_, len) => bytes.resize(*len as usize, 0),
        Event::Write(_, offset, data) => {
            let (from, mut data) = (*offset as usize, data.clone());
            if let Some(random) = torn {
                tear(bytes, from, &mut data, random);
            }
            if !data.is_empty() {
                let end = bytes.len().max(from + data.len());
                bytes.resize(end, 0);
                bytes[from..from + data.len()].copy_from_slice(&data);
            }
        }
        _ => {}
    }
}

/// A prefix of a write, or a write with missing sectors.
fn tear(old: &[u8], from: usize, data: &mut Vec<u8>, random: &mut Random) {
    if random.once_in(2) {
        let length = random.below(data.len() + 1);
        return data.truncate(length);
    }
    // Sectors of the disk, not of the write.
    let mut at = 0;
    while at < data.len() {
        let next = ((from + at) / SECTOR * SECTOR + SECTOR - from).min(data.len());
        match random.below(6) {
            0 => data[at..next].fill(0),
            1 => (at..next).for_each(|at| data[at] = old.get(from + at).copied().unwrap_or(0)),
            2 => data[at..next].iter_mut().for_each(|byte| *byte = random.bits() as u8),
            _ => {}
        }
        at = next;
    }
}
