//! Slabs: preallocated files of one length, which contain extents.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use super::allocator::UNIT;
use super::medium::{Medium, MediumFile};

/// The slab files of one cache, by number.
#[derive(Debug)]
pub(super) struct Slabs {
    dir: PathBuf,
    slab_len: u64,
    files: RwLock<Vec<Option<Arc<dyn MediumFile>>>>,
}

impl Slabs {
    /// Opens complete slabs in `dir`, and removes others. Returns their numbers, too.
    pub(super) fn open(medium: &dyn Medium, dir: &Path, slab_len: u64) -> io::Result<(Self, Vec<usize>)> {
        let (mut files, mut numbers) = (Vec::new(), Vec::new());
        for (name, len) in medium.names(dir)? {
            let Some(number) = number(&name) else { continue };
            let path = dir.join(&name);
            if len != slab_len {
                tracing::warn!("slab {} of the cache has {len} bytes, not {slab_len}: dropped", path.display());
                medium.remove(&path)?;
                continue;
            }
            if number >= files.len() {
                files.resize(number + 1, None);
            }
            files[number] = Some(medium.open(&path, false)?);
            numbers.push(number);
        }
        Ok((Self { dir: dir.to_owned(), slab_len, files: RwLock::new(files) }, numbers))
    }

    /// Creates slab `number` with its full length; after an error it does not exist.
    pub(super) fn add(&self, medium: &dyn Medium, number: usize) -> io::Result<()> {
        let path = self.path(number);
        let file = medium.open(&path, true)?;
        if let Err(error) = file.allocate(self.slab_len) {
            if let Err(error) = medium.remove(&path) {
                tracing::warn!("slab {} of the cache cannot be taken away: {error}", path.display());
            }
            return Err(error);
        }
        let mut files = self.files.write().unwrap_or_else(PoisonError::into_inner);
        if number >= files.len() {
            files.resize(number + 1, None);
        }
        files[number] = Some(file);
        Ok(())
    }

    /// Removes slab `number`; reads in progress can continue.
    pub(super) fn remove(&self, medium: &dyn Medium, number: usize) -> io::Result<()> {
        medium.remove(&self.path(number))?;
        if let Some(file) = self.files.write().unwrap_or_else(PoisonError::into_inner).get_mut(number) {
            *file = None;
        }
        Ok(())
    }

    /// Reads from a place.
    pub(super) fn read(&self, place: u32, buffer: &mut [u8]) -> io::Result<()> {
        self.read_within(place, 0, buffer)
    }

    /// Reads from byte `offset` of a place on.
    pub(super) fn read_within(&self, place: u32, offset: usize, buffer: &mut [u8]) -> io::Result<()> {
        let (file, at) = self.find(place)?;
        file.read_at(buffer, at + offset as u64)
    }

    /// Writes `parts` to a place.
    pub(super) fn write(&self, place: u32, parts: &[&[u8]]) -> io::Result<()> {
        let (file, at) = self.find(place)?;
        file.write_at(parts, at)
    }

    /// Syncs all slabs: written bytes then survive a power loss.
    pub(super) fn sync(&self) -> io::Result<()> {
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner).clone();
        files.iter().flatten().try_for_each(|file| file.sync())
    }

    /// The file of slab `number`.
    pub(super) fn path(&self, number: usize) -> PathBuf {
        self.dir.join(format!("slab-{number:06}"))
    }

    fn find(&self, place: u32) -> io::Result<(Arc<dyn MediumFile>, u64)> {
        let byte = u64::from(place) * UNIT;
        let number = usize::try_from(byte / self.slab_len).unwrap_or(usize::MAX);
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        let file = files.get(number).and_then(Option::as_ref).ok_or(io::ErrorKind::NotFound)?;
        Ok((Arc::clone(file), byte % self.slab_len))
    }
}

/// The number in a slab's name.
fn number(name: &str) -> Option<usize> {
    let digits = name.strip_prefix("slab-").filter(|digits| digits.len() == 6)?;
    digits.parse().ok()
}
