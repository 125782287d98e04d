//! `pagoda store`: statistics, check and repair of a store.

use std::path::PathBuf;

use clap::Subcommand;
use pagoda::store::{CheckReport, DiskStore, StoreStats};
use pagoda::{Error, Result, Status, StoreOptions};

use crate::output;
use crate::progress::Progress;

/// The action and the store.
#[derive(clap::Args)]
#[command(after_help = "\
Example:
  pagoda store check /var/lib/ranker/histories || echo 'see what it says above'")]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show statistics of the store.
    #[command(after_help = "Example:\n  pagoda store stats /var/lib/ranker/histories --json")]
    Stats(Folder),
    /// Read everything and verify every checksum. Changes nothing; fails if something is damaged.
    #[command(after_help = "Example:\n  pagoda store check /var/lib/ranker/histories")]
    Check(Folder),
    /// Delete the index and rebuild it from the data files.
    #[command(after_help = "Example:\n  pagoda store rebuild /var/lib/ranker/histories")]
    Rebuild(Folder),
    /// Free the space of removed data.
    #[command(after_help = "Example:\n  pagoda store compact /var/lib/ranker/histories")]
    Compact(Folder),
}

#[derive(clap::Args)]
struct Folder {
    /// The store's folder. No other process may have it open.
    #[arg(value_hint = clap::ValueHint::DirPath)]
    path: PathBuf,
    /// One JSON object.
    #[arg(long)]
    json: bool,
}

/// Runs the action and prints its result.
pub fn run(arguments: &Arguments) -> Result<()> {
    match &arguments.command {
        Command::Stats(folder) => {
            let stats = open(folder)?.stats();
            print(folder, &rows(&stats))?;
        }
        Command::Check(folder) => {
            existing(folder)?;
            let report = during("checking", folder, || DiskStore::check(&folder.path))?;
            print(folder, &check_rows(&report))?;
            if !report.is_sound() {
                let advice = "what is damaged counts as not stored, and leaves when it is next read";
                return Err(Error::new(Status::Io, format!("{} is damaged: {advice}", folder.path.display())));
            }
        }
        Command::Rebuild(folder) => {
            existing(folder)?;
            let stats = during("making the index of", folder, || DiskStore::rebuild(&folder.path))?;
            print(folder, &rows(&stats))?;
        }
        Command::Compact(folder) => {
            let store = open(folder)?;
            let before = store.stats().file_bytes;
            during("compacting", folder, || store.compact())?;
            let stats = store.stats();
            let mut rows = rows(&stats);
            rows.push(("freed_bytes", before.saturating_sub(stats.file_bytes)));
            print(folder, &rows)?;
        }
    }
    Ok(())
}

fn open(folder: &Folder) -> Result<DiskStore> {
    existing(folder)?;
    during("opening", folder, || DiskStore::open(&folder.path, &StoreOptions::default()))
}

/// Does the work with a spinner on the terminal.
fn during<T>(doing: &str, folder: &Folder, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let _progress = Progress::spinner(format!("{doing} {}", folder.path.display()));
    work()
}

/// Opening creates a store if there is none. These commands must not.
fn existing(folder: &Folder) -> Result<()> {
    if folder.path.join("LOCK").exists() {
        return Ok(());
    }
    let message = format!("{} is not a store: give the folder that the application opens", folder.path.display());
    Err(Error::new(Status::NotFound, message))
}

type Rows = Vec<(&'static str, u64)>;

fn rows(stats: &StoreStats) -> Rows {
    vec![
        ("owners", stats.owners),
        ("records", stats.records),
        ("live_bytes", stats.live_bytes),
        ("file_bytes", stats.file_bytes),
        ("segments", stats.segments),
        ("corrupt_records", stats.corrupt_records),
        ("torn_tails", stats.torn_tails),
        ("damaged_regions", stats.damaged_regions),
        ("dropped_owners", stats.dropped_owners),
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

fn print(folder: &Folder, rows: &[(&'static str, u64)]) -> Result<()> {
    if folder.json {
        let fields: Vec<String> = rows.iter().map(|(name, value)| format!(r#""{name}":{value}"#)).collect();
        return output::line(format!("{{{}}}", fields.join(",")));
    }
    rows.iter().try_for_each(|(name, value)| output::line(format!("{:<18} {value:>16}", name.replace('_', " "))))
}
