//! Paginated listings of folders of saved trees.

use std::fmt::Write as _;

use super::open_trees::OpenTree;
use super::view;
use crate::format::{EntryKind, TreeEntry};

/// Bytes of names, URLs and targets in a page: the entry that reaches it is the last one.
const PAGE_LEN_MAX: usize = 1 << 20;

/// Open folder of a saved tree.
#[derive(Debug)]
pub(super) struct Folder {
    /// Tree that contains it.
    pub(super) saved: OpenTree,
    /// Path without a trailing slash; empty for the root.
    pub(super) path: Vec<u8>,
}

impl Folder {
    /// Page of the direct entries, in byte order of their names, after the name `after`: at most `limit`, and about
    /// [`PAGE_LEN_MAX`] bytes.
    pub(super) fn list(&self, after: Option<&[u8]>, limit: usize) -> view::Folder {
        let mut matching = self.children().filter(|(name, _)| after.is_none_or(|after| *name > after)).peekable();
        let (mut listed, mut last, mut len) = (Vec::new(), None, 0);
        while listed.len() < limit && len < PAGE_LEN_MAX {
            let Some((name, entry)) = matching.next() else { break };
            let entry = self.view(name, entry);
            len += entry.name.len() + entry.url.len() + entry.target.as_ref().map_or(0, String::len);
            listed.push(entry);
            last = Some(name);
        }
        let next = last.filter(|_| matching.peek().is_some()).map(escaped);
        view::Folder {
            name: self.saved.name.to_string(),
            manifest: self.saved.value.manifest.to_string(),
            path: String::from_utf8_lossy(&self.path).into_owned(),
            entries: listed,
            next,
        }
    }

    fn children(&self) -> impl Iterator<Item = (&[u8], &TreeEntry)> {
        self.saved.manifest.entries.iter().filter_map(|entry| {
            let path = entry.path.as_slice();
            let name = if self.path.is_empty() { path } else { path.strip_prefix(&*self.path)?.strip_prefix(b"/")? };
            (!name.is_empty() && !name.contains(&b'/')).then_some((name, entry))
        })
    }

    fn view(&self, name: &[u8], entry: &TreeEntry) -> view::FolderEntry {
        let (bytes, target) = match &entry.kind {
            EntryKind::File(content) => (content.size, None),
            EntryKind::Folder => (0, None),
            EntryKind::Symlink(target) => (0, Some(String::from_utf8_lossy(target).into_owned())),
        };
        let path: Vec<String> = entry.path.split(|byte| *byte == b'/').map(escaped).collect();
        view::FolderEntry {
            name: String::from_utf8_lossy(name).into_owned(),
            kind: entry.kind.word().to_owned(),
            url: format!("/v1/files/{}/{}", escaped(self.saved.name.as_str().as_bytes()), path.join("/")),
            bytes,
            mode: format!("{:04o}", entry.mode),
            mtime: entry.mtime.to_string(),
            target,
        }
    }
}

/// Escapes `text` as one segment of a URL's path (<https://www.rfc-editor.org/rfc/rfc3986#section-2.3>).
fn escaped(text: &[u8]) -> String {
    let mut url = String::with_capacity(text.len());
    for &byte in text {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            url.push(char::from(byte));
        } else {
            // Writing to a string cannot fail.
            let _ = write!(url, "%{byte:02X}");
        }
    }
    url
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_of_a_url_holds_no_slash() {
        assert_eq!(escaped(b"a/b c~1.bin"), "a%2Fb%20c~1.bin");
        assert_eq!(escaped(b"\xff"), "%FF");
    }
}
