//! Truncated checkpoint files: a training was killed, or its disk was full, while it wrote them.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use super::metrics::open;
use crate::checkpoint::safetensors::{self, ParseError};

/// Longest header of a safetensors file that is read.
const HEADER_MAX: u64 = 16 << 20;
/// First bytes of a zip archive, which `torch.save` writes, and of the record at its end
/// (<https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT>, 4.3.7 and 4.3.16).
const ZIP_BEGIN: &[u8] = b"PK\x03\x04";
const ZIP_END: &[u8] = b"PK\x05\x06";
/// Longest end of a zip archive: that record with a comment.
const ZIP_END_MAX: u64 = 22 + 0xffff;

/// End that the file at `path` lacks, if its format says so. Files of other formats, and those that cannot be read now, lack nothing.
pub(super) fn lacking_end(path: &Path) -> Option<&'static str> {
    let file = open(path).ok()?;
    let meta = file.metadata().ok().filter(std::fs::Metadata::is_file)?;
    let mut first = [0; 9];
    file.read_exact_at(&mut first, 0).ok()?;
    if first.starts_with(ZIP_BEGIN) {
        return (!has_zip_end(&file, meta.len())?).then_some("the end of a zip archive");
    }
    let is_named_so = path.extension().is_some_and(|extension| extension == "safetensors");
    (is_named_so && is_short_safetensors(&file, &first, meta.len())?).then_some("the end of a safetensors file")
}

fn has_zip_end(file: &File, len: u64) -> Option<bool> {
    let last_len = len.min(ZIP_END_MAX);
    let mut last = vec![0; usize::try_from(last_len).ok()?];
    file.read_exact_at(&mut last, len - last_len).ok()?;
    Some(last.windows(ZIP_END.len()).any(|window| window == ZIP_END))
}

fn is_short_safetensors(file: &File, first: &[u8], len: u64) -> Option<bool> {
    let Some(header_len) = safetensors::header_len(first, u64::MAX) else { return Some(false) };
    if header_len > len {
        return Some(true);
    }
    if header_len > HEADER_MAX {
        return Some(false);
    }
    let mut header = vec![0; usize::try_from(header_len).ok()?];
    file.read_exact_at(&mut header, 0).ok()?;
    let parsed = safetensors::parse(&header, len);
    Some(matches!(parsed, Err(ParseError::OutOfRange { end, buffer_len, .. }) if end > buffer_len))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

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
