//! Saves two steps of a run, lists them, and restores the best one: `cargo run --example save_restore [REPOSITORY]`.
//!
//! The repository is a folder or `s3://BUCKET/PREFIX`; by default a temporary folder, which is removed at the end.

use std::error::Error;
use std::path::Path;

use towline::ops::{RestoreOptions, SaveOptions};
use towline::repository::log::StepFacts;
use towline::repository::{OpenOptions, Repository};
use towline::storage::{Location, StoreOptions, open};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let scratch = tempfile::tempdir()?;
    let location: Location = match std::env::args().nth(1) {
        Some(given) => given.parse()?,
        None => Location::directory(scratch.path().join("repository"))?,
    };
    run(&location, scratch.path()).await
}

/// Runs the example with the repository at `location`; local files are in the folder `scratch`.
#[expect(clippy::print_stdout, reason = "an example shows what it does")]
pub(crate) async fn run(location: &Location, scratch: &Path) -> Result<(), Box<dyn Error>> {
    let store = open(location, &StoreOptions { create: true, ..StoreOptions::default() }).await?;
    let (repository, _) = Repository::create(store, OpenOptions::default()).await?;

    let checkpoint = scratch.join("checkpoint");
    std::fs::create_dir_all(&checkpoint)?;
    for (step, loss) in [(1000, 0.31), (2000, 0.12)] {
        std::fs::write(checkpoint.join("weights.bin"), vec![u8::try_from(step / 1000)?; 1 << 20])?;
        let options = SaveOptions { facts: StepFacts::default().metric("loss", loss)?, ..SaveOptions::default() };
        let name = format!("run-7/step-{step}").parse()?;
        let report = repository.save(checkpoint.as_path(), &name, &options).await?;
        println!("saved {name}: {} of {} bytes are new", report.new_bytes, report.logical_bytes);
    }

    for listed in repository.list(None).await? {
        println!("{}: {} bytes", listed.name, listed.bytes);
    }
    let best = repository.resolve(&"run-7@min=loss".parse()?).await?;
    let restored = scratch.join("restored");
    repository.restore(&best, None, &restored, &RestoreOptions::default()).await?;
    println!("restored {best}: {} bytes", std::fs::metadata(restored.join("weights.bin"))?.len());
    Ok(())
}
