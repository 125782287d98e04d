//! A disk in memory that remembers what is durable, can lose power at any moment of its past, and can fail.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use pagoda::store::disk::{Disk, DiskFile};
use pagoda::store::index::{Index, Pair};
use pagoda::{Error, Result, Status};
use pagoda_test_support::Random;
use pagoda_test_support::power::{self, apply};

/// What happened to the disk, in order, and what callers were told.
pub type Event = power::Event<Told>;

#[derive(Clone, Debug)]
pub enum Told {
    /// What the index held from then on, and whether that was durable.
    Index(Arc<BTreeMap<Vec<u8>, Vec<u8>>>, bool),
    /// That a state of an owner is durable.
    Acknowledged(u64, usize),
}

/// A disk as a loss of power after these events could leave it.
pub fn crash(events: &[Event], random: &mut Random) -> Simulated {
    Simulated::holding(power::crash(events, random).files)
}

/// Which calls fail, and how.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// The number of the first call that fails.
    pub from: u64,
    /// How many fail.
    pub count: u64,
    pub kind: io::ErrorKind,
    /// How much of a write that fails is written all the same, in 256ths.
    pub written: usize,
    /// Whether reads fail too.
    pub reads: bool,
}

#[derive(Default)]
struct State {
    names: BTreeMap<String, u64>,
    files: HashMap<u64, Vec<u8>>,
    events: Vec<Event>,
    next_file: u64,
    calls: u64,
    fault: Option<Fault>,
    only: Option<&'static str>,
    /// What failed, for messages and to know whether it was a read.
    failed: Vec<&'static str>,
    locked: bool,
    slow: bool,
}

/// The disk. Clones are the same disk.
#[derive(Clone, Default)]
pub struct Simulated(Arc<Mutex<State>>);

impl Simulated {
    /// A disk whose syncs take a moment, so that a too early acknowledgement is noticed.
    pub fn slow() -> Self {
        let disk = Self::default();
        disk.state().slow = true;
        disk
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no panic under it")
    }

    pub fn events(&self) -> Vec<Event> {
        self.state().events.clone()
    }

    pub fn note(&self, event: Event) {
        self.state().events.push(event);
    }

    pub fn set_fault(&self, fault: Option<Fault>) {
        let mut state = self.state();
        state.fault = fault;
        state.only = None;
        state.failed.clear();
        state.calls = 0;
    }

    /// As [`Simulated::set_fault`], for one kind of call alone.
    pub fn fail_only(&self, fault: Fault, what: &'static str) {
        self.set_fault(Some(fault));
        self.state().only = Some(what);
    }

    /// How many calls there were since the fault was set, and which failed.
    pub fn calls(&self) -> (u64, Vec<&'static str>) {
        let state = self.state();
        (state.calls, state.failed.clone())
    }

    /// Another disk with the files of this one, all durable.
    pub fn copy(&self) -> Self {
        let state = self.state();
        let contents = state.names.iter().map(|(name, id)| (name.clone(), state.files[id].clone())).collect();
        drop(state);
        Self::holding(contents)
    }

    /// A disk with these files, all durable.
    pub fn holding(contents: BTreeMap<String, Vec<u8>>) -> Self {
        let mut state = State::default();
        for (name, bytes) in contents {
            state.next_file += 1;
            let id = state.next_file;
            state.events.push(Event::Create(name.clone(), id));
            state.events.push(Event::Write(id, 0, bytes.clone()));
            state.events.push(Event::SyncFile(id));
            state.names.insert(name, id);
            state.files.insert(id, bytes);
        }
        state.events.push(Event::SyncFolder(String::new()));
        Self(Arc::new(Mutex::new(state)))
    }

    /// The disk after these events, as a process finds it that is started when the one before was killed: everything is
    /// there, and not everything is durable.
    pub fn replayed(events: &[Event]) -> Self {
        let mut state = State { events: events.to_vec(), ..State::default() };
        for event in events {
            match event {
                Event::Create(name, id) => {
                    state.names.insert(name.clone(), *id);
                    state.files.insert(*id, Vec::new());
                    state.next_file = state.next_file.max(*id);
                }
                Event::Remove(name) => drop(state.names.remove(name)),
                Event::Write(id, ..) | Event::Truncate(id, _) => {
                    apply(state.files.get_mut(id).expect("created"), event, None);
                }
                _ => {}
            }
        }
        Self(Arc::new(Mutex::new(state)))
    }

    /// Counts a call, and says whether it fails.
    fn call(&self, what: &'static str) -> io::Result<()> {
        let mut state = self.state();
        let reading = what == "view";
        if reading && !state.fault.is_some_and(|fault| fault.reads) || state.only.is_some_and(|only| only != what) {
            return Ok(());
        }
        let number = state.calls;
        state.calls += 1;
        match state.fault {
            Some(fault) if number >= fault.from && number - fault.from < fault.count => {
                state.failed.push(what);
                Err(fault.kind.into())
            }
            _ => Ok(()),
        }
    }
}

impl Disk for Simulated {
    fn path(&self) -> &Path {
        Path::new("/simulated")
    }

    fn make_folder(&self) -> io::Result<()> {
        self.call("make_folder")
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.call("list")?;
        Ok(self.state().names.keys().cloned().collect())
    }

    fn lock(&self) -> Result<Box<dyn Any + Send + Sync>> {
        let mut state = self.state();
        assert!(!state.locked, "two stores at once");
        state.locked = true;
        Ok(Box::new(Unlock(self.clone())))
    }

    fn create(&self, name: &str, _capacity: u64) -> io::Result<Box<dyn DiskFile>> {
        self.call("create")?;
        let mut state = self.state();
        if state.names.contains_key(name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        state.next_file += 1;
        let id = state.next_file;
        state.names.insert(name.to_owned(), id);
        state.files.insert(id, Vec::new());
        state.events.push(Event::Create(name.to_owned(), id));
        drop(state);
        Ok(Box::new(SimulatedFile { disk: self.clone(), id, views: Mutex::default() }))
    }

    fn open(&self, name: &str, _capacity: u64) -> io::Result<Box<dyn DiskFile>> {
        self.call("open")?;
        let id = *self.state().names.get(name).ok_or(io::ErrorKind::NotFound)?;
        Ok(Box::new(SimulatedFile { disk: self.clone(), id, views: Mutex::default() }))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.call("remove")?;
        let mut state = self.state();
        state.names.remove(name).ok_or(io::ErrorKind::NotFound)?;
        state.events.push(Event::Remove(name.to_owned()));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.call("sync of the folder")?;
        self.note(Event::SyncFolder(String::new()));
        Ok(())
    }
}

struct Unlock(Simulated);

impl Drop for Unlock {
    fn drop(&mut self) {
        self.0.state().locked = false;
    }
}

struct SimulatedFile {
    disk: Simulated,
    id: u64,
    /// Copies that views point to; none leaves before the file is dropped.
    views: Mutex<Vec<Box<[u8]>>>,
}

impl DiskFile for SimulatedFile {
    fn write_at(&self, offset: u64, parts: &[&[u8]]) -> io::Result<()> {
        let mut bytes = parts.concat();
        let outcome = self.disk.call("write");
        let mut state = self.disk.state();
        if outcome.is_err() {
            let written = state.fault.map_or(0, |fault| fault.written);
            bytes.truncate(bytes.len() * written / 256);
        }
        let event = Event::Write(self.id, offset, bytes);
        apply(state.files.get_mut(&self.id).expect("created"), &event, None);
        state.events.push(event);
        outcome
    }

    fn sync(&self) -> io::Result<()> {
        if self.disk.state().slow {
            std::thread::sleep(Duration::from_micros(300));
        }
        self.disk.call("sync")?;
        self.disk.note(Event::SyncFile(self.id));
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        self.disk.call("len")?;
        Ok(self.disk.state().files[&self.id].len() as u64)
    }

    fn truncate(&self, len: u64) -> io::Result<()> {
        self.disk.call("truncate")?;
        let mut state = self.disk.state();
        let event = Event::Truncate(self.id, len);
        apply(state.files.get_mut(&self.id).expect("created"), &event, None);
        state.events.push(event);
        Ok(())
    }

    fn view(&self, offset: u64, len: usize) -> io::Result<&[u8]> {
        self.disk.call("view")?;
        let copy: Box<[u8]> = {
            let state = self.disk.state();
            let bytes = &state.files[&self.id];
            let from = usize::try_from(offset).map_err(|_| io::ErrorKind::UnexpectedEof)?;
            let end = from.checked_add(len).ok_or(io::ErrorKind::UnexpectedEof)?;
            bytes.get(from..end).ok_or(io::ErrorKind::UnexpectedEof)?.into()
        };
        let mut views = self.views.lock().expect("no panic under it");
        let bytes: *const [u8] = &*copy;
        views.push(copy);
        // SAFETY: the box is neither changed nor dropped before `self` is, and moving it does not move what it holds.
        Ok(unsafe { &*bytes })
    }
}

/// An index in memory that tells the disk what it holds.
#[derive(Clone)]
pub struct Recorded {
    pub pairs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub disk: Simulated,
}

impl Recorded {
    /// Its calls fail with those of the disk: it lies on the same one.
    fn call(&self) -> Result<()> {
        self.disk.call("index").map_err(|error| Error::new(Status::Io, error.to_string()))
    }

    fn note(&self, durable: bool) {
        self.disk.note(Event::Told(Told::Index(Arc::new(self.pairs.clone()), durable)));
    }
}

impl Index for Recorded {
    fn load(&mut self) -> Result<Vec<Pair>> {
        self.call()?;
        Ok(self.pairs.clone().into_iter().collect())
    }

    fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.call()?;
        Ok(self.pairs.get(key).cloned())
    }

    fn apply(&mut self, changes: Vec<(Vec<u8>, Option<Vec<u8>>)>) -> Result<()> {
        self.call()?;
        for (key, value) in changes {
            match value {
                Some(value) => drop(self.pairs.insert(key, value)),
                None => drop(self.pairs.remove(&key)),
            }
        }
        self.note(false);
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.call()?;
        self.note(true);
        Ok(())
    }

    fn wipe(&mut self) -> Result<()> {
        self.call()?;
        self.pairs.clear();
        self.note(true);
        Ok(())
    }
}
