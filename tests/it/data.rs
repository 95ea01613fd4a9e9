//! Deterministic inputs, and a digest of a tree to compare by.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use towline::name::Name;

/// A valid name.
pub(crate) fn name(text: &str) -> Name {
    text.parse().unwrap()
}

/// Incompressible bytes that depend on `seed` only.
pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
    out
}

/// Numbers that look random and are the same each time (xorshift, <https://www.jstatsoft.org/article/view/v008i14>); the seed is not 0.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// A safetensors file of fp32 tensors, each of so many elements, filled with noise.
pub(crate) fn safetensors(seed: u64, tensors: &[(&str, usize)]) -> Vec<u8> {
    let (mut header, mut at) = (String::from("{"), 0);
    for (i, (name, elements)) in tensors.iter().enumerate() {
        let end = at + elements * 4;
        let comma = if i == 0 { "" } else { "," };
        write!(header, r#"{comma}"{name}":{{"dtype":"F32","shape":[{elements}],"data_offsets":[{at},{end}]}}"#)
            .unwrap();
        at = end;
    }
    header.push('}');
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.into_bytes());
    file.extend(noise(seed, at));
    file
}

/// Everything that a save keeps of a tree, by path.
pub(crate) fn tree_digest(root: &Path) -> BTreeMap<Vec<u8>, String> {
    use std::os::unix::ffi::OsStrExt as _;
    let mut all = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let meta = std::fs::symlink_metadata(&path).unwrap();
            let what = if meta.is_dir() {
                folders.push(path.clone());
                "folder".to_owned()
            } else if meta.is_symlink() {
                format!("link {}", std::fs::read_link(&path).unwrap().display())
            } else {
                format!("file {}", blake3::hash(&std::fs::read(&path).unwrap()))
            };
            let mode = if meta.is_symlink() { 0 } else { meta.permissions().mode() & 0o7777 };
            let relative = path.strip_prefix(root).unwrap().as_os_str().as_bytes().to_vec();
            all.insert(relative, format!("{what} {mode:o} {}.{}", meta.mtime(), meta.mtime_nsec()));
        }
    }
    all
}
