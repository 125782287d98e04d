//! What a loss of power can leave of a disk: each thing under way arrives, does not, or does in part.

use std::collections::{BTreeMap, HashMap};

use pagoda_test_support::Random;

use crate::simulated::{Event, Simulated};

/// What arrives as a whole or not at all.
const SECTOR: usize = 512;

/// A disk as a loss of power after these events could leave it.
pub fn crash(events: &[Event], random: &mut Random) -> Simulated {
    let mut durable: BTreeMap<String, u64> = BTreeMap::new();
    let mut folder: Vec<&Event> = Vec::new();
    let mut files: HashMap<u64, (Vec<u8>, Vec<&Event>)> = HashMap::new();
    for event in events {
        match event {
            Event::Create(_, id) => {
                files.insert(*id, Default::default());
                folder.push(event);
            }
            Event::Remove(_) => folder.push(event),
            Event::SyncFolder => folder.drain(..).for_each(|event| enact(&mut durable, event)),
            Event::Write(id, ..) | Event::Truncate(id, _) => files.get_mut(id).expect("created").1.push(event),
            Event::SyncFile(id) => {
                let (bytes, pending) = files.get_mut(id).expect("created");
                pending.drain(..).for_each(|event| apply(bytes, event, None));
            }
            Event::Index(..) | Event::Acknowledged(..) => {}
        }
    }
    // Now and then nothing that was under way arrives, or all of it.
    let mood = random.below(6);
    let keep = |random: &mut Random| mood == 1 || (mood != 0 && random.once_in(2));
    for event in folder {
        if keep(random) {
            enact(&mut durable, event);
        }
    }
    let mut contents = BTreeMap::new();
    for (name, id) in durable {
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
        contents.insert(name, bytes);
    }
    Simulated::holding(contents)
}

fn enact(names: &mut BTreeMap<String, u64>, event: &Event) {
    match event {
        Event::Create(name, id) => drop(names.insert(name.clone(), *id)),
        Event::Remove(name) => drop(names.remove(name)),
        _ => {}
    }
}

fn reach(event: &Event) -> usize {
    match event {
        Event::Write(_, offset, bytes) => *offset as usize + bytes.len(),
        _ => 0,
    }
}

/// Does what an event did to a file; torn if there is a source of chance.
pub fn apply(bytes: &mut Vec<u8>, event: &Event, torn: Option<&mut Random>) {
    match event {
        Event::Truncate(_, len) => bytes.truncate(*len as usize),
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

/// A beginning of a write, or one with sectors that never arrived.
fn tear(old: &[u8], from: usize, data: &mut Vec<u8>, random: &mut Random) {
    if random.once_in(2) {
        let length = random.below(data.len() + 1);
        return data.truncate(length);
    }
    // Sectors are those of the disk, not of the write.
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
