//! `NAME` and `NAME:PATH`, where the path is bytes and a choice among steps may stand for the name.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use crate::error::Result;
use crate::selector::Selector;

/// A saved tree, or something in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    /// The tree.
    pub(super) name: Selector,
    /// Within it: no slash at its end, never empty.
    pub(super) path: Option<Vec<u8>>,
}

impl Target {
    /// Reads `NAME[:PATH]`. Neither a name nor a choice holds a colon, so the first one ends it.
    ///
    /// # Errors
    /// Usage, for anything else.
    pub(super) fn parse(text: &OsStr) -> Result<Self> {
        let bytes = text.as_bytes();
        let (name, path) = match bytes.iter().position(|&byte| byte == b':') {
            Some(colon) => (&bytes[..colon], Some(trim(&bytes[colon + 1..]))),
            None => (bytes, None),
        };
        let name = String::from_utf8_lossy(name).parse()?;
        Ok(Self { name, path: path.filter(|path| !path.is_empty()).map(<[u8]>::to_vec) })
    }
}

/// `a/b/` and `./a/b` are `a/b`.
fn trim(mut path: &[u8]) -> &[u8] {
    while let Some(rest) = path.strip_prefix(b"./") {
        path = rest;
    }
    while let Some(rest) = path.strip_suffix(b"/") {
        path = rest;
    }
    if path == b"." { b"" } else { path }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8]) -> Result<Target> {
        Target::parse(OsStr::from_bytes(text))
    }

    #[test]
    fn the_first_colon_ends_the_name() {
        let name = |text: &str| text.parse::<Selector>().unwrap();
        let target = |text: &str, path: Option<&[u8]>| Target { name: name(text), path: path.map(<[u8]>::to_vec) };
        assert_eq!(read(b"run/7").unwrap(), target("run/7", None));
        assert_eq!(read(b"run/7:").unwrap(), target("run/7", None));
        assert_eq!(read(b"run/7:.").unwrap(), target("run/7", None));
        assert_eq!(read(b"run/7:a:b/c/").unwrap(), target("run/7", Some(b"a:b/c")));
        assert_eq!(read(b"run/7:./\xff").unwrap(), target("run/7", Some(b"\xff")));
        assert_eq!(read(b"run@latest:a").unwrap(), target("run@latest", Some(b"a")));
        assert_eq!(read(b"run@min=loss").unwrap(), target("run@min=loss", None));
        assert!(read(b"run@:a").is_err());
        assert!(read(b":a").is_err());
        assert!(read(b"\xff:a").is_err());
        assert!(read(b"run/7:./").unwrap().path.is_none());
        assert_eq!(read(b"run/7:a").unwrap().path.as_deref(), Some(&b"a"[..]));
    }
}
