//! A log callback may call the store that it is told about.

use std::cell::RefCell;
use std::fs;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use pagoda::StoreOptions;
use pagoda::store::{DiskStore, Room, Store};
use pagoda_test_support::Folder;

use crate::workload::{read, record};

thread_local! {
    /// The store that the log callback of this thread calls, and the lines that it got.
    static ASKED: RefCell<Option<(Arc<DiskStore>, Vec<String>)>> = const { RefCell::new(None) };
}

struct Listener;

impl log::Log for Listener {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        ASKED.with_borrow_mut(|asked| {
            if let Some((store, said)) = asked {
                said.push(format!("{} ({} records)", record.args(), store.stats().records));
            }
        });
    }

    fn flush(&self) {}
}

#[test]
fn a_log_callback_may_ask_for_statistics_of_a_damaged_store() {
    log::set_logger(&Listener).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    let folder = Folder::new();
    let open = || DiskStore::open(folder.path(), &StoreOptions::default()).unwrap();
    let (damaged, store) = (record(1, 0, 0, 5, 21), open());
    for written in [&damaged, &record(2, 0, 0, 5, 22)] {
        store.write(written.clone(), Room::Wait).unwrap().wait().unwrap();
    }
    drop(store);
    let files = fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path());
    let segment = files.into_iter().find(|path| path.extension().is_some_and(|it| it == "pgd")).unwrap();
    let mut bytes = fs::read(&segment).unwrap();
    let at = bytes.windows(damaged.data.len()).position(|some| some == damaged.data).unwrap();
    bytes[at] ^= 1;
    fs::write(&segment, bytes).unwrap();

    let store = Arc::new(open());
    let (tell, told) = channel();
    std::thread::spawn(move || {
        ASKED.set(Some((Arc::clone(&store), Vec::new())));
        let outcome = read(&store, 1).is_ok();
        tell.send((outcome, ASKED.take().map(|(_, said)| said))).unwrap();
    });
    let (read, said) = told.recv_timeout(Duration::from_secs(60)).expect("it hangs");
    let said = said.unwrap_or_default();
    assert!(!read && said.len() == 1 && said[0].contains("owner 1") && said[0].contains("is damaged"), "{said:?}");
}
