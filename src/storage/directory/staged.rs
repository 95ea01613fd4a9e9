//! An object that is being written: staged beside its place, synced, and published.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;

use object_store::{Extensions, PutPayload, PutResult};
use rustix::fs::{AtFlags, fstat, linkat, renameat, unlinkat};

use super::modes::Modes;
use super::root::Place;
use super::{blocks, list};

/// Minimum bytes of an object that is written with direct I/O.
pub(super) const LARGE: usize = 2 << 20;

/// A staging file, removed on drop unless it was published.
#[derive(Debug)]
pub(super) struct StagedObject {
    file: File,
    place: Place,
    name: String,
    /// True once the name is gone: another writer may have taken it.
    is_published: bool,
}

impl StagedObject {
    /// Creates an empty one for `place`.
    pub(super) fn create(place: Place, modes: Modes) -> io::Result<Self> {
        let mut number = 1;
        loop {
            let name = format!("{}#{number}", place.name);
            match place.create_beside(&name, modes.file) {
                Ok(file) => {
                    let staged = Self { file, place, name, is_published: false };
                    // Whatever the umask is.
                    modes.set_open_file(&staged.file)?;
                    return Ok(staged);
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
                Err(error) => return Err(error),
            }
        }
    }

    /// Writes the whole object.
    pub(super) fn write(&mut self, payload: &PutPayload) -> io::Result<()> {
        if payload.content_length() >= LARGE {
            return blocks::write(&self.file, payload);
        }
        payload.iter().try_for_each(|piece| self.file.write_all(piece))
    }

    /// Writes a part of the object from byte `at` on.
    pub(super) fn write_part(&self, part: &PutPayload, mut at: u64) -> io::Result<()> {
        for piece in part {
            self.file.write_all_at(piece, at)?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    /// Publishes the object, durably: in the place of another one, or only if there is none.
    ///
    /// # Errors
    /// Already exists; errors of the file system.
    pub(super) fn publish(mut self, replace: bool) -> io::Result<PutResult> {
        self.file.sync_all()?;
        let folder = &self.place.folder;
        if replace {
            renameat(folder, &self.name, folder, &self.place.name)?;
        } else {
            // Unlike a rename, a link never replaces anything.
            linkat(folder, &self.name, folder, &self.place.name, AtFlags::empty())?;
            unlinkat(folder, &self.name, AtFlags::empty())?;
        }
        self.is_published = true;
        self.place.sync_folder()?;
        let e_tag = Some(list::e_tag(&fstat(&self.file)?));
        Ok(PutResult { e_tag, version: None, extensions: Extensions::default() })
    }
}

impl Drop for StagedObject {
    fn drop(&mut self) {
        if !self.is_published {
            // Best effort: a leftover only costs space.
            let _ = unlinkat(&self.place.folder, &self.name, AtFlags::empty());
        }
    }
}
