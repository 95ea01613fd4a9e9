//! A file or folder of a saved tree, and its content.

use std::collections::BTreeSet;

use super::shown;
use crate::error::{Error, Result};
use crate::format::TreeEntry;
use crate::repository::Saved;

/// The entry at `path`; the root of the tree for an empty path.
///
/// # Errors
/// Not found, if there is none.
pub(super) fn entry<'s>(saved: &'s Saved, path: &[u8]) -> Result<&'s TreeEntry> {
    saved.manifest.entry(path).ok_or_else(|| {
        Error::not_found("there is no such path in the saved tree")
            .at(format!("{}:{}", saved.name, shown(path)))
            .help(format!("`towline show {} --files` lists the paths", saved.name))
    })
}

/// The rest of `path` below the file or folder `top`: empty for `top` itself, None outside of it.
pub(super) fn within<'p>(path: &'p [u8], top: &[u8]) -> Option<&'p [u8]> {
    match path.strip_prefix(top)? {
        rest if top.is_empty() => Some(rest),
        [] => Some(&[]),
        [b'/', rest @ ..] => Some(rest),
        _ => None,
    }
}

/// Chunks of a tree, or of the file or folder `below` in it, ascending; without bases that only others need.
pub(crate) fn chunks_below(saved: &Saved, below: Option<&[u8]>) -> Result<Vec<u32>> {
    let Some(below) = below else {
        return Ok((0..u32::try_from(saved.map.chunks()).unwrap_or(u32::MAX)).collect());
    };
    let below = below.strip_suffix(b"/").unwrap_or(below);
    entry(saved, below)?;
    let mut chosen = BTreeSet::new();
    for (_, content) in saved.manifest.files().filter(|(entry, _)| within(&entry.path, below).is_some()) {
        chosen.extend(content.pieces.iter().flat_map(|piece| piece.first..piece.first + piece.count));
    }
    Ok(chosen.into_iter().collect())
}

/// Chunks that `wanted` ones of a tree need as they are stored, and that are none of them.
pub(crate) fn bases_of(saved: &Saved, wanted: &[u32]) -> Result<Vec<u32>> {
    let mut bases = BTreeSet::new();
    for &chunk in wanted {
        let mut next = saved.locate(chunk)?.base;
        while let Some(base) = next.filter(|&base| wanted.binary_search(&base).is_err() && bases.insert(base)) {
            next = saved.locate(base)?.base;
        }
    }
    Ok(bases.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_only_begins_alike_is_not_in_a_folder() {
        for (path, top, expected) in [
            ("a/b", "", Some("a/b")),
            ("", "", Some("")),
            ("a", "a", Some("")),
            ("a/b", "a", Some("b")),
            ("a/b/c", "a/b", Some("c")),
            ("ab", "a", None),
            ("a.b", "a", None),
            ("a", "a/b", None),
        ] {
            assert_eq!(within(path.as_bytes(), top.as_bytes()), expected.map(str::as_bytes), "{path} in {top}");
        }
    }
}
