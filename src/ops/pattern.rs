//! Patterns of names and paths: `*`, `?`, `[a-z]` and `{a,b}`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use globset::{GlobBuilder, GlobMatcher};

use crate::error::{Error, Result};

/// A text, or a pattern of texts.
#[derive(Clone, Debug)]
pub(super) struct Pattern {
    /// As it was written.
    pub(super) text: String,
    /// None if it is not a pattern but that very text.
    glob: Option<GlobMatcher>,
}

impl Pattern {
    /// In a pattern of paths a `*` stays within a segment, and `**` does not; in one of names `*` stands for slashes, too.
    ///
    /// # Errors
    /// Usage, if `text` is malformed.
    pub(super) fn new(text: &str, is_path: bool) -> Result<Self> {
        if !text.contains(['*', '?', '[', ']', '{', '}', '\\']) {
            return Ok(Self::exact(text));
        }
        let built = GlobBuilder::new(text).literal_separator(is_path).backslash_escape(true).build();
        let glob = built.map_err(|error| Error::usage("malformed pattern").at(text).source(error))?;
        Ok(Self { text: text.to_owned(), glob: Some(glob.compile_matcher()) })
    }

    /// A pattern of paths; `./a/` means `a`, and `.` all.
    ///
    /// # Errors
    /// As [`Pattern::new`].
    pub(super) fn of_path(text: &str) -> Result<Self> {
        let path = text.trim_start_matches("./").trim_end_matches('/');
        Self::new(if path == "." { "" } else { path }, true)
    }

    pub(super) fn exact(text: &str) -> Self {
        Self { text: text.to_owned(), glob: None }
    }

    /// A name that is the very text is always taken: names may hold brackets.
    pub(super) fn takes(&self, name: &[u8]) -> bool {
        let matches = |glob: &GlobMatcher| glob.is_match(OsStr::from_bytes(name));
        self.text.as_bytes() == name || self.glob.as_ref().is_some_and(matches)
    }

    /// Whether it takes the file or folder `path`, or a folder above it.
    pub(super) fn takes_path(&self, path: &[u8]) -> bool {
        let above = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
        above.chain([path.len()]).any(|end| path.get(..end).is_some_and(|path| self.takes(path)))
    }

    /// Whether it can only mean one name.
    pub(super) fn is_plain(&self) -> bool {
        self.glob.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_of_paths_takes_what_lies_below() {
        for (pattern, path, expected) in [
            ("a/b", "a/b", true),
            ("a", "a/b/c", true),
            ("./a/", "a/b", true),
            ("a", "ab", false),
            ("*.bin", "x.bin", true),
            ("*.bin", "sub/x.bin", false),
            ("**/*.bin", "sub/x.bin", true),
            ("s*", "sub/x.bin", true),
            ("{a,b}/c?", "b/c1", true),
            ("a[1]", "a[1]", true),
        ] {
            assert_eq!(Pattern::of_path(pattern).unwrap().takes_path(path.as_bytes()), expected, "{pattern} {path}");
        }
        assert!(Pattern::of_path("[").is_err());
    }
}
