//! Further names of files that a save reads: hard links. A file is read once, however many names it has, and its other names get
//! the same pieces. It must be unchanged when it has been read, and then by each of its names.

use std::collections::HashMap;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::Saving;
use super::assemble::{Assembly, PIECE};
use super::detect::Formats;
use super::source::{check_unchanged, open};
use super::store::Counts;
use super::units::{FileDetails, details};
use crate::chunker::Cut;
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::format::{EntryKind, TensorEntry};
use crate::tree::Walk;
use crate::work::blocking;

/// Device, inode, length, and times of the last changes of content and of metadata.
type Identity = (u64, u64, u64, Timestamp, Timestamp);

/// Names that are not read.
#[derive(Debug)]
pub(super) struct HardLinks(Vec<HardLink>);

/// A name that is not read.
#[derive(Debug)]
struct HardLink {
    file: usize,
    /// The file that is read.
    first: usize,
    /// Its tensors, if metadata beside one of both names describes them; else they are those of the other name.
    tensors: Option<Vec<TensorEntry>>,
}

impl HardLinks {
    /// Divides the files `to_read` into those that are read and further names of these. All are opened before any is read: doubts
    /// about a file's times are kept by its names.
    pub(super) async fn find(saving: &Saving<'_>, to_read: Vec<usize>) -> Result<(Vec<usize>, Self)> {
        let (walk, formats) = (Arc::clone(&saving.walk), Arc::clone(&saving.formats));
        let stop = saving.options.stop.child_token();
        // A dropped save stops the thread, too.
        let _stops = stop.clone().drop_guard();
        let find = move || {
            let (to_read, further) = separate(&walk, to_read);
            let look = |(file, first)| look(&walk, &formats, (file, first), &stop);
            Ok((to_read, Self(further.into_iter().map(look).collect::<Result<_>>()?)))
        };
        blocking(find).await
    }

    /// Adds them to the assembly, once the other files have been read.
    ///
    /// # Errors
    /// Conflict, if a file has changed; exhausted, if their pieces take too much memory; cancelled.
    pub(super) async fn add(
        self,
        saving: &Saving<'_>,
        near: usize,
        assembly: &mut Assembly,
        counts: &mut Counts,
    ) -> Result<()> {
        let (walk, stop) = (Arc::clone(&saving.walk), saving.options.stop.child_token());
        let _stops = stop.clone().drop_guard();
        let links = blocking(move || self.check(&walk, &stop)).await?;
        // The assembly counts them for callers. For the user, few bytes on the disk must not become very many pieces.
        let mut memory = saving.chunk_memory().is_none().then(|| saving.memory());
        // Bytes of the list of tensors of each file that was read: a file of very many tensors may have very many names.
        let mut lists = HashMap::new();
        for HardLink { file, first, tensors } in links {
            go_on(&saving.options.stop)?;
            let Some(EntryKind::File(read)) = assembly.manifest().entries.get(first).map(|entry| &entry.kind) else {
                return Err(Error::other("a hard link is of no file"));
            };
            let (pieces, size) = (read.pieces.len(), read.size);
            let weigh = || read.tensors.iter().map(TensorEntry::weight).sum::<usize>() as u64;
            let list = *lists.entry(first).or_insert_with(weigh);
            let details = match tensors {
                Some(tensors) => FileDetails { cut: read.cut, tensors },
                None if saving.formats.try_keep_tensors(list) => {
                    FileDetails { cut: read.cut, tensors: read.tensors.clone() }
                }
                None => FileDetails { cut: Cut::Content, tensors: Vec::new() },
            };
            if let Some(memory) = &mut memory {
                memory.add(pieces as u64 * PIECE)?;
            }
            assembly.count(near, pieces)?;
            assembly.describe(file, details);
            assembly.copy_pieces(first, file);
            if let Some(explanation) = &mut counts.explanation {
                for (start, len) in assembly.placed(file) {
                    explanation.present(assembly, file, start, len);
                }
            }
            saving.options.progress.advance(size);
        }
        counts.links_memory = memory;
        Ok(())
    }

    /// Checks that the files still are as they were found. Blocking.
    fn check(self, walk: &Walk, stop: &CancellationToken) -> Result<Vec<HardLink>> {
        for link in &self.0 {
            go_on(stop)?;
            let Some(found) = walk.found.get(link.file) else { continue };
            check_unchanged(&open(walk, found)?, found)?;
        }
        Ok(self.0)
    }
}

/// Looks at a further name of the file `first`. Blocking.
fn look(walk: &Walk, formats: &Formats, (file, first): (usize, usize), stop: &CancellationToken) -> Result<HardLink> {
    go_on(stop)?;
    let found = walk.found.get(file).ok_or_else(|| Error::other("a hard link is of no file"))?;
    let opened = open(walk, found)?;
    let is_described = formats.depends_on(file).is_some() || formats.depends_on(first).is_some();
    let tensors = is_described.then(|| {
        let layout = formats.layout(file, &mut |at, out| opened.read_exact_at(out, at), found.stat.size);
        details(formats.choice, layout.as_ref()).tensors
    });
    Ok(HardLink { file, first, tensors })
}

/// Divides `files`, in order, into those with one name and the first names of others, and further names, each with the first.
pub(super) fn separate(walk: &Walk, mut files: Vec<usize>) -> (Vec<usize>, Vec<(usize, usize)>) {
    let mut named: Vec<(Identity, usize)> =
        files.iter().filter_map(|&file| Some((identity(walk, file)?, file))).collect();
    named.sort_unstable();
    let mut further = Vec::new();
    for names in named.chunk_by(|(one, _), (other, _)| one == other) {
        if let [(_, first), others @ ..] = names {
            further.extend(others.iter().map(|(_, file)| (*file, *first)));
        }
    }
    further.sort_unstable();
    files.retain(|file| further.binary_search_by_key(file, |(file, _)| *file).is_err());
    (files, further)
}

/// Identity of a file that has several names.
fn identity(walk: &Walk, file: usize) -> Option<Identity> {
    let stat = walk.found.get(file).map(|found| &found.stat).filter(|stat| stat.nlink > 1)?;
    Some((stat.dev, stat.ino, stat.size, stat.mtime, stat.ctime))
}

fn go_on(stop: &CancellationToken) -> Result<()> {
    if stop.is_cancelled() { Err(Error::cancelled("interrupted")) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::error::ErrorKind;
    use crate::format::Content;
    use crate::limits::MEMORY_MIN;
    use crate::ops::save::{SaveOptions, files_of};
    use crate::repository::{OpenOptions, Repository};
    use crate::storage::Store;
    use crate::tree::{Rules, walk};

    /// Files with other names by hard links, or by copies.
    fn fill(folder: &Path, name: impl Fn(&Path, &Path)) {
        fs::create_dir(folder).unwrap();
        let header = r#"{"t":{"dtype":"F32","shape":[600000],"data_offsets":[0,2400000]}}"#;
        let mut bytes = vec![0; 2_400_000];
        blake3::Hasher::new().finalize_xof().fill(&mut bytes);
        let tensors = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes].concat();
        for (file, content) in [("b", &tensors[..]), ("c", b"short"), ("e", b"alone"), ("f", b"")] {
            fs::write(folder.join(file), content).unwrap();
        }
        for (file, other) in [("b", "a"), ("b", "d"), ("c", "g"), ("b", "h")] {
            name(&folder.join(file), &folder.join(other));
        }
    }

    fn linked(folder: &Path) {
        fill(folder, |file, other| fs::hard_link(file, other).unwrap());
    }

    #[test]
    fn a_file_is_read_once_for_all_of_its_names_and_must_be_unchanged_by_each() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("linked");
        linked(&folder);
        let walked = walk(&folder, &Rules::default()).unwrap();
        let names = |files: &[usize]| files.iter().map(|&at| walked.found[at].path[0] as char).collect::<String>();
        let (to_read, further) = separate(&walked, files_of(&walked).collect());
        assert_eq!(names(&to_read), "acef");
        let (links, first): (Vec<_>, Vec<_>) = further.iter().copied().unzip();
        assert_eq!((names(&links), names(&first)), ("bdgh".to_owned(), "aaca".to_owned()));
        assert_eq!(separate(&walked, links[..1].to_vec()), (links[..1].to_vec(), Vec::new()), "the only one to read");

        let stop = CancellationToken::new();
        let check = || {
            let link = |&(file, first): &(usize, usize)| HardLink { file, first, tensors: None };
            HardLinks(further.iter().map(link).collect()).check(&walked, &stop).map(|links| links.len())
        };
        assert_eq!(check().unwrap(), 4);
        fs::remove_file(folder.join("g")).unwrap();
        fs::write(folder.join("g"), "of another length").unwrap();
        assert_eq!(check().unwrap_err().kind(), ErrorKind::Conflict);
    }

    #[tokio::test]
    async fn names_of_one_file_are_saved_as_copies_of_it_are() {
        let dir = tempfile::tempdir().unwrap();
        let (linked_to, copied) = (dir.path().join("linked"), dir.path().join("copied"));
        linked(&linked_to);
        fill(&copied, |file, other| {
            fs::copy(file, other).unwrap();
        });
        let (memory, cache) = (Some(MEMORY_MIN), Some(dir.path().join("cache")));
        let options = OpenOptions { memory, cache, ..OpenOptions::default() };
        let repository = Repository::create(Store::memory(), options).await.unwrap().0;
        let save = async |path: &Path, name: &str, options: &SaveOptions| {
            let name = name.parse().unwrap();
            let report = repository.save(path, &name, options).await.unwrap();
            let saved = repository.saved(&name).await.unwrap();
            let files = saved.manifest.files().map(|(_, content)| content.clone()).collect::<Vec<Content>>();
            (report, files, saved.manifest.chunks.clone())
        };
        for caller in [None, Some("token:a/".into())] {
            let options = SaveOptions { caller, explain: true, reread: true, ..SaveOptions::default() };
            let (report, files, chunks) = save(&linked_to, "linked", &options).await;
            assert_eq!(report.explained.iter().filter(|row| row.tensor.as_deref() == Some("t")).count(), 4);
            let (_, same, of_copies) = save(&copied, "copied", &options).await;
            assert_eq!((files, chunks), (same, of_copies));
        }
    }
}
