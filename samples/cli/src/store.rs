//! `pagoda store`: what a store holds, whether it is whole, and making it so.

use std::path::PathBuf;

use clap::Subcommand;
use pagoda::store::{CheckReport, DiskStore, Stats};
use pagoda::{Error, Result, Status, StoreOptions};

/// What to do with which store.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Say what the store holds.
    Stats(Folder),
    /// Read everything and verify every checksum. Changes nothing; fails if something is damaged.
    Check(Folder),
    /// Throw the index away and make it anew from the data files.
    Rebuild(Folder),
    /// Give the space of removed data back.
    Compact(Folder),
}

#[derive(clap::Args)]
struct Folder {
    /// The store's folder. No other process may have it open.
    path: PathBuf,
    /// One JSON object.
    #[arg(long)]
    json: bool,
}

/// Does what the arguments ask for and prints what came of it.
pub fn run(arguments: &Arguments) -> Result<()> {
    match &arguments.command {
        Command::Stats(folder) => {
            let stats = open(folder)?.stats();
            print(folder, &rows(&stats));
        }
        Command::Check(folder) => {
            existing(folder)?;
            let report = DiskStore::check(&folder.path)?;
            print(folder, &check_rows(&report));
            if !report.is_sound() {
                let advice = "what is damaged counts as not stored, and leaves when it is next read";
                return Err(Error::new(Status::Io, format!("{} is damaged: {advice}", folder.path.display())));
            }
        }
        Command::Rebuild(folder) => {
            existing(folder)?;
            let stats = DiskStore::rebuild(&folder.path)?;
            print(folder, &rows(&stats));
        }
        Command::Compact(folder) => {
            let store = open(folder)?;
            let before = store.stats().file_bytes;
            store.compact()?;
            let stats = store.stats();
            let mut rows = rows(&stats);
            rows.push(("freed_bytes", before.saturating_sub(stats.file_bytes)));
            print(folder, &rows);
        }
    }
    Ok(())
}

fn open(folder: &Folder) -> Result<DiskStore> {
    existing(folder)?;
    DiskStore::open(&folder.path, &StoreOptions::default())
}

/// Opening makes a store where there is none, which no one wants who asks after one.
fn existing(folder: &Folder) -> Result<()> {
    if folder.path.join("LOCK").exists() {
        return Ok(());
    }
    let message = format!("{} is not a store: give the folder that the application opens", folder.path.display());
    Err(Error::new(Status::NotFound, message))
}

type Rows = Vec<(&'static str, u64)>;

fn rows(stats: &Stats) -> Rows {
    vec![
        ("users", stats.users),
        ("records", stats.records),
        ("live_bytes", stats.live_bytes),
        ("file_bytes", stats.file_bytes),
        ("segments", stats.segments),
        ("corrupt_records", stats.corrupt_records),
        ("torn_tails", stats.torn_tails),
        ("damaged_regions", stats.damaged_regions),
        ("dropped_users", stats.dropped_users),
        ("index_rebuilds", stats.index_rebuilds),
    ]
}

fn check_rows(report: &CheckReport) -> Rows {
    vec![
        ("segments", report.segments),
        ("file_bytes", report.file_bytes),
        ("records", report.records),
        ("removals", report.removals),
        ("corrupt_records", report.corrupt_records),
        ("torn_tails", report.torn_tails),
        ("damaged_regions", report.damaged_regions),
    ]
}

fn print(folder: &Folder, rows: &[(&'static str, u64)]) {
    if folder.json {
        let fields: Vec<String> = rows.iter().map(|(name, value)| format!(r#""{name}":{value}"#)).collect();
        println!("{{{}}}", fields.join(","));
        return;
    }
    for (name, value) in rows {
        println!("{:<18} {value:>16}", name.replace('_', " "));
    }
}
