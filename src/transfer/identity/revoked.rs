//! List of revoked certificates. Additions hold at once; an incomplete file removes nobody.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::certificate::Certificate;
use super::files;
use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind, Result};
use crate::tree::FileStamp;

/// Time for which a file must be unchanged before it removes entries: it may be half written.
pub(super) const SETTLED: Duration = Duration::from_secs(5);
/// Digits of a fingerprint; a serial number has fewer (RFC 5280, 4.1.2.2: at most 20 bytes).
const FINGERPRINT_DIGITS: usize = 64;

/// Revoked certificates: serial numbers and fingerprints as lower-case digits without colons.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct List(BTreeSet<String>);

impl List {
    /// True if `certificate` is on it, in this form or another.
    pub(super) fn holds(&self, certificate: &Certificate) -> bool {
        let Certificate { serial, fingerprint, other_fingerprints, .. } = certificate;
        other_fingerprints.iter().chain([serial, fingerprint]).any(|one| self.0.contains(one))
    }
}

/// The list in force, and the file that it comes from.
#[derive(Debug)]
pub(super) struct Revoked {
    path: PathBuf,
    /// State of the file when it was last read; None if it could not be read.
    seen: Option<FileStamp>,
    /// Time since when it has been in that state.
    since: Timestamp,
    in_force: Arc<List>,
    /// The list in the file, if it lacks entries of the list in force.
    shorter: Option<List>,
    problems: Vec<String>,
}

/// Parsed contents of a file.
struct ParsedList {
    list: List,
    problems: Vec<String>,
    /// False if it may be half written.
    whole: bool,
}

impl Revoked {
    /// Opens the list in the file at `path`; an empty one if there is no file. Malformed lines are problems.
    ///
    /// # Errors
    /// Errors of the file system: without the list nobody can be trusted.
    pub(super) fn open(path: PathBuf, now: Timestamp) -> Result<Self> {
        let seen = FileStamp::at(&path);
        let ParsedList { list, problems, .. } = read(&path)?;
        problems.iter().for_each(|problem| tracing::warn!("{problem}"));
        Ok(Self { path, seen: Some(seen), since: now, in_force: Arc::new(list), shorter: None, problems })
    }

    /// The list in force.
    pub(super) fn list(&self) -> &Arc<List> {
        &self.in_force
    }

    /// Problems of the file in its current state.
    pub(super) fn problems(&self) -> &[String] {
        &self.problems
    }

    /// Reads the file again if it changed; true if the list in force changed. New entries hold at once.
    pub(super) fn reload(&mut self, now: Timestamp) -> bool {
        let seen = FileStamp::at(&self.path);
        if self.seen == Some(seen) {
            return self.settle(now);
        }
        self.since = now;
        self.shorter = None;
        let said = match read(&self.path) {
            Ok(said) => said,
            Err(error) => {
                self.seen = None;
                self.found(vec![format!(
                    "cannot read the list of revoked certificates, the previous one stays in force: {error}"
                )]);
                return false;
            }
        };
        self.seen = Some(seen);
        let all: BTreeSet<String> = self.in_force.0.union(&said.list.0).cloned().collect();
        let (fewer, more) = (all != said.list.0, all != self.in_force.0);
        let mut problems = said.problems;
        if fewer && !said.whole {
            problems.push(format!(
                "{} may be half written, so it removes no entry from the list of revoked certificates: in a complete \
                 file every line has an end, and none is malformed",
                self.path.display()
            ));
        }
        self.found(problems);
        self.in_force = Arc::new(List(all));
        self.shorter = Some(said.list).filter(|_| fewer && said.whole);
        more
    }

    /// Removes entries that the file lacks, once it has not changed for [`SETTLED`].
    fn settle(&mut self, now: Timestamp) -> bool {
        if now.since(self.since) < SETTLED {
            return false;
        }
        let Some(list) = self.shorter.take() else { return false };
        self.in_force = Arc::new(list);
        true
    }

    fn found(&mut self, problems: Vec<String>) {
        // Reported once: an unreadable file is read again and again.
        problems
            .iter()
            .filter(|problem| !self.problems.contains(problem))
            .for_each(|problem| tracing::warn!("{problem}"));
        self.problems = problems;
    }
}

fn read(path: &Path) -> Result<ParsedList> {
    let text = match files::read_lines(path) {
        // To empty the list, remove the file, or leave a comment in it.
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Ok(ParsedList { list: List::default(), problems: Vec::new(), whole: true });
        }
        read => read?,
    };
    let (mut list, mut problems) = (List::default(), Vec::new());
    for (at, line) in text.lines().enumerate() {
        let said = line.split('#').next().unwrap_or_default().trim();
        let digits: String = said.chars().filter(|c| *c != ':').map(|c| c.to_ascii_lowercase()).collect();
        if digits.is_empty() {
            continue;
        }
        if !digits.len().is_multiple_of(2) || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            let error = Error::damaged("line of the list of revoked certificates is malformed")
                .at(format!("{}, line {}", path.display(), at + 1))
                .expected("a serial number or SHA-256 fingerprint in hexadecimal digits")
                .got(format!("{said:.80?}"));
            problems.push(error.to_string());
            continue;
        }
        let mut number = digits.as_str();
        while let Some(shorter) = number.strip_prefix("00").filter(|_| digits.len() < FINGERPRINT_DIGITS) {
            number = shorter;
        }
        list.0.insert(number.to_owned());
    }
    let whole = problems.is_empty() && text.ends_with('\n');
    Ok(ParsedList { list, problems, whole })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::*;

    struct Fixture {
        folder: TempDir,
        revoked: Revoked,
        now: Timestamp,
    }

    impl Fixture {
        fn new(text: &str) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("revoked");
            fs::write(&path, text).unwrap();
            let revoked = Revoked::open(path, Timestamp(0)).unwrap();
            Self { folder, revoked, now: Timestamp(0) }
        }

        fn write(&self, text: &str) {
            // A new file each time, as its times may be the same.
            let fresh = self.folder.path().join("fresh");
            fs::write(&fresh, text).unwrap();
            fs::rename(fresh, self.folder.path().join("revoked")).unwrap();
        }

        fn reload(&mut self, later: Duration) -> Vec<&str> {
            self.now = Timestamp(self.now.0 + i64::try_from(later.as_nanos()).unwrap());
            self.revoked.reload(self.now);
            self.revoked.in_force.0.iter().map(String::as_str).collect()
        }
    }

    const SOON: Duration = Duration::from_secs(1);

    #[test]
    fn who_is_added_is_revoked_at_once_and_who_is_removed_only_when_the_file_rests() {
        let mut fixture = Fixture::new("aa\nbb\n");
        fixture.write("bb\ncc\n");
        assert_eq!(fixture.reload(SOON), ["aa", "bb", "cc"]);
        assert_eq!(fixture.reload(SOON), ["aa", "bb", "cc"]);
        fixture.write("cc\n");
        assert_eq!(fixture.reload(SETTLED), ["aa", "bb", "cc"], "it has just changed again");
        assert_eq!(fixture.reload(SETTLED), ["cc"]);
        fs::remove_file(fixture.folder.path().join("revoked")).unwrap();
        assert_eq!(fixture.reload(SOON), ["cc"]);
        assert!(fixture.reload(SETTLED).is_empty());
        assert!(fixture.revoked.problems().is_empty());
    }

    #[test]
    fn a_file_that_is_not_whole_adds_and_takes_nobody_off() {
        for (text, expected) in [
            ("", &["aa", "bbbb"][..]),
            ("bb", &["aa", "bb", "bbbb"]),
            ("cc\nb", &["aa", "bbbb", "cc"]),
            ("cc\nthe one of last week\ndd\n", &["aa", "bbbb", "cc", "dd"]),
        ] {
            let mut fixture = Fixture::new("aa\nbbbb\n");
            fixture.write(text);
            for _ in 0..3 {
                assert_eq!(fixture.reload(SETTLED), expected, "{text:?}");
            }
            assert!(fixture.revoked.problems().iter().any(|problem| problem.contains("half written")), "{text:?}");
            fixture.write("aa\n");
            fixture.reload(SETTLED);
            assert_eq!(fixture.reload(SETTLED), ["aa"]);
            assert!(fixture.revoked.problems().is_empty());
        }
    }

    #[test]
    fn good_lines_hold_beside_a_malformed_one_which_is_named() {
        let fixture = Fixture::new("# stolen\naa # a laptop\nthe one of last week\n00:BB:cc\n");
        assert_eq!(fixture.revoked.list().0.iter().collect::<Vec<_>>(), ["aa", "bbcc"]);
        let [problem] = fixture.revoked.problems() else { panic!("{:?}", fixture.revoked.problems()) };
        assert!(problem.contains("revoked, line 3") && problem.contains("the one of last week"), "{problem}");
    }

    #[test]
    fn bytes_that_are_no_text_spoil_their_line_alone() {
        let mut fixture = Fixture::new("aa\n");
        let path = fixture.folder.path().join("revoked");
        fs::write(&path, b"\xef\xbb\xbfaa\n# gr\xfc\xdfe\n\xff\nbb\n").unwrap();
        assert_eq!(fixture.reload(SOON), ["aa", "bb"]);
        assert!(fixture.revoked.problems()[0].contains("line 3"), "{:?}", fixture.revoked.problems());
        // Remains of a line that a crash kept from being written.
        fs::write(&path, b"aa\nbb\ncc\n\0\0\0\n").unwrap();
        assert_eq!(fixture.reload(SOON), ["aa", "bb", "cc"]);
        fs::write(&path, b"\xff\xfeb\0b\0").unwrap();
        assert_eq!(fixture.reload(SOON), ["aa", "bb", "cc"], "UTF-16 is no list");
        assert!(Revoked::open(path, Timestamp(0)).is_err(), "nobody is let in without the list");
    }

    #[test]
    fn a_list_that_cannot_be_read_stays_in_force() {
        let mut fixture = Fixture::new("aa\n");
        let path = fixture.folder.path().join("revoked");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        for _ in 0..3 {
            assert_eq!(fixture.reload(SETTLED), ["aa"]);
        }
        assert!(fixture.revoked.problems()[0].contains("the previous one stays in force"));
        assert!(Revoked::open(path.clone(), Timestamp(0)).is_err(), "nobody is let in without the list");
        fs::remove_dir(&path).unwrap();
        fixture.write("bb\n");
        fixture.reload(SETTLED);
        assert_eq!(fixture.reload(SETTLED), ["bb"]);
    }
}
