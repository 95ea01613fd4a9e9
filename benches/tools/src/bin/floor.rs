//! The physical floor under save and restore: BLAKE3 over the bytes on every core, with or without writing them again.
//!
//! `floor read SRC` hashes every file below SRC; `floor write SRC DST` also writes the same bytes below DST in 64 MiB
//! files, as packs are. `floor load SRC` reads them into memory, which the system has provided before, and prints the seconds
//! without that. Nothing else: no cutting, no lookup, no format.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

const PIECE: u64 = 8 << 20;
/// As long as chunks of tensors.
const LOADED_PIECE: u64 = 512 << 10;
const PACK: u64 = 64 << 20;

fn main() -> std::io::Result<()> {
    let args: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let (source, dest) = match args.as_slice() {
        [mode, source] if mode.as_os_str() == "load" => return load(source),
        [mode, source] if mode.as_os_str() == "read" => (source, None),
        [mode, source, dest] if mode.as_os_str() == "write" => (source, Some(dest.as_path())),
        _ => return Err(std::io::Error::other("usage: floor read SRC | floor load SRC | floor write SRC DST")),
    };
    if let Some(dest) = dest {
        std::fs::create_dir_all(dest)?;
    }
    let stretches = stretches(source, PACK)?;
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..workers()).map(|_| scope.spawn(|| work(&stretches, &next, dest))).collect();
        running.into_iter().try_for_each(|worker| worker.join().map_err(|_| std::io::Error::other("a worker died"))?)
    })
}

/// Reads every file below `source` into one piece of memory, and hashes it there.
fn load(source: &Path) -> std::io::Result<()> {
    let stretches = stretches(source, LOADED_PIECE)?;
    let len: u64 = stretches.iter().map(|(_, _, len)| len).sum();
    // Not zeros, which the system provides only when they are written.
    let mut memory = vec![1; usize::try_from(len).unwrap_or(usize::MAX)];
    let began = Instant::now();
    let (mut rest, mut pieces) = (memory.as_mut_slice(), Vec::new());
    for (path, start, len) in stretches {
        let (piece, after) = rest.split_at_mut(usize::try_from(len).unwrap_or(usize::MAX));
        pieces.push((path, start, piece));
        rest = after;
    }
    let pieces = Mutex::new(pieces.into_iter());
    let worker = || -> std::io::Result<()> {
        loop {
            let next = pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((path, start, piece)) = next else { return Ok(()) };
            File::open(path)?.read_exact_at(piece, start)?;
            std::hint::black_box(blake3::hash(piece));
        }
    };
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..workers()).map(|_| scope.spawn(worker)).collect();
        running.into_iter().try_for_each(|worker| worker.join().map_err(|_| std::io::Error::other("a worker died"))?)
    })?;
    writeln!(std::io::stdout(), "{:.6}", began.elapsed().as_secs_f64())
}

fn workers() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Every file below `root`, in stretches of `most` bytes at most.
fn stretches(root: &Path, most: u64) -> std::io::Result<Vec<(PathBuf, u64, u64)>> {
    let (mut found, mut folders) = (Vec::new(), vec![root.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let entry = entry?;
            let meta = entry.metadata()?;
            if meta.is_dir() {
                folders.push(entry.path());
            } else {
                let starts = (0..meta.len()).step_by(usize::try_from(most).unwrap_or(usize::MAX));
                found.extend(starts.map(|start| (entry.path(), start, most.min(meta.len() - start))));
            }
        }
    }
    Ok(found)
}

fn work(stretches: &[(PathBuf, u64, u64)], next: &AtomicUsize, dest: Option<&Path>) -> std::io::Result<()> {
    let mut buffer = vec![0; usize::try_from(PIECE).unwrap_or(usize::MAX)];
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let Some((path, start, len)) = stretches.get(number) else { return Ok(()) };
        let file = File::open(path)?;
        let mut out = dest.map(|dest| File::create(dest.join(number.to_string()))).transpose()?;
        let mut at = *start;
        while at < start + len {
            let n = usize::try_from(PIECE.min(start + len - at)).unwrap_or(0);
            let piece = buffer.get_mut(..n).unwrap_or_default();
            file.read_exact_at(piece, at)?;
            std::hint::black_box(blake3::hash(piece));
            if let Some(out) = &mut out {
                out.write_all(piece)?;
            }
            at += n as u64;
        }
    }
}
