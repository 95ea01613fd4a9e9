//! Truncated checkpoint files: a training was killed, or its disk was full, while it wrote them.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;

use super::metrics::open;
use crate::checkpoint::safetensors::{self, ParseError};

/// Longest header of a safetensors file that is read.
const HEADER_MAX: u64 = 16 << 20;
/// Bytes of headers that one poll reads, and those of the checkpoint at which they are reached.
pub(super) const HEADERS_MAX: u64 = 4 * HEADER_MAX;
/// First bytes of a zip archive, which `torch.save` writes, and of the record at its end
/// (<https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT>, 4.3.7 and 4.3.16).
pub(super) const ZIP_BEGIN: &[u8] = b"PK\x03\x04";
const ZIP_END: &[u8] = b"PK\x05\x06";
/// Longest end of a zip archive: that record with a comment.
const ZIP_END_MAX: u64 = 22 + 0xffff;

/// Ends of files by their formats, in one poll of a folder that others may write to.
#[derive(Debug, Default)]
pub(super) struct FileEnds {
    /// Bytes of headers that were read.
    read: u64,
    /// Ends by the device and number of the file: one with many names is read once.
    known: HashMap<(u64, u64), Option<&'static str>>,
}

impl FileEnds {
    /// True if the files of another checkpoint may be read in this poll.
    pub(super) fn has_room(&self) -> bool {
        self.read < HEADERS_MAX
    }

    /// End that the file at `path` lacks, if its format says so. Files of other formats, and those that cannot be read now, lack
    /// nothing.
    pub(super) fn lacking(&mut self, path: &Path) -> Option<&'static str> {
        let file = open(path).ok()?;
        let meta = file.metadata().ok().filter(std::fs::Metadata::is_file)?;
        let number = (meta.dev(), meta.ino());
        if let Some(known) = self.known.get(&number) {
            return *known;
        }
        let is_named_so = path.extension().is_some_and(|extension| extension == "safetensors");
        let lacking = self.read(&file, meta.len(), is_named_so);
        self.known.insert(number, lacking);
        lacking
    }

    fn read(&mut self, file: &File, len: u64, is_named_so: bool) -> Option<&'static str> {
        let mut first = [0; 9];
        file.read_exact_at(&mut first, 0).ok()?;
        if first.starts_with(ZIP_BEGIN) {
            return (!has_zip_end(file, len)?).then_some("the end of a zip archive");
        }
        let header_len = safetensors::header_len(&first, u64::MAX).filter(|_| is_named_so)?;
        let is_short = match header_len {
            header_len if header_len > len => true,
            header_len if header_len > HEADER_MAX => false,
            header_len => {
                self.read += header_len;
                is_short_safetensors(file, header_len, len)?
            }
        };
        is_short.then_some("the end of a safetensors file")
    }
}

fn has_zip_end(file: &File, len: u64) -> Option<bool> {
    let last_len = len.min(ZIP_END_MAX);
    let mut last = vec![0; usize::try_from(last_len).ok()?];
    file.read_exact_at(&mut last, len - last_len).ok()?;
    Some(last.windows(ZIP_END.len()).any(|window| window == ZIP_END))
}

fn is_short_safetensors(file: &File, header_len: u64, len: u64) -> Option<bool> {
    let mut header = vec![0; usize::try_from(header_len).ok()?];
    file.read_exact_at(&mut header, 0).ok()?;
    let parsed = safetensors::parse(&header, len);
    Some(matches!(parsed, Err(ParseError::OutOfRange { end, buffer_len, .. }) if end > buffer_len))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn lacking_end(path: &Path) -> Option<&'static str> {
        FileEnds::default().lacking(path)
    }

    #[test]
    fn a_poll_reads_each_file_once_and_headers_of_some_length() {
        let dir = tempfile::tempdir().unwrap();
        let path = |number: u64| dir.path().join(format!("{number}.safetensors"));
        let header = format!("{{}}{}", " ".repeat((1 << 20) - 2));
        let file = [&(1_u64 << 20).to_le_bytes()[..], header.as_bytes()].concat();
        fs::write(path(0), &file).unwrap();
        let mut ends = FileEnds::default();
        for number in 1..100 {
            fs::hard_link(path(0), path(number)).unwrap();
            assert_eq!(ends.lacking(&path(number)), None);
        }
        assert!(ends.read < 2 << 20, "it was read once: {}", ends.read);
        for number in 100..163 {
            assert!(ends.has_room());
            fs::write(path(number), &file).unwrap();
            assert_eq!(ends.lacking(&path(number)), None);
        }
        assert!(!ends.has_room());
    }

    #[test]
    fn truncated_files_lack_their_end_and_others_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let header = br#"{"w":{"dtype":"U8","shape":[100],"data_offsets":[0,100]}}"#;
        let whole = [&(header.len() as u64).to_le_bytes()[..], header, &[7; 100]].concat();
        let zip = [ZIP_BEGIN, &vec![0; 100_000], ZIP_END, &[0; 18]].concat();
        for (name, bytes, cuts, lacks) in [
            ("model.safetensors", &whole, [whole.len() - 1, header.len() + 8, 40], "the end of a safetensors file"),
            ("model.pt", &zip, [zip.len() - 22, 90_000, 9], "the end of a zip archive"),
        ] {
            let path = dir.path().join(name);
            fs::write(&path, bytes).unwrap();
            assert_eq!(lacking_end(&path), None, "{name}");
            for cut in cuts {
                fs::write(&path, &bytes[..cut]).unwrap();
                assert_eq!(lacking_end(&path), Some(lacks), "{name} {cut}");
            }
        }
        let other = dir.path().join("noise.safetensors");
        for bytes in [&b""[..], b"short", &[0xff; 100], &[b"8\0\0\0\0\0\0\0{not json", &[0; 90][..]].concat()] {
            fs::write(&other, bytes).unwrap();
            assert_eq!(lacking_end(&other), None, "{bytes:?}");
        }
        assert_eq!(lacking_end(&dir.path().join("none")), None);
    }
}
