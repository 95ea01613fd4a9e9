//! Reading the parts of a manifest.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{ChunkList, Content, EntryKind, LABEL_LEN_MAX, Piece, TensorEntry, TensorPart, TreeEntry};
use crate::chunker::Cut;
use crate::clock::Timestamp;
use crate::format::wire::{Malformed, Read, Reader};
use crate::id::ChunkId;
use crate::limits::{CHUNK_LEN_MAX, DTYPE_NAME_MAX, PATH_LEN_MAX, RANK_MAX, SEGMENT_LEN_MAX, TENSOR_NAME_MAX};

pub(super) fn read_labels(reader: &mut Reader<'_>) -> Read<BTreeMap<String, String>> {
    let count = reader.count(2)?;
    let mut labels = BTreeMap::new();
    for _ in 0..count {
        // Nodes of a map are not always full.
        reader.keep_all::<(String, String)>(2)?;
        let (key, value) = (reader.kept_text(LABEL_LEN_MAX)?, reader.kept_text(LABEL_LEN_MAX)?);
        if labels.last_key_value().is_some_and(|(last, _)| *last >= key) {
            return Err(reader.malformed("labels are not sorted"));
        }
        labels.insert(key, value);
    }
    Ok(labels)
}

pub(super) fn read_chunks(reader: &mut Reader<'_>) -> Read<ChunkList> {
    let count = reader.count(33)?;
    let ids = reader.kept_list(count, |reader| reader.array().map(ChunkId::from_bytes))?;
    let lens = reader.kept_list(count, chunk_len)?;
    if has_repeated(reader, &ids)? {
        return Err(reader.malformed("a chunk is listed twice"));
    }
    Ok(ChunkList { ids, lens })
}

/// True if an id occurs twice, which would make readers process the chunk twice.
fn has_repeated(reader: &mut Reader<'_>, ids: &[ChunkId]) -> Read<bool> {
    reader.keep_all::<u32>(ids.len())?;
    let mut order: Vec<u32> = (0u32..).take(ids.len()).collect();
    let id = |at: u32| ids.get(at as usize);
    order.sort_unstable_by_key(|&at| id(at));
    Ok(order.array_windows().any(|&[one, next]| id(one) == id(next)))
}

fn chunk_len(reader: &mut Reader<'_>) -> Read<u32> {
    let len = reader.varint32()?;
    if len == 0 || u64::from(len) > CHUNK_LEN_MAX {
        return Err(reader.malformed("chunk length is impossible"));
    }
    Ok(len)
}

pub(super) fn read_entries(reader: &mut Reader<'_>, starts: &[u64]) -> Read<Vec<TreeEntry>> {
    let count = reader.count(5)?;
    reader.keep_all::<TreeEntry>(count)?;
    let mut total = 0;
    let mut entries: Vec<TreeEntry> = Vec::with_capacity(count);
    for _ in 0..count {
        let before = entries.last().map(|entry| entry.path.as_slice());
        let path = read_path(reader, before.unwrap_or_default())?;
        if before.is_some_and(|before| path.as_slice() <= before) {
            return Err(reader.malformed("paths are not sorted"));
        }
        entries.push(read_entry(reader, path, starts, &mut total)?);
    }
    Ok(entries)
}

fn read_path(reader: &mut Reader<'_>, before: &[u8]) -> Read<Vec<u8>> {
    let shared = usize::try_from(reader.varint()?).unwrap_or(usize::MAX);
    let shared = before.get(..shared).ok_or_else(|| reader.malformed("path shares too much"))?;
    let rest = reader.string(PATH_LEN_MAX)?;
    let len = shared.len() + rest.len();
    if len > PATH_LEN_MAX {
        return Err(reader.malformed("path is longer than 4096 bytes"));
    }
    reader.keep(len)?;
    let mut path = Vec::with_capacity(len);
    path.extend_from_slice(shared);
    path.extend_from_slice(rest);
    let whole = path.is_empty() || path.split(|&b| b == b'/').all(|part| !matches!(part, b"" | b"." | b".."));
    if !whole || path.contains(&0) {
        return Err(reader.malformed("path is not a relative path"));
    }
    if path.split(|&b| b == b'/').any(|part| part.len() > SEGMENT_LEN_MAX) {
        return Err(reader.malformed("path has a name longer than 255 bytes"));
    }
    Ok(path)
}

/// Adds to the total bytes of all files and tensors, which must not overflow, so that no partial sum does.
fn add(reader: &Reader<'_>, total: &mut u64, len: u64) -> Read<()> {
    *total = total.checked_add(len).ok_or_else(|| reader.malformed("files and tensors exceed 2^64 bytes together"))?;
    Ok(())
}

fn read_entry(reader: &mut Reader<'_>, path: Vec<u8>, starts: &[u64], total: &mut u64) -> Read<TreeEntry> {
    let (kind, mode, mtime) = (reader.u8()?, reader.varint32()?, Timestamp(reader.signed()?));
    if mode > 0o7777 {
        return Err(reader.malformed("mode is impossible"));
    }
    let kind = match kind {
        0 => EntryKind::File(read_content(reader, starts, total)?),
        1 => EntryKind::Folder,
        2 => EntryKind::Symlink(reader.kept_string(PATH_LEN_MAX)?),
        _ => return Err(reader.malformed("entry is of an unknown kind")),
    };
    Ok(TreeEntry { path, mode, mtime, kind })
}

/// Memory for the place of a chunk in a file.
const PLACE: usize = size_of::<(u32, Range<u64>)>();

/// `starts` is [`ChunkList::starts`], by which a piece of many chunks is measured in one step.
fn read_content(reader: &mut Reader<'_>, starts: &[u64], total: &mut u64) -> Read<Content> {
    let size = reader.varint()?;
    add(reader, total, size)?;
    let cut = Cut::from_u8(reader.u8()?).ok_or_else(|| reader.malformed("cut is unknown"))?;
    let count = reader.count(3)?;
    let mut covered = 0u64;
    reader.keep_all::<Piece>(count)?;
    let mut pieces = Vec::with_capacity(count);
    for _ in 0..count {
        let piece = Piece { hole: reader.varint()?, first: reader.varint32()?, count: reader.varint32()? };
        let (first, last) = (piece.first as usize, (piece.first as usize).saturating_add(piece.count as usize));
        let ends = starts.get(first).zip(starts.get(last));
        let (start, end) = ends.ok_or_else(|| reader.malformed("piece names no chunk"))?;
        let len = end - start;
        // Readers keep a place for each chunk of each piece, and a piece of many chunks may be repeated.
        reader.keep((piece.count as usize).saturating_mul(PLACE))?;
        let end = covered.checked_add(piece.hole).and_then(|at| at.checked_add(len)).filter(|&end| end <= size);
        covered = end.ok_or_else(|| reader.malformed("pieces are longer than their file"))?;
        pieces.push(piece);
    }
    let tensors = reader.count(6)?;
    let tensors = reader.kept_list(tensors, |reader| read_tensor(reader, size))?;
    tensors.iter().try_for_each(|tensor| add(reader, total, tensor.range.end - tensor.range.start))?;
    Ok(Content { size, cut, pieces, tensors })
}

fn read_tensor(reader: &mut Reader<'_>, size: u64) -> Result<TensorEntry, Malformed> {
    let (name, dtype) = (reader.kept_text(TENSOR_NAME_MAX)?, reader.kept_text(DTYPE_NAME_MAX)?);
    let rank = reader.count(1)?;
    if rank > RANK_MAX {
        return Err(reader.malformed("tensor has too many dimensions"));
    }
    let shape = reader.kept_list(rank, Reader::varint)?;
    let range = reader.varint()?..reader.varint()?;
    if range.start > range.end || range.end > size {
        return Err(reader.malformed("tensor lies outside its file"));
    }
    let part = if reader.flag()? { Some(read_part(reader, &shape)?) } else { None };
    Ok(TensorEntry { name, dtype, shape, range, part })
}

/// `own` is the part's own shape.
fn read_part(reader: &mut Reader<'_>, own: &[u64]) -> Read<TensorPart> {
    let shape = reader.kept_list(own.len(), Reader::varint)?;
    let offsets = reader.kept_list(own.len(), Reader::varint)?;
    let ends = offsets.iter().zip(own).map(|(offset, len)| offset.checked_add(*len));
    if ends.zip(&shape).any(|(end, whole)| end.is_none_or(|end| end > *whole)) {
        return Err(reader.malformed("part lies outside its tensor"));
    }
    Ok(TensorPart { shape, offsets })
}
