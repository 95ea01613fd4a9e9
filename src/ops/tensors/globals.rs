//! Tensors of a tree: complete ones, and those in parts in several files of a folder.

use std::collections::HashMap;

use crate::checkpoint::Dtype;
use crate::checkpoint::boxes::TensorBox;
use crate::format::{Manifest, TensorEntry};

/// A tensor, in one file or in parts.
#[derive(Debug)]
pub(super) struct Global<'m> {
    /// File, or the folder of the files with its parts.
    pub(super) path: &'m [u8],
    pub(super) name: &'m str,
    pub(super) dtype: Dtype,
    /// Shape of the whole tensor.
    pub(super) shape: &'m [u64],
    pub(super) parts: Vec<TensorPlace<'m>>,
}

/// A part, or the whole tensor, and its file.
#[derive(Clone, Copy, Debug)]
pub(super) struct TensorPlace<'m> {
    /// Entry of the manifest.
    pub(super) entry: usize,
    pub(super) tensor: &'m TensorEntry,
}

impl Global<'_> {
    /// Bytes of the whole tensor; for an unknown type, those of the existing parts.
    pub(super) fn bytes(&self) -> u64 {
        let there = || self.parts.iter().map(|part| part.tensor.range.end - part.tensor.range.start).sum();
        self.dtype.tensor_len(self.shape).unwrap_or_else(there)
    }
}

impl TensorPlace<'_> {
    /// Place in the whole tensor.
    pub(super) fn place(&self) -> TensorBox {
        match &self.tensor.part {
            Some(part) => TensorBox { offsets: part.offsets.clone(), shape: self.tensor.shape.clone() },
            None => TensorBox::whole(&self.tensor.shape),
        }
    }
}

/// Properties that parts of one tensor share: folder, name, type, whole shape.
type Key<'m> = (&'m [u8], &'m str, &'m str, &'m [u64]);

/// All tensors, in the order of files and of their places. Parts belong to one tensor if name, type and whole shape are equal,
/// and their files are in one folder. Overlapping parts count as copies of each other.
pub(super) fn globals(manifest: &Manifest) -> Vec<Global<'_>> {
    let mut found: Vec<Global<'_>> = Vec::new();
    let mut parted: HashMap<Key<'_>, usize> = HashMap::new();
    for (entry, (file, content)) in manifest.numbered_files() {
        for tensor in &content.tensors {
            let held = TensorPlace { entry, tensor };
            let dtype = || Dtype::from_word(&tensor.dtype);
            let Some(part) = &tensor.part else {
                let (name, shape) = (tensor.name.as_str(), tensor.shape.as_slice());
                found.push(Global { path: &file.path, name, dtype: dtype(), shape, parts: vec![held] });
                continue;
            };
            let folder = file.path.iter().rposition(|&byte| byte == b'/').unwrap_or(0);
            let folder = file.path.get(..folder).unwrap_or_default();
            let key = (folder, tensor.name.as_str(), tensor.dtype.as_str(), part.shape.as_slice());
            let at = *parted.entry(key).or_insert(found.len());
            match found.get_mut(at) {
                Some(global) => global.parts.push(held),
                None => {
                    found.push(Global { path: folder, name: key.1, dtype: dtype(), shape: key.3, parts: vec![held] });
                }
            }
        }
    }
    found
}
