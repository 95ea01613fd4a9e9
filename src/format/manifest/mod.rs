//! A manifest: the files and tensors of one saved tree, as lists of chunks. Named by the digest of its body.
//!
//! The body of an envelope of kind 'M' (numbers are variable-length unless said otherwise):
//!
//! ```text
//! form (1): 0 a folder, 1 a single file
//! labels: count, each: key, value (sorted by key)
//! chunks: count n, then n ids (32 each), then n plain lengths; in order of first use, each once
//! entries: count, each, sorted by path:
//!   bytes shared with the path before, rest of the path, kind (1): 0 file, 1 folder, 2 symbolic link
//!   mode, modification time (signed, ns since 1970)
//!   link: target
//!   file: size, cut (1), pieces: count, each: hole before it in bytes, first chunk, chunks
//!         tensors: count, each: name, type, rank, dimensions, start, end (in bytes within the file), part (1)
//!         part 1: the whole tensor's dimensions, offsets of the part (as many as its rank each)
//! ```
//!
//! Ranges that a file's pieces do not cover are holes: zeros.

mod read;

use std::collections::BTreeMap;
use std::ops::Range;

use self::read::{read_chunks, read_entries, read_labels};
use crate::chunker::Cut;
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::format::wire::{Reader, Writer};
use crate::id::{ChunkId, ManifestId};

/// Maximum bytes of a label's key or value.
pub const LABEL_LEN_MAX: usize = 1 << 16;

/// Kind of the source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Form {
    /// A folder; the entry with the empty path is the folder itself.
    #[default]
    Folder = 0,
    /// One file: the only entry.
    File = 1,
}

/// The chunks that a manifest uses, each once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChunkList {
    /// Ids, in order of first use.
    pub ids: Vec<ChunkId>,
    /// Their plain lengths.
    pub lens: Vec<u32>,
}

/// A run of chunks within a file, after a hole of `hole` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Zeros before the first chunk, in bytes.
    pub hole: u64,
    /// Index of the first chunk.
    pub first: u32,
    /// Number of chunks, consecutive in the chunk list.
    pub count: u32,
}

/// A tensor within a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// Name in the file.
    pub name: String,
    /// Element type, by the name in the file.
    pub dtype: String,
    /// Shape.
    pub shape: Vec<u64>,
    /// Range in the file.
    pub range: Range<u64>,
    /// Place in the whole tensor of the same name, if it is a part; none for a complete tensor.
    pub part: Option<TensorPart>,
}

/// Place of a part in a tensor of several files: a box of the part's own shape.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorPart {
    /// Elements of the whole tensor along each dimension.
    pub shape: Vec<u64>,
    /// Offsets of the part along each dimension.
    pub offsets: Vec<u64>,
}

/// Content of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    /// Length in bytes.
    pub size: u64,
    /// Cutting.
    pub cut: Cut,
    /// Chunks.
    pub pieces: Vec<Piece>,
    /// Tensors, if it was parsed as a checkpoint.
    pub tensors: Vec<TensorEntry>,
}

/// Kind of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// A file.
    File(Content),
    /// A folder.
    Folder,
    /// A symbolic link and its target, uninterpreted.
    Symlink(Vec<u8>),
}

impl EntryKind {
    /// `file`, `folder` or `link`.
    #[must_use]
    pub const fn word(&self) -> &'static str {
        match self {
            Self::File(_) => "file",
            Self::Folder => "folder",
            Self::Symlink(_) => "link",
        }
    }
}

/// One file, folder or link of a saved tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TreeEntry {
    /// `/`-separated and relative, any bytes but NUL; empty for the root.
    pub path: Vec<u8>,
    /// Permission bits, `0o7777` at most.
    pub mode: u32,
    /// Last modification.
    pub mtime: Timestamp,
    /// Kind.
    pub kind: EntryKind,
}

/// One saved tree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifest {
    /// A folder or a single file.
    pub form: Form,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// The chunks.
    pub chunks: ChunkList,
    /// The entries, sorted by path.
    pub entries: Vec<TreeEntry>,
}

impl TreeEntry {
    /// Approximate bytes of memory.
    fn weight(&self) -> usize {
        let within = match &self.kind {
            EntryKind::File(content) => {
                let tensors = content.tensors.iter().map(TensorEntry::weight).sum::<usize>();
                tensors + size_of_val(&*content.pieces)
            }
            EntryKind::Symlink(target) => target.len(),
            EntryKind::Folder => 0,
        };
        size_of_val(self) + self.path.len() + within
    }
}

impl TensorEntry {
    /// Approximate bytes of memory.
    #[must_use]
    pub fn weight(&self) -> usize {
        let part = self.part.as_ref().map_or(0, |part| size_of_val(&*part.shape) + size_of_val(&*part.offsets));
        size_of_val(self) + self.name.len() + self.dtype.len() + size_of_val(&*self.shape) + part
    }
}

impl Manifest {
    /// Approximate bytes of memory: a body of a few kilobytes may describe very many tensors.
    #[must_use]
    pub fn weight(&self) -> u64 {
        let entries: usize = self.entries.iter().map(TreeEntry::weight).sum();
        (entries + size_of_val(&*self.chunks.ids) + size_of_val(&*self.chunks.lens)) as u64
    }

    /// Encodes the body; returns it with its id.
    #[must_use]
    pub fn encode(&self) -> (ManifestId, Vec<u8>) {
        let mut out = Writer::new();
        out.u8(self.form as u8).count(self.labels.len());
        for (key, value) in &self.labels {
            out.string(key.as_bytes()).string(value.as_bytes());
        }
        out.count(self.chunks.ids.len());
        out.each(&self.chunks.ids, |out, id| out.bytes(id.as_bytes()));
        out.each(&self.chunks.lens, |out, &len| out.varint(len.into()));
        out.count(self.entries.len());
        let mut before: &[u8] = &[];
        for entry in &self.entries {
            let shared = entry.path.iter().zip(before).take_while(|(a, b)| a == b).count();
            out.count(shared).string(entry.path.get(shared..).unwrap_or_default());
            write_entry(&mut out, entry);
            before = &entry.path;
        }
        let body = out.into_bytes();
        (ManifestId::of(&body), body)
    }

    /// Reads a body and checks that it is consistent.
    ///
    /// # Errors
    /// Damaged.
    pub fn decode(body: &[u8]) -> Result<Self> {
        Self::decode_within(body, u64::MAX)
    }

    /// Reads a body with at most `memory` bytes of memory: because paths share prefixes, a small body may be a large tree.
    ///
    /// # Errors
    /// Damaged; exhausted, if `memory` is too little.
    pub fn decode_within(body: &[u8], memory: u64) -> Result<Self> {
        let mut reader = Reader::within(body, memory);
        let form = match reader.u8()? {
            0 => Form::Folder,
            1 => Form::File,
            _ => return Err(reader.malformed("form is unknown").into()),
        };
        let labels = read_labels(&mut reader)?;
        let chunks = read_chunks(&mut reader)?;
        reader.keep_all::<u64>(chunks.lens.len() + 1)?;
        let starts = chunks.starts();
        let entries = read_entries(&mut reader, &starts)?;
        reader.finish()?;
        let manifest = Self { form, labels, chunks, entries };
        manifest.check_shape()?;
        Ok(manifest)
    }

    /// Checks that a single file is one entry with a plain name, and that in a folder every parent is a folder.
    fn check_shape(&self) -> Result<()> {
        if self.form == Form::File {
            return match self.entries.as_slice() {
                [TreeEntry { kind: EntryKind::File(_), path, .. }] if !path.is_empty() && !path.contains(&b'/') => {
                    Ok(())
                }
                _ => Err(Error::damaged("manifest of a single file holds something else")),
            };
        }
        let is_folder = |path: &[u8]| matches!(self.entry(path), Some(TreeEntry { kind: EntryKind::Folder, .. }));
        let mut last: &[u8] = &[];
        if !is_folder(last) {
            return Err(Error::damaged("manifest of a folder lacks the folder itself"));
        }
        for entry in self.entries.iter().skip(1) {
            let parent = entry.path.iter().rposition(|&byte| byte == b'/').unwrap_or(0);
            let parent = entry.path.get(..parent).unwrap_or_default();
            if parent != last && !is_folder(parent) {
                let path = String::from_utf8_lossy(&entry.path).into_owned();
                return Err(Error::damaged("manifest puts an entry into what is no folder").got(path));
            }
            last = parent;
        }
        Ok(())
    }

    /// The entry at `path`.
    #[must_use]
    pub fn entry(&self, path: &[u8]) -> Option<&TreeEntry> {
        let at = self.entries.binary_search_by(|entry| entry.path.as_slice().cmp(path)).ok()?;
        self.entries.get(at)
    }

    /// Bytes in all files, holes included.
    #[must_use]
    pub fn logical_bytes(&self) -> u64 {
        self.files().map(|(_, content)| content.size).sum()
    }

    /// Checks what readers refuse: that the bytes of all files and tensors fit into 64 bits together. Sparse files may have any length.
    ///
    /// # Errors
    /// Unsupported, with the file.
    pub fn check_total(&self) -> Result<()> {
        let mut total = 0_u64;
        for (entry, content) in self.files() {
            let tensors = content.tensors.iter().map(|tensor| tensor.range.end - tensor.range.start);
            for len in std::iter::once(content.size).chain(tensors) {
                total = total.checked_add(len).ok_or_else(|| {
                    Error::unsupported("files and tensors of the tree exceed 2^64 bytes together")
                        .at(String::from_utf8_lossy(&entry.path))
                        .help("leave out files with very long holes, with --exclude")
                })?;
            }
        }
        Ok(())
    }

    /// Every file with its content.
    pub fn files(&self) -> impl Iterator<Item = (&TreeEntry, &Content)> {
        self.numbered_files().map(|(_, file)| file)
    }

    /// Every file with its content, and the number of its entry.
    pub fn numbered_files(&self) -> impl Iterator<Item = (usize, (&TreeEntry, &Content))> {
        self.entries.iter().enumerate().filter_map(|(at, entry)| match &entry.kind {
            EntryKind::File(content) => Some((at, (entry, content))),
            _ => None,
        })
    }
}

impl ChunkList {
    /// Starts of the chunks if all were concatenated, and the end of the last one.
    fn starts(&self) -> Vec<u64> {
        let mut end = 0;
        let ends = self.lens.iter().map(|&len| {
            end += u64::from(len);
            end
        });
        std::iter::once(0).chain(ends).collect()
    }
}

impl Content {
    /// Each chunk of the file: its index and its place in the file.
    pub fn placed<'a>(&'a self, chunks: &'a ChunkList) -> impl Iterator<Item = (u32, Range<u64>)> + 'a {
        let mut at = 0;
        self.pieces.iter().flat_map(move |piece| {
            at += piece.hole;
            let start = at;
            let range = piece.first as usize..piece.first as usize + piece.count as usize;
            let lens = chunks.lens.get(range).unwrap_or_default();
            at += lens.iter().map(|&len| u64::from(len)).sum::<u64>();
            (piece.first..).zip(lens).scan(start, |at, (index, &len)| {
                let from = *at;
                *at += u64::from(len);
                Some((index, from..*at))
            })
        })
    }
}

fn write_entry(out: &mut Writer, entry: &TreeEntry) {
    let kind = match entry.kind {
        EntryKind::File(_) => 0,
        EntryKind::Folder => 1,
        EntryKind::Symlink(_) => 2,
    };
    out.u8(kind).varint(entry.mode.into()).signed(entry.mtime.0);
    match &entry.kind {
        EntryKind::Folder => {}
        EntryKind::Symlink(target) => {
            out.string(target);
        }
        EntryKind::File(content) => {
            out.varint(content.size).u8(content.cut as u8).count(content.pieces.len());
            for piece in &content.pieces {
                out.varint(piece.hole).varint(piece.first.into()).varint(piece.count.into());
            }
            out.count(content.tensors.len());
            for tensor in &content.tensors {
                out.string(tensor.name.as_bytes()).string(tensor.dtype.as_bytes()).count(tensor.shape.len());
                out.each(&tensor.shape, |out, &dimension| out.varint(dimension));
                out.varint(tensor.range.start).varint(tensor.range.end).u8(tensor.part.is_some().into());
                if let Some(part) = &tensor.part {
                    out.each(&part.shape, |out, &dimension| out.varint(dimension));
                    out.each(&part.offsets, |out, &offset| out.varint(offset));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(part: Option<TensorPart>) -> TensorEntry {
        TensorEntry { name: "w".into(), dtype: "F32".into(), shape: vec![5, 5], range: 0..100, part }
    }

    fn sample() -> Manifest {
        let ids: Vec<ChunkId> = (0u8..3).map(|n| ChunkId::of(&[n])).collect();
        let content = Content {
            size: 1100,
            cut: Cut::Tensor,
            pieces: vec![Piece { hole: 0, first: 0, count: 2 }, Piece { hole: 500, first: 2, count: 1 }],
            tensors: vec![tensor(None), tensor(Some(TensorPart { shape: vec![10, 5], offsets: vec![5, 0] }))],
        };
        let entry = |path: &[u8], kind| TreeEntry { path: path.to_vec(), mode: 0o644, mtime: Timestamp(-5), kind };
        Manifest {
            form: Form::Folder,
            labels: BTreeMap::from([("loss".into(), "0.1".into())]),
            chunks: ChunkList { ids, lens: vec![100, 200, 300] },
            entries: vec![
                entry(b"", EntryKind::Folder),
                entry(b"a", EntryKind::Folder),
                entry(b"a/b", EntryKind::File(content)),
                entry(b"a/\xff", EntryKind::Symlink(b"../x".to_vec())),
            ],
        }
    }

    #[test]
    fn a_manifest_weighs_what_its_tensors_do() {
        let mut large = sample();
        let EntryKind::File(content) = &mut large.entries[2].kind else { panic!("no file") };
        let part = TensorPart { shape: vec![1; 64], offsets: vec![0; 64] };
        content.tensors = vec![TensorEntry { shape: vec![1; 64], ..tensor(Some(part)) }; 1000];
        let weight = large.weight() - sample().weight();
        // Three lists of 64 numbers each.
        assert!((3 * 64 * 8 * 1000..3 * 64 * 8 * 1200).contains(&weight), "{weight}");
    }

    #[test]
    fn a_manifest_survives_and_its_name_is_its_content() {
        let manifest = sample();
        let (id, body) = manifest.encode();
        assert_eq!(Manifest::decode(&body).unwrap(), manifest);
        assert_eq!(id, ManifestId::of(&body));
        assert_eq!(manifest.logical_bytes(), 1100);
    }

    #[test]
    fn chunks_are_placed_around_holes() {
        let manifest = sample();
        let (_, content) = manifest.files().next().unwrap();
        let placed: Vec<_> = content.placed(&manifest.chunks).collect();
        assert_eq!(placed, [(0, 0..100), (1, 100..300), (2, 800..1100)]);
    }

    #[test]
    fn paths_that_lead_out_are_refused() {
        for bad in [&b"../x"[..], b"/etc", b"a//b", b"a/./b", b"a/..", b"a\0b"] {
            let mut manifest = sample();
            manifest.entries.truncate(1);
            manifest.entries.push(TreeEntry { path: bad.to_vec(), ..manifest.entries[0].clone() });
            assert!(Manifest::decode(&manifest.encode().1).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_path_that_no_file_system_takes_is_refused() {
        let with = |path: Vec<u8>| {
            let mut manifest = sample();
            manifest.entries.truncate(1);
            let folders: Vec<usize> = (0..path.len()).filter(|&at| path[at] == b'/').chain([path.len()]).collect();
            let folder = |end: usize| TreeEntry { path: path[..end].to_vec(), ..manifest.entries[0].clone() };
            let folders: Vec<TreeEntry> = folders.into_iter().map(folder).collect();
            manifest.entries.extend(folders);
            Manifest::decode(&manifest.encode().1)
        };
        assert!(with(vec![b'x'; 255]).is_ok());
        assert!(with(vec![b'x'; 256]).is_err(), "one name");
        let deep = |len: usize| (1..=len).map(|n| if n % 200 == 0 { b'/' } else { b'x' }).collect();
        assert!(with(deep(4096)).is_ok());
        assert!(with(deep(4097)).is_err(), "the whole path");
    }

    /// 16 folders in each other, and a hundred thousand more in the last: each path shares nearly all with the one before.
    #[test]
    fn shared_beginnings_of_paths_take_no_more_memory_than_is_allowed() {
        let mut manifest = sample();
        manifest.entries.truncate(1);
        let root = manifest.entries[0].clone();
        let mut path = vec![b'x'; 255];
        for _ in 0..15 {
            manifest.entries.push(TreeEntry { path: path.clone(), ..root.clone() });
            path.push(b'/');
            path.extend([b'x'; 240]);
        }
        manifest.entries.push(TreeEntry { path: path.clone(), ..root.clone() });
        for n in 0..10_000 {
            let path = [path.as_slice(), format!("/{n:05}").as_bytes()].concat();
            manifest.entries.push(TreeEntry { path, ..root.clone() });
        }
        let body = manifest.encode().1;
        assert!(body.len() < 150_000, "{}", body.len());
        let decoded: usize = manifest.entries.iter().map(|entry| entry.path.len()).sum();
        let error = Manifest::decode_within(&body, decoded as u64).unwrap_err();
        assert_eq!(error.kind(), crate::error::ErrorKind::Exhausted);
        assert_eq!(Manifest::decode_within(&body, 2 * decoded as u64).unwrap(), manifest);
    }

    #[test]
    fn what_holds_something_is_a_folder() {
        let mut manifest = sample();
        manifest.entries[1].kind = EntryKind::Symlink(b"/etc".to_vec());
        assert!(Manifest::decode(&manifest.encode().1).is_err(), "below a link");
        manifest.entries.remove(1);
        assert!(Manifest::decode(&manifest.encode().1).is_err(), "below nothing");
        manifest.entries.drain(..1);
        assert!(Manifest::decode(&manifest.encode().1).is_err(), "no root");
        manifest.entries.truncate(1);
        manifest.form = Form::File;
        assert!(Manifest::decode(&manifest.encode().1).is_err(), "a file with folders");
        manifest.entries[0].path = b"b".to_vec();
        assert_eq!(Manifest::decode(&manifest.encode().1).unwrap(), manifest);
    }

    #[test]
    fn parts_lie_in_their_tensors() {
        for (shape, offsets) in [(vec![10, 5], vec![6, 0]), (vec![4, 5], vec![0, 0]), (vec![5, 5], vec![0, u64::MAX])] {
            let mut manifest = sample();
            let EntryKind::File(content) = &mut manifest.entries[2].kind else { panic!("no file") };
            content.tensors[0].part = Some(TensorPart { shape, offsets });
            assert!(Manifest::decode(&manifest.encode().1).is_err());
        }
    }

    #[test]
    fn a_chunk_is_listed_once() {
        let mut manifest = sample();
        let first = manifest.chunks.ids[0];
        *manifest.chunks.ids.last_mut().unwrap() = first;
        let refused = Manifest::decode(&manifest.encode().1).unwrap_err();
        assert!(format!("{refused:?}").contains("a chunk is listed twice"), "{refused:?}");
    }

    #[test]
    fn torn_bodies_are_errors() {
        let body = sample().encode().1;
        for cut in 0..body.len() {
            assert!(Manifest::decode(&body[..cut]).is_err(), "{cut}");
        }
    }
}
