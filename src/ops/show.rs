//! Show: content of a saved tree, and how each part of it is stored.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use serde::{Serialize, Serializer};

use super::subpath::{bases_of, chunks_below};
use super::subpath::{entry, within};
use super::{path_text, shown};
use crate::codec::Codec;
use crate::error::Result;
use crate::format::{Content, EntryKind, Frame, Map, TensorEntry, TreeEntry};
use crate::name::Name;
use crate::repository::log::StepFacts;
use crate::repository::{Repository, Saved};

/// A saved tree, or a file or folder of it. Entries are described one at a time: a list of all may need many times the memory
/// of the tree.
#[derive(Clone, Debug)]
pub struct ShownTree {
    summary: TreeSummary,
    saved: Saved,
    /// Stored bytes of each chunk of the tree.
    stored: Vec<u64>,
    /// File or folder whose entries are shown; empty for all.
    below: Vec<u8>,
}

/// A saved tree, or a file or folder of it, without its entries.
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
    /// Stored bytes of further chunks that are read with it: bases of differences, and bundles of earlier steps.
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
    /// Stored bytes of further chunks that are read with it: bases of differences, and bundles of earlier steps.
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
pub struct ShownEntry<'a> {
    /// Path; bytes that are not UTF-8 are replaced.
    pub path: Cow<'a, str>,
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
    pub target: Option<Cow<'a, str>>,
    /// Tensors, if the file was parsed as a checkpoint.
    #[serde(skip_serializing_if = "ShownTensors::is_empty")]
    pub tensors: ShownTensors<'a>,
}

/// Tensors of one file, described one at a time.
#[derive(Clone, Debug)]
pub struct ShownTensors<'a> {
    tensors: &'a [TensorEntry],
    stored: StoredRanges<'a>,
}

/// One tensor.
#[derive(Clone, Debug, Serialize)]
pub struct ShownTensor<'a> {
    /// Name.
    pub name: &'a str,
    /// Element type.
    pub dtype: &'a str,
    /// Shape.
    pub shape: &'a [u64],
    /// The shape of the tensor that it is a part of, if it is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub whole: Option<&'a [u64]>,
    /// Offsets in that tensor, along each dimension.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offsets: Option<&'a [u64]>,
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
    pub async fn show(&self, name: &Name) -> Result<ShownTree> {
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
    pub async fn show_part(&self, name: &Name, below: Option<&[u8]>) -> Result<ShownTree> {
        let saved = self.saved(name).await?;
        match below {
            Some(below) => ShownTree::part(saved, below.strip_suffix(b"/").unwrap_or(below)),
            None => Ok(ShownTree::whole(saved)),
        }
    }
}

impl TreeStorage {
    /// Storage of `saved`.
    #[must_use]
    pub fn of(saved: &Saved) -> Self {
        let stored = stored_lens(&saved.map);
        let mut codecs: BTreeMap<&str, CodecUse> = BTreeMap::new();
        for ((frame, plain), stored) in saved.map.frames.iter().zip(&saved.manifest.chunks.lens).zip(&stored) {
            let word = frame.codec.word();
            let used = codecs.entry(word).or_insert_with(|| CodecUse { codec: word.to_owned(), ..CodecUse::default() });
            used.chunks += 1;
            used.plain_bytes += u64::from(*plain);
            used.stored_bytes += stored;
        }
        Self {
            name: saved.name.to_string(),
            manifest: saved.value.manifest.to_string(),
            saved: saved.value.saved.to_string(),
            bytes: saved.manifest.logical_bytes(),
            stored_bytes: stored.iter().sum(),
            base_bytes: base_bytes(&saved.map),
            behind: saved.value.behind,
            files: saved.manifest.files().count() as u64,
            chunks: saved.manifest.chunks.ids.len() as u64,
            codecs: codecs.into_values().collect(),
        }
    }
}

/// Stored bytes of each chunk of a tree. A bundle counts for those that are parts of it, in equal shares.
fn stored_lens(map: &Map) -> Vec<u64> {
    let own = map.frames.get(..map.chunks()).unwrap_or_default();
    let mut parts: HashMap<u32, u64> = HashMap::new();
    let bundle = |frame: &Frame| frame.base().filter(|_| frame.codec == Codec::Part);
    for bundle in own.iter().filter_map(bundle) {
        *parts.entry(bundle).or_default() += 1;
    }
    let share = |frame: &Frame| {
        let bundle = bundle(frame)?;
        Some(u64::from(map.frames.get(bundle as usize)?.stored_len) / parts.get(&bundle)?)
    };
    own.iter().map(|frame| u64::from(frame.stored_len) + share(frame).unwrap_or(0)).collect()
}

/// Stored bytes of the further chunks of a map. Bundles that chunks of the tree are parts of count for these.
fn base_bytes(map: &Map) -> u64 {
    let own = map.frames.get(..map.chunks()).unwrap_or_default();
    let bundles: BTreeSet<u32> =
        own.iter().filter(|frame| frame.codec == Codec::Part).filter_map(Frame::base).collect();
    let is_base = |at: &usize| u32::try_from(*at).is_ok_and(|at| !bundles.contains(&at));
    let bases = (own.len()..map.frames.len()).filter(is_base);
    bases.filter_map(|at| map.frames.get(at)).map(|frame| u64::from(frame.stored_len)).sum()
}

impl ShownTree {
    pub(crate) fn whole(saved: Saved) -> Self {
        let stored = stored_lens(&saved.map);
        let summary = {
            TreeSummary {
                name: saved.name.to_string(),
                path: None,
                manifest: saved.value.manifest.to_string(),
                saved: saved.value.saved.to_string(),
                bytes: saved.manifest.logical_bytes(),
                stored_bytes: stored.iter().sum(),
                base_bytes: base_bytes(&saved.map),
                behind: saved.value.behind,
                files: saved.manifest.files().count() as u64,
                chunks: saved.manifest.chunks.ids.len() as u64,
                facts: saved.value.facts.clone(),
                labels: saved.manifest.labels.clone(),
            }
        };
        Self { summary, saved, stored, below: Vec::new() }
    }

    /// The file or folder `below` of a tree.
    fn part(saved: Saved, below: &[u8]) -> Result<Self> {
        entry(&saved, below)?;
        let own = chunks_below(&saved, Some(below))?;
        let bases = bases_of(&saved, &own)?;
        let mut part = Self { below: below.to_vec(), ..Self::whole(saved) };
        let frames = &part.saved.map.frames;
        let frame = |chunk: &u32| frames.get(*chunk as usize).map(|frame| u64::from(frame.stored_len));
        let stored_bytes = own.iter().filter_map(|&chunk| part.stored.get(chunk as usize)).sum();
        // Bundles count in part for the chunks that are parts of them.
        let read = own.iter().chain(&bases).filter_map(frame).sum::<u64>();
        let base_bytes = read.saturating_sub(stored_bytes);
        let (mut bytes, mut files) = (0, 0);
        for entry in part.own_entries() {
            if let EntryKind::File(content) = &entry.kind {
                (bytes, files) = (bytes + content.size, files + 1);
            }
        }
        part.summary = TreeSummary {
            path: Some(shown(below)),
            bytes,
            stored_bytes,
            base_bytes,
            files,
            chunks: own.len() as u64,
            ..part.summary
        };
        Ok(part)
    }

    /// All but the entries.
    #[must_use]
    pub fn summary(&self) -> &TreeSummary {
        &self.summary
    }

    /// Files, folders and links, by path.
    pub fn entries(&self) -> impl Iterator<Item = ShownEntry<'_>> {
        self.own_entries().map(|entry| self.show_entry(entry))
    }

    fn show_entry<'a>(&'a self, entry: &'a TreeEntry) -> ShownEntry<'a> {
        let content = match &entry.kind {
            EntryKind::File(content) => Some(content),
            _ => None,
        };
        let target = match &entry.kind {
            EntryKind::Symlink(target) => Some(String::from_utf8_lossy(target)),
            _ => None,
        };
        let chunks: Vec<(u32, Range<u64>)> =
            content.map(|content| content.placed(&self.saved.manifest.chunks).collect()).unwrap_or_default();
        ShownEntry {
            path: path_text(&entry.path),
            kind: entry.kind.word(),
            mode: format!("{:04o}", entry.mode),
            mtime: entry.mtime.to_string(),
            bytes: content.map_or(0, |content| content.size),
            chunks: chunks.len() as u64,
            stored_bytes: chunks.iter().filter_map(|(chunk, _)| self.stored.get(*chunk as usize)).sum(),
            cut: content.map(|content| content.cut.word()),
            target,
            tensors: ShownTensors::new(self, content, chunks),
        }
    }

    fn own_entries(&self) -> impl Iterator<Item = &TreeEntry> {
        self.saved.manifest.entries.iter().filter(|entry| within(&entry.path, &self.below).is_some())
    }
}

/// The summary and `entries` as one object.
impl Serialize for ShownTree {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Whole<'a> {
            #[serde(flatten)]
            summary: &'a TreeSummary,
            entries: Entries<'a>,
        }
        Whole { summary: &self.summary, entries: Entries(self) }.serialize(serializer)
    }
}

/// The entries of a tree, one by one.
struct Entries<'a>(&'a ShownTree);

impl Serialize for Entries<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.entries())
    }
}

impl<'a> ShownTensors<'a> {
    fn new(shown: &'a ShownTree, content: Option<&'a Content>, chunks: Vec<(u32, Range<u64>)>) -> Self {
        let tensors = content.map_or(&[][..], |content| &*content.tensors);
        let chunks = if tensors.is_empty() { Vec::new() } else { chunks };
        Self { tensors, stored: StoredRanges::new(shown, chunks) }
    }

    /// True if the file was not parsed as a checkpoint, or has no tensors.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Tensors, in the order of the file's header.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = ShownTensor<'a>> {
        self.tensors.iter().map(|tensor| {
            let (stored_bytes, codec) = self.stored.within(&tensor.range);
            ShownTensor {
                name: &tensor.name,
                dtype: &tensor.dtype,
                shape: &tensor.shape,
                whole: tensor.part.as_ref().map(|part| &*part.shape),
                offsets: tensor.part.as_ref().map(|part| &*part.offsets),
                bytes: tensor.range.end - tensor.range.start,
                stored_bytes,
                codec,
            }
        })
    }
}

impl Serialize for ShownTensors<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

/// Prefix sums of the storage of one file, so that ranges need no loop over their chunks: a manifest may have any number of
/// tensors over the same chunks.
#[derive(Clone, Debug)]
struct StoredRanges<'a> {
    /// Stored bytes of each chunk of the tree.
    stored: &'a [u64],
    /// Chunks of the file and their places in it.
    chunks: Vec<(u32, Range<u64>)>,
    /// Stored bytes of the chunks before each, and of all.
    before: Vec<u64>,
    /// Sorted places in `chunks`, by codec.
    by_codec: BTreeMap<&'static str, Vec<usize>>,
}

impl<'a> StoredRanges<'a> {
    fn new(shown: &'a ShownTree, chunks: Vec<(u32, Range<u64>)>) -> Self {
        let (stored, frames) = (shown.stored.as_slice(), &shown.saved.map.frames);
        let mut before = Vec::with_capacity(chunks.len() + 1);
        let mut by_codec: BTreeMap<&'static str, Vec<usize>> = BTreeMap::new();
        let mut sum = 0;
        before.push(0);
        for (at, (chunk, _)) in chunks.iter().enumerate() {
            if let (Some(frame), Some(len)) = (frames.get(*chunk as usize), stored.get(*chunk as usize)) {
                sum += len;
                by_codec.entry(frame.codec.word()).or_default().push(at);
            }
            before.push(sum);
        }
        Self { stored, chunks, before, by_codec }
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
        self.stored.get(*chunk as usize).copied().unwrap_or(0) * common / (place.end - place.start).max(1)
    }
}
