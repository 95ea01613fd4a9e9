//! What a folder holds, in a form that can be kept in a file and compared.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use serde_json::{Value, json};

/// Everything below `root`, itself included as `""`; or, for a file, the file alone under its name.
pub(super) fn listing(root: &Path) -> BTreeMap<String, Value> {
    let mut all = BTreeMap::new();
    if !root.is_dir() {
        all.insert(text(root.file_name().unwrap().as_bytes()), describe(root));
        return all;
    }
    let mut left = vec![root.to_owned()];
    while let Some(path) = left.pop() {
        let relative = path.strip_prefix(root).unwrap();
        all.insert(text(relative.as_os_str().as_bytes()), describe(&path));
        if fs::symlink_metadata(&path).unwrap().is_dir() {
            left.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
    }
    all
}

fn describe(path: &Path) -> Value {
    let meta = fs::symlink_metadata(path).unwrap();
    let mtime = meta.mtime() * 1_000_000_000 + meta.mtime_nsec();
    let mode = format!("{:o}", meta.permissions().mode() & 0o7777);
    if meta.is_symlink() {
        let target = fs::read_link(path).unwrap();
        json!({ "kind": "link", "mtime": mtime, "target": text(target.as_os_str().as_bytes()) })
    } else if meta.is_dir() {
        json!({ "kind": "folder", "mtime": mtime, "mode": mode })
    } else {
        let bytes = fs::read(path).unwrap();
        let blake3 = blake3::hash(&bytes).to_string();
        json!({ "kind": "file", "mtime": mtime, "mode": mode, "size": bytes.len(), "blake3": blake3 })
    }
}

/// Printable ASCII as it is, any other byte and `%` as `%XX`.
fn text(bytes: &[u8]) -> String {
    let plain = |byte: u8| (b' '..=b'~').contains(&byte) && byte != b'%';
    bytes.iter().map(|&b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}
