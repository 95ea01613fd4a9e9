//! Location of a repository, as the user writes it: a path, `file://` or `s3://`.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::endpoint::{is_scheme, without_user};
use crate::error::{Error, Result};

/// The address of a repository. `Display` prints what `FromStr` reads back to the same value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Location {
    /// A directory of this machine, by its absolute path.
    Directory(PathBuf),
    /// A bucket, and the key prefix below which the repository lives: no slash at either end, may be empty.
    S3 {
        /// The bucket.
        bucket: String,
        /// The prefix, `a/b`.
        prefix: String,
    },
    /// Memory of this process, for tests: printed as `memory://`, never parsed.
    Memory,
}

impl Location {
    /// The directory `path`; a relative one counts from the current directory.
    pub fn directory(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if path.as_os_str().is_empty() {
            return Err(Error::usage("repository address is empty").help(OFFERED));
        }
        let absolute = std::path::absolute(path).map_err(|e| Error::io("path cannot be made absolute", path, e))?;
        Ok(Self::Directory(absolute.components().collect()))
    }
}

const OFFERED: &str = "give a path, file:///PATH or s3://BUCKET/PREFIX";

impl FromStr for Location {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let shown = without_user(text);
        match text.split_once("://") {
            None => match text.split_once(":/") {
                Some((scheme, _)) if is_scheme(scheme) => Err(Error::usage("repository address lacks a slash")
                    .at(&shown)
                    .expected(without_user(&text.replacen(":/", "://", 1)))
                    .help(format!("write ./{shown} for a folder of that name"))),
                _ => Self::directory(text),
            },
            Some((scheme, _)) if !is_scheme(scheme) => Self::directory(text),
            Some(("file", rest)) => file_url(&shown, rest),
            Some(("s3", rest)) => s3_url(&shown, rest),
            Some(_) => Err(Error::usage("repository address has a scheme that is not offered").at(shown).help(OFFERED)),
        }
    }
}

/// `file:///PATH` or `file://localhost/PATH`, percent-decoded (RFC 8089).
fn file_url(shown: &str, rest: &str) -> Result<Location> {
    let path = rest.strip_prefix("localhost").filter(|path| path.starts_with('/')).unwrap_or(rest);
    if !path.starts_with('/') {
        return Err(Error::usage("file URL is not absolute").at(shown).help("write file:///PATH with three slashes"));
    }
    let bytes = percent_decoded(path.as_bytes())
        .ok_or_else(|| Error::usage("file URL has a malformed percent escape").at(shown))?;
    Location::directory(<std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(&bytes))
}

fn percent_decoded(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut rest = bytes.iter();
    while let Some(&byte) = rest.next() {
        decoded.push(match byte {
            b'%' => {
                let mut digit = || char::from(*rest.next()?).to_digit(16);
                u8::try_from(digit()? * 16 + digit()?).ok()?
            }
            other => other,
        });
    }
    Some(decoded)
}

fn s3_url(shown: &str, rest: &str) -> Result<Location> {
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let prefix = prefix.trim_end_matches('/');
    // Characters that some S3-compatible store allows; AWS allows fewer, and refuses the others itself.
    let named = (3..=255).contains(&bucket.len())
        && bucket.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_'));
    if !named {
        return Err(Error::usage("bucket name is malformed").at(shown).help("write s3://BUCKET/PREFIX"));
    }
    let parsed = object_store::path::Path::parse(prefix)
        .map_err(|e| Error::usage("prefix of the bucket is malformed").at(shown).source(e))?;
    if parsed.as_ref() != prefix {
        return Err(Error::usage("prefix of the bucket is malformed").at(shown).expected(parsed).got(prefix));
    }
    Ok(Location::S3 { bucket: bucket.to_owned(), prefix: prefix.to_owned() })
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => path.display().fmt(f),
            Self::S3 { bucket, prefix } if prefix.is_empty() => write!(f, "s3://{bucket}"),
            Self::S3 { bucket, prefix } => write!(f, "s3://{bucket}/{prefix}"),
            Self::Memory => f.write_str("memory://"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    fn parsed(text: &str) -> Location {
        text.parse().unwrap()
    }

    #[test]
    fn what_is_printed_is_read_back() {
        for text in ["/data/repo", "s3://bucket", "s3://bucket/a/b", "relative", "/a://b", "./s3:/b", "a/s3:/b"] {
            let location = parsed(text);
            assert_eq!(parsed(&location.to_string()), location, "{text}");
        }
        assert_eq!(parsed("file:///data/my%20repo/"), Location::Directory("/data/my repo".into()));
        assert_eq!(parsed("file://localhost/data"), parsed("/data"));
        assert_eq!(parsed("s3://bucket/a/b//"), parsed("s3://bucket/a/b"));
        assert_eq!(parsed("s3://bucket/"), parsed("s3://bucket"));
        assert_eq!(parsed("x"), Location::Directory(std::env::current_dir().unwrap().join("x")));
        assert_eq!(parsed("/data/./repo/"), parsed("/data/repo"));
    }

    #[test]
    fn what_is_not_offered_is_a_usage_error_that_says_what_is() {
        for text in
            ["gs://b/p", "az://c", "https://x/y", "memory://", "file://relative", "file:///%zz", "s3:/bucket/x", ""]
        {
            let error = text.parse::<Location>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage, "{text}");
        }
        assert!("gs://b".parse::<Location>().unwrap_err().help_text().unwrap().contains("s3://BUCKET/PREFIX"));
        for text in [
            "s3://key:hush@bkt/x",
            "s3://key:hu/sh@bkt//x",
            "s3:/key:hush@bkt/x",
            "https://u:hush@h",
            "file://u:hush@h/%zz",
        ] {
            let error = text.parse::<Location>().unwrap_err();
            assert!(!format!("{error:?} {:?}", error.help_text()).contains("hu"), "{error:?}");
        }
        let error = "s3://bucket/run@v2//x".parse::<Location>().unwrap_err();
        assert_eq!(error.place(), Some("s3://bucket/run@v2//x"), "an @ of a path hides nothing");
        for text in ["s3://", "s3://a", "s3:///prefix", "s3://bucket/a//b", "s3://bucket/../x", "s3://buc ket/x"] {
            assert_eq!(text.parse::<Location>().unwrap_err().kind(), ErrorKind::Usage, "{text}");
        }
    }
}
