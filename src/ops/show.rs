//! Show: what a saved tree holds, and how each part of it is stored.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use serde::Serialize;

use super::shown;
use super::subpath::{entry, within};
use super::warm::choose;
use crate::error::Result;
use crate::format::{Content, EntryKind, Frame, TensorEntry, TreeEntry};
use crate::repository::log::StepFacts;
use crate::repository::{Name, Repository, Saved};

/// A saved tree.
#[derive(Clone, Debug, Serialize)]
pub struct Shown {
    /// The name.
    pub name: String,
    /// The file or folder of it that the rest is about, if not all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Its manifest's id.
    pub manifest: String,
    /// When it was saved, RFC 3339.
    pub saved: String,
    /// Bytes in all files.
    pub bytes: u64,
    /// Bytes that its chunks take in packs, shared ones too.
    pub stored_bytes: u64,
    /// Bytes that further chunks take, which these are differences to: they are read with it.
    pub base_bytes: u64,
    /// How many saves ago the key step was that its differences are to; 0 if it is one itself.
    pub behind: u32,
    /// Files.
    pub files: u64,
    /// Distinct chunks.
    pub chunks: u64,
    /// What is told of it in the log.
    #[serde(flatten)]
    pub facts: StepFacts,
    /// What was recorded with it.
    pub labels: BTreeMap<String, String>,
    /// What it holds.
    pub entries: Vec<ShownEntry>,
}

/// One file, folder or link.
#[derive(Clone, Debug, Serialize)]
pub struct ShownEntry {
    /// Its path; bytes that are not UTF-8 are replaced.
    pub path: String,
    /// `file`, `folder` or `link`.
    pub kind: &'static str,
    /// Permission bits, octal.
    pub mode: String,
    /// Last modification, RFC 3339.
    pub mtime: String,
    /// Bytes of the file.
    pub bytes: u64,
    /// Its chunks.
    pub chunks: u64,
    /// Bytes that they take in packs.
    pub stored_bytes: u64,
    /// How the file was cut.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cut: Option<&'static str>,
    /// Where a link points.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// The tensors of a file that was understood as a checkpoint.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tensors: Vec<ShownTensor>,
}

/// One tensor.
#[derive(Clone, Debug, Serialize)]
pub struct ShownTensor {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// The shape of the tensor that it is a part of, if it is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub whole: Option<Vec<u64>>,
    /// Where in that tensor it begins, along each dimension.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offsets: Option<Vec<u64>>,
    /// Its bytes.
    pub bytes: u64,
    /// Bytes that its chunks take in packs; a chunk shared with neighbours counts in proportion.
    pub stored_bytes: u64,
    /// The codecs of its chunks, joined by `+`.
    pub codec: String,
}

impl Repository {
    /// What the tree `name` holds.
    ///
    /// # Errors
    /// Not found, if there is no such name.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn show(&self, name: &Name) -> Result<Shown> {
        self.show_part(name, None).await
    }

    /// What the file or folder `below` of the tree `name` holds, or all of it: bytes, files and chunks are then those of the part.
    ///
    /// # Errors
    /// Not found, if there is no such name or path.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn show_part(&self, name: &Name, below: Option<&[u8]>) -> Result<Shown> {
        let saved = self.saved(name).await?;
        let whole = show_whole(&saved);
        match below {
            Some(below) => restrict(&saved, below.strip_suffix(b"/").unwrap_or(below), whole),
            None => Ok(whole),
        }
    }
}

fn show_whole(saved: &Saved) -> Shown {
    let (own, bases) = saved.map.frames.split_at(saved.map.chunks());
    let stored = |frames: &[Frame]| frames.iter().map(|frame| u64::from(frame.stored_len)).sum();
    Shown {
        name: saved.name.to_string(),
        path: None,
        manifest: saved.value.manifest.to_string(),
        saved: saved.value.saved.to_string(),
        bytes: saved.manifest.logical_bytes(),
        stored_bytes: stored(own),
        base_bytes: stored(bases),
        behind: saved.value.behind,
        files: saved.manifest.files().count() as u64,
        chunks: saved.manifest.chunks.ids.len() as u64,
        facts: saved.value.facts.clone(),
        labels: saved.manifest.labels.clone(),
        entries: saved.manifest.entries.iter().map(|entry| show_entry(saved, entry)).collect(),
    }
}

/// The part of `whole` for the file or folder `below`.
fn restrict(saved: &Saved, below: &[u8], whole: Shown) -> Result<Shown> {
    entry(saved, below)?;
    let is_in = |entry: &TreeEntry| within(&entry.path, below).is_some();
    let mut own = BTreeSet::new();
    for (_, content) in saved.manifest.files().filter(|(entry, _)| is_in(entry)) {
        own.extend(content.pieces.iter().flat_map(|piece| piece.first..piece.first + piece.count));
    }
    let needed = choose(saved, Some(below))?;
    let bases = needed.iter().filter(|chunk| !own.contains(chunk));
    let inside = saved.manifest.entries.iter().map(is_in);
    let entries: Vec<_> =
        whole.entries.into_iter().zip(inside).filter_map(|(entry, is_in)| is_in.then_some(entry)).collect();
    Ok(Shown {
        path: Some(shown(below)),
        bytes: entries.iter().map(|entry| entry.bytes).sum(),
        stored_bytes: own.iter().filter_map(|&chunk| stored_len(saved, chunk)).sum(),
        base_bytes: bases.filter_map(|&chunk| stored_len(saved, chunk)).sum(),
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
    let show = |tensor: &TensorEntry| {
        let from = chunks.partition_point(|(_, at)| at.end <= tensor.range.start);
        let overlapping = chunks.iter().skip(from).take_while(|(_, at)| at.start < tensor.range.end);
        let (mut stored, mut codecs) = (0, BTreeSet::new());
        for (chunk, at) in overlapping {
            let Some(frame) = saved.map.frames.get(*chunk as usize) else { continue };
            let common = at.end.min(tensor.range.end) - at.start.max(tensor.range.start);
            stored += u64::from(frame.stored_len) * common / (at.end - at.start).max(1);
            codecs.insert(frame.codec.word());
        }
        ShownTensor {
            name: tensor.name.clone(),
            dtype: tensor.dtype.clone(),
            shape: tensor.shape.clone(),
            whole: tensor.part.as_ref().map(|part| part.shape.clone()),
            offsets: tensor.part.as_ref().map(|part| part.offsets.clone()),
            bytes: tensor.range.end - tensor.range.start,
            stored_bytes: stored,
            codec: codecs.into_iter().collect::<Vec<_>>().join("+"),
        }
    };
    content.tensors.iter().map(show).collect()
}

fn stored_len(saved: &Saved, chunk: u32) -> Option<u64> {
    saved.map.frames.get(chunk as usize).map(|frame| frame.stored_len.into())
}
