//! Show: content of a saved tree, and how each part of it is stored.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::Serialize;

use super::shown;
use super::subpath::{bases_of, chunks_below};
use super::subpath::{entry, within};
use crate::error::Result;
use crate::format::{Content, EntryKind, Frame, TensorEntry, TreeEntry};
use crate::name::Name;
use crate::repository::log::StepFacts;
use crate::repository::{Repository, Saved};

/// A saved tree.
#[derive(Clone, Debug, Serialize)]
pub struct TreeSummary {
    /// The name.
    pub name: String,
    /// File or folder that the other fields describe, if not all of the tree.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Manifest's id.
    pub manifest: String,
    /// Time of the save, RFC 3339.
    pub saved: String,
    /// Bytes in all files.
    pub bytes: u64,
    /// Stored bytes of its chunks, including shared ones.
    pub stored_bytes: u64,
    /// Stored bytes of further chunks that these are differences to, which are read with it.
    pub base_bytes: u64,
    /// Saves since the key step that its differences are to; 0 if it is one itself.
    pub behind: u32,
    /// Files.
    pub files: u64,
    /// Distinct chunks.
    pub chunks: u64,
    /// Facts in the log.
    #[serde(flatten)]
    pub facts: StepFacts,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Entries.
    pub entries: Vec<ShownEntry>,
}

/// Storage of a saved tree, without its entries.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
pub struct TreeStorage {
    /// The name.
    pub name: String,
    /// Manifest's id.
    pub manifest: String,
    /// Time of the save, RFC 3339.
    pub saved: String,
    /// Bytes in all files.
    pub bytes: u64,
    /// Stored bytes of its chunks, including shared ones.
    pub stored_bytes: u64,
    /// Stored bytes of further chunks that these are differences to, which are read with it.
    pub base_bytes: u64,
    /// Saves since the key step that its differences are to; 0 if it is one itself.
    pub behind: u32,
    /// Files.
    pub files: u64,
    /// Distinct chunks.
    pub chunks: u64,
    /// Chunks by codec, without bases.
    pub codecs: Vec<CodecUse>,
}

/// Chunks of one codec.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
pub struct CodecUse {
    /// The codec.
    pub codec: String,
    /// Chunks.
    pub chunks: u64,
    /// Their plain bytes.
    pub plain_bytes: u64,
    /// Their stored bytes.
    pub stored_bytes: u64,
}

/// One file, folder or link.
#[derive(Clone, Debug, Serialize)]
pub struct ShownEntry {
    /// Path; bytes that are not UTF-8 are replaced.
    pub path: String,
    /// `file`, `folder` or `link`.
    pub kind: &'static str,
    /// Permission bits, octal.
    pub mode: String,
    /// Last modification, RFC 3339.
    pub mtime: String,
    /// Bytes of the file.
    pub bytes: u64,
    /// Chunks.
    pub chunks: u64,
    /// Stored bytes of its chunks.
    pub stored_bytes: u64,
    /// Cutting of the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cut: Option<&'static str>,
    /// Target of a link.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// Tensors, if the file was parsed as a checkpoint.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tensors: Vec<ShownTensor>,
}

/// One tensor.
#[derive(Clone, Debug, Serialize)]
pub struct ShownTensor {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: String,
    /// Shape.
    pub shape: Vec<u64>,
    /// The shape of the tensor that it is a part of, if it is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub whole: Option<Vec<u64>>,
    /// Offsets in that tensor, along each dimension.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offsets: Option<Vec<u64>>,
    /// Bytes.
    pub bytes: u64,
    /// Stored bytes of its chunks; a chunk shared with neighbours counts in proportion.
    pub stored_bytes: u64,
    /// The codecs of its chunks, joined by `+`.
    pub codec: String,
}

impl Repository {
    /// Content of the tree `name`.
    ///
    /// # Errors
    /// Not found, if there is no such name.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn show(&self, name: &Name) -> Result<TreeSummary> {
        self.show_part(name, None).await
    }

    /// Content of the file or folder `below` of the tree `name`, or all of it: bytes, files and chunks are then those of the
    /// part.
    ///
    /// # Errors
    /// Not found, if there is no such name or path.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn show_part(&self, name: &Name, below: Option<&[u8]>) -> Result<TreeSummary> {
        let saved = self.saved(name).await?;
        let whole = show_whole(&saved);
        match below {
            Some(below) => restrict(&saved, below.strip_suffix(b"/").unwrap_or(below), whole),
            None => Ok(whole),
        }
    }
}

impl TreeStorage {
    /// Storage of `saved`.
    #[must_use]
    pub fn of(saved: &Saved) -> Self {
        let (own, bases) = saved.map.frames.split_at(saved.map.chunks());
        let mut codecs: BTreeMap<&str, CodecUse> = BTreeMap::new();
        for (frame, plain) in own.iter().zip(&saved.manifest.chunks.lens) {
            let word = frame.codec.word();
            let used = codecs.entry(word).or_insert_with(|| CodecUse { codec: word.to_owned(), ..CodecUse::default() });
            used.chunks += 1;
            used.plain_bytes += u64::from(*plain);
            used.stored_bytes += u64::from(frame.stored_len);
        }
        Self {
            name: saved.name.to_string(),
            manifest: saved.value.manifest.to_string(),
            saved: saved.value.saved.to_string(),
            bytes: saved.manifest.logical_bytes(),
            stored_bytes: stored_bytes(own),
            base_bytes: stored_bytes(bases),
            behind: saved.value.behind,
            files: saved.manifest.files().count() as u64,
            chunks: saved.manifest.chunks.ids.len() as u64,
            codecs: codecs.into_values().collect(),
        }
    }
}

fn stored_bytes(frames: &[Frame]) -> u64 {
    frames.iter().map(|frame| u64::from(frame.stored_len)).sum()
}

fn show_whole(saved: &Saved) -> TreeSummary {
    let (own, bases) = saved.map.frames.split_at(saved.map.chunks());
    TreeSummary {
        name: saved.name.to_string(),
        path: None,
        manifest: saved.value.manifest.to_string(),
        saved: saved.value.saved.to_string(),
        bytes: saved.manifest.logical_bytes(),
        stored_bytes: stored_bytes(own),
        base_bytes: stored_bytes(bases),
        behind: saved.value.behind,
        files: saved.manifest.files().count() as u64,
        chunks: saved.manifest.chunks.ids.len() as u64,
        facts: saved.value.facts.clone(),
        labels: saved.manifest.labels.clone(),
        entries: saved.manifest.entries.iter().map(|entry| show_entry(saved, entry)).collect(),
    }
}

/// The part of `whole` for the file or folder `below`.
fn restrict(saved: &Saved, below: &[u8], whole: TreeSummary) -> Result<TreeSummary> {
    entry(saved, below)?;
    let is_in = |entry: &TreeEntry| within(&entry.path, below).is_some();
    let own = chunks_below(saved, Some(below))?;
    let bases = bases_of(saved, &own)?;
    let inside = saved.manifest.entries.iter().map(is_in);
    let entries: Vec<_> =
        whole.entries.into_iter().zip(inside).filter_map(|(entry, is_in)| is_in.then_some(entry)).collect();
    Ok(TreeSummary {
        path: Some(shown(below)),
        bytes: entries.iter().map(|entry| entry.bytes).sum(),
        stored_bytes: own.iter().filter_map(|&chunk| stored_len(saved, chunk)).sum(),
        base_bytes: bases.iter().filter_map(|&chunk| stored_len(saved, chunk)).sum(),
        files: entries.iter().filter(|entry| entry.kind == "file").count() as u64,
        chunks: own.len() as u64,
        entries,
        ..whole
    })
}

fn show_entry(saved: &Saved, entry: &TreeEntry) -> ShownEntry {
    let content = match &entry.kind {
        EntryKind::File(content) => Some(content),
        _ => None,
    };
    let target = match &entry.kind {
        EntryKind::Symlink(target) => Some(String::from_utf8_lossy(target).into_owned()),
        _ => None,
    };
    let chunks: Vec<(u32, Range<u64>)> =
        content.map(|content| content.placed(&saved.manifest.chunks).collect()).unwrap_or_default();
    ShownEntry {
        path: shown(&entry.path),
        kind: entry.kind.word(),
        mode: format!("{:04o}", entry.mode),
        mtime: entry.mtime.to_string(),
        bytes: content.map_or(0, |content| content.size),
        chunks: chunks.len() as u64,
        stored_bytes: chunks.iter().filter_map(|(chunk, _)| stored_len(saved, *chunk)).sum(),
        cut: content.map(|content| content.cut.word()),
        target,
        tensors: content.map(|content| show_tensors(saved, content, &chunks)).unwrap_or_default(),
    }
}

fn show_tensors(saved: &Saved, content: &Content, chunks: &[(u32, Range<u64>)]) -> Vec<ShownTensor> {
    if content.tensors.is_empty() {
        return Vec::new();
    }
    let stored = StoredRanges::new(saved, chunks);
    let show = |tensor: &TensorEntry| {
        let (stored_bytes, codec) = stored.within(&tensor.range);
        ShownTensor {
            name: tensor.name.clone(),
            dtype: tensor.dtype.clone(),
            shape: tensor.shape.clone(),
            whole: tensor.part.as_ref().map(|part| part.shape.clone()),
            offsets: tensor.part.as_ref().map(|part| part.offsets.clone()),
            bytes: tensor.range.end - tensor.range.start,
            stored_bytes,
            codec,
        }
    };
    content.tensors.iter().map(show).collect()
}

/// Prefix sums of the storage of one file, so that ranges need no loop over their chunks: a manifest may have any number of
/// tensors over the same chunks.
struct StoredRanges<'a> {
    saved: &'a Saved,
    chunks: &'a [(u32, Range<u64>)],
    /// Stored bytes of the chunks before each, and of all.
    before: Vec<u64>,
    /// Sorted places in `chunks`, by codec.
    by_codec: BTreeMap<&'static str, Vec<usize>>,
}

impl<'a> StoredRanges<'a> {
    fn new(saved: &'a Saved, chunks: &'a [(u32, Range<u64>)]) -> Self {
        let mut before = Vec::with_capacity(chunks.len() + 1);
        let mut by_codec: BTreeMap<&'static str, Vec<usize>> = BTreeMap::new();
        let mut sum = 0;
        before.push(0);
        for (at, (chunk, _)) in chunks.iter().enumerate() {
            if let Some(frame) = saved.map.frames.get(*chunk as usize) {
                sum += u64::from(frame.stored_len);
                by_codec.entry(frame.codec.word()).or_default().push(at);
            }
            before.push(sum);
        }
        Self { saved, chunks, before, by_codec }
    }

    /// Stored bytes of the chunks of `range`, those at its ends in proportion; and their codecs, joined by `+`.
    fn within(&self, range: &Range<u64>) -> (u64, String) {
        let from = self.chunks.partition_point(|(_, at)| at.end <= range.start);
        let to = self.chunks.partition_point(|(_, at)| at.start < range.end).max(from);
        let stored = match to - from {
            0 => 0,
            1 => self.share(from, range),
            _ => {
                let inner =
                    self.before.get(to - 1).zip(self.before.get(from + 1)).map_or(0, |(end, start)| end - start);
                inner + self.share(from, range) + self.share(to - 1, range)
            }
        };
        let is_used = |places: &Vec<usize>| {
            let next = places.partition_point(|&at| at < from);
            places.get(next).is_some_and(|&at| at < to)
        };
        let codecs = self.by_codec.iter().filter(|(_, places)| is_used(places)).map(|(codec, _)| *codec);
        (stored, codecs.collect::<Vec<_>>().join("+"))
    }

    /// Stored bytes of the chunk at place `at`, in proportion to its overlap with `range`.
    fn share(&self, at: usize, range: &Range<u64>) -> u64 {
        let Some((chunk, place)) = self.chunks.get(at) else { return 0 };
        let common = place.end.min(range.end).saturating_sub(place.start.max(range.start));
        stored_len(self.saved, *chunk).unwrap_or(0) * common / (place.end - place.start).max(1)
    }
}

fn stored_len(saved: &Saved, chunk: u32) -> Option<u64> {
    saved.map.frames.get(chunk as usize).map(|frame| frame.stored_len.into())
}
